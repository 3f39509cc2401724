"""Tables against what `datasets` and pandas read, and files that are none."""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow
import pyarrow.feather
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_framework.data.sources import find_sources, read_file
from hetero_framework.data.splits import SplitReader
from hetero_framework.errors import DataError

pandas = pytest.importorskip("pandas")
ROWS = [{"text": f"row {k}", "scores": [k, 0.5], "more": {"a": k}} for k in range(2300)]


def read(name: str, folder: Path) -> list[dict]:
    said: list[str] = []
    records = SplitReader("train").read(find_sources(name, folder), said.append)
    rows = [record.fields for record in records]
    assert not said
    return rows


_cell = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.tuples(_cell, _cell), min_size=1, max_size=5), tabs=st.booleans())
def test_cells_are_the_texts_that_were_written(
    rows: list[tuple[str, str]], tabs: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter="\t" if tabs else ",", quoting=csv.QUOTE_ALL)
    writer.writerows([("prompt", "completion"), *rows])
    path = tmp_path_factory.mktemp("tables") / ("a.tsv" if tabs else "a.csv")
    path.write_bytes(text.getvalue().encode())
    expected = [{"prompt": one, "completion": other} for one, other in rows]
    assert read(path.name, path.parent) == expected


def test_rows_are_those_of_pandas_without_types(tmp_path: Path) -> None:
    content = 'id,text\r\n007,"a, ""b""\r\nc"\r\n\r\n1.50,\r\nNA, spaces \r\n'
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbf" + content.encode())
    theirs = pandas.read_csv(tmp_path / "a.csv", dtype=str, keep_default_na=False)
    assert read("a.csv", tmp_path) == theirs.to_dict("records")


def _feather(table: pyarrow.Table, path: Path) -> None:
    pyarrow.feather.write_feather(table, str(path), compression="zstd")


def _stream(table: pyarrow.Table, path: Path) -> None:
    _write_stream(table, path, 10_000)


def _write_stream(table: pyarrow.Table, path: Path, rows: int) -> None:
    with (
        pyarrow.OSFile(str(path), "wb") as file,
        pyarrow.ipc.new_stream(file, table.schema) as writer,
    ):
        writer.write_table(table, max_chunksize=rows)


@pytest.mark.parametrize(
    ("name", "write"), [("a.feather", _feather), ("a.arrow", _stream), ("b.arrow", _feather)]
)
def test_arrow_has_the_rows_that_were_written(
    name: str, write: Callable[[pyarrow.Table, Path], None], tmp_path: Path
) -> None:
    write(datasets.Dataset.from_list(ROWS).data.table, tmp_path / name)
    assert read(name, tmp_path) == ROWS


def test_a_folder_of_the_cache_of_datasets_is_read(tmp_path: Path) -> None:
    datasets.Dataset.from_list(ROWS).to_json(str(tmp_path / "rows.jsonl"))
    cached = datasets.Dataset.from_json(
        str(tmp_path / "rows.jsonl"), cache_dir=str(tmp_path / "cache")
    )
    folder = Path(cached.cache_files[0]["filename"]).parent
    assert read(str(folder), tmp_path) == ROWS


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"a;b\n1;2\n", r"a\.csv:1: .*separated by a semicolon, not by a comma"),
        ("a.csv", b"a\tb\n1\t2\n", r"a\.csv:1: .*tab.*\n.*call the file \.tsv"),
        ("a.csv", b"a,b\n1,2\n3\n", r"a\.csv:3: a row of 1 cells under a header of 2 \(a, b\)"),
        ("a.csv", b'a,b\n"1,2\n3,4\n', r"a\.csv:3: unexpected end of data"),
        ("a.csv", b'a,b\n"1"x,2\n', r"a\.csv:2: ',' expected after '\"'"),
        ("a.csv", b"a,a\n1,2\n", r"a\.csv:1: two columns are called 'a'"),
        ("a.csv", b"a,\n1,2\n", r"a\.csv:1: the first line has to name the columns"),
        ("a.csv", b"a,b\n1,\xff\n", r"a\.csv: .* not valid UTF-8"),
        ("a.csv", b"a,b\n", r"a\.csv holds no example"),
        ("a.csv", b"", r"a\.csv holds no example"),
        ("a.csv", b"a\n" + b"x" * (16 * 2**20 + 1), r"a\.csv:2: field larger than field limit"),
        ("a.feather", b"FEA1" + b"\0" * 99, r"a\.feather: damaged Arrow file after row 0"),
        ("a.arrow.gz", gzip.compress(b"ARROW1", mtime=0), r"a\.arrow\.gz is a compressed table"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_that_is_no_table_is_refused_by_its_line(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(read_file(find_sources(name, tmp_path)[0]))


def test_an_arrow_stream_cut_short_is_named_with_the_last_row(tmp_path: Path) -> None:
    table = datasets.Dataset.from_list(ROWS).data.table
    _write_stream(table, tmp_path / "a.arrow", 1000)
    content = (tmp_path / "a.arrow").read_bytes()
    (tmp_path / "a.arrow").write_bytes(content[: len(content) * 2 // 3])
    with pytest.raises(DataError, match=r"a\.arrow: damaged Arrow file after row 1000"):
        list(read_file(find_sources("a.arrow", tmp_path)[0]))
