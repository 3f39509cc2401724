"""Tables against what `datasets` and pandas read, and files that are none."""

from __future__ import annotations

import csv
import gzip
import io
import json
import lzma
import tracemalloc
from decimal import Decimal
from pathlib import Path

import datasets
import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_framework.data.kinds import kind_of
from hetero_framework.data.sources import Numeric, find_sources, read_file
from hetero_framework.data.splits import SplitReader
from hetero_framework.data.train_data import load_data
from hetero_framework.errors import DataError
from tests.unit.data_helpers import make_config, tiny_tokenizer

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
def test_cells_are_the_texts_that_were_written(rows, tabs, tmp_path_factory):
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter="\t" if tabs else ",", quoting=csv.QUOTE_ALL)
    writer.writerows([("prompt", "completion"), *rows])
    path = tmp_path_factory.mktemp("tables") / ("a.tsv" if tabs else "a.csv")
    path.write_bytes(text.getvalue().encode())
    expected = [{"prompt": one, "completion": other} for one, other in rows]
    assert read(path.name, path.parent) == expected


def test_rows_are_those_of_pandas_without_types(tmp_path):
    content = 'id,text\r\n007,"a, ""b""\r\nc"\r\n\r\n1.50,\r\nNA, spaces \r\n'
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbf" + content.encode())
    theirs = pandas.read_csv(tmp_path / "a.csv", dtype=str, keep_default_na=False)
    assert read("a.csv", tmp_path) == theirs.to_dict("records")


def zstandard(content: bytes) -> bytes:
    return pyarrow.compress(content, codec="zstd", asbytes=True)


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
def test_arrow_has_the_rows_that_were_written(name, write, tmp_path):
    write(datasets.Dataset.from_list(ROWS).data.table, tmp_path / name)
    assert read(name, tmp_path) == ROWS


def test_a_folder_of_the_cache_of_datasets_is_read(tmp_path):
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
        ("a.csv", b'a,b\n"1,2\n3,4\n', r"a\.csv:2: unexpected end of data"),
        ("a.csv", b'a,b\n"1\n2",2\n3\n', r"a\.csv:4: a row of 1 cells"),
        ("a.csv", b'a,b\n"1"x,2\n', r"a\.csv:2: ',' expected after '\"'"),
        ("a.csv", b"a,a\n1,2\n", r"a\.csv:1: two columns are called 'a'"),
        ("a.csv", b" a,a \n1,2\n", r"a\.csv:1: two columns are called 'a'"),
        ("a.csv", b"a,\n1,2\n", r"a\.csv:1: the first line .* column 2 has no name"),
        ("a.csv", b",\n1,2\n", r"a\.csv:1: the first line .* column 1 has no name"),
        ("a.csv", b"a,b\n1,2\n\n1,\xff\n", r"a\.csv:4: byte 3 is not valid UTF-8"),
        ("a.csv", b'a\n"x\n\xe9"\n', r"a\.csv:3: byte 1 is not valid UTF-8"),
        ("a.csv", b"a,b\n", r"a\.csv holds no example"),
        ("a.csv", b"", r"a\.csv holds no example"),
        ("a.csv", b"a\n" + b"x" * (16 * 2**20 + 1), r"a\.csv:2: the line is longer than 16 MiB"),
        (
            "a.csv",
            b"a\n1\n" + (b'"%s\n",' % (b"x" * 252)) * 2**17,
            r"a\.csv:3: the row is longer than 16 MiB",
        ),
        (
            "a.csv",
            b'a\n"' + (b"x" * 2**10 + b"\n") * 2**14,
            r"a\.csv:2: the row is longer than 16 MiB",
        ),
        ("a.feather", b"FEA2" + b"\0" * 99, r"a\.feather: damaged Arrow file after row 0"),
        ("a.arrow.gz", gzip.compress(b"ARROW1", mtime=0), r"a\.arrow\.gz is a compressed table"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_that_is_no_table_is_refused_by_its_line(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(read_file(find_sources(name, tmp_path)[0]))


def test_an_arrow_stream_cut_short_is_named_with_the_last_row(tmp_path):
    table = datasets.Dataset.from_list(ROWS).data.table
    _write_stream(table, tmp_path / "a.arrow", 1000)
    content = (tmp_path / "a.arrow").read_bytes()
    (tmp_path / "a.arrow").write_bytes(content[: len(content) * 2 // 3])
    with pytest.raises(DataError, match=r"a\.arrow: damaged Arrow file after row 1000"):
        list(read_file(find_sources("a.arrow", tmp_path)[0]))


HEADERS = [",text", ",,text", ",Unnamed: 0,text", ",Unnamed: 0.1,Unnamed: 0,text", '\ufeff"text",x']


@pytest.mark.parametrize("header", HEADERS)
def test_the_index_of_pandas_has_the_name_that_pandas_reads(header, tmp_path):
    cells = ",".join(map(str, range(header.count(",") + 1)))
    (tmp_path / "a.csv").write_text(f"\n{header}\n{cells}\n", encoding="utf-8")
    theirs = pandas.read_csv(tmp_path / "a.csv", dtype=str)
    assert read("a.csv", tmp_path) == theirs.to_dict("records")


COLUMNS = [
    *(["1", "2"], [" 1", "2 "], ["1e3", "1"], ["+1", "-1"], ["007", "1"], ["inf", "-Infinity"]),
    *(["True", "tRUE", "false"], ["1", "1.5"], ["1_000", "x"], ["0x10", "x"], ["1.", ".5"]),
    *(["18446744073709551615"], ["1e400", "1"], ["yes", "no"], ["", ""], ["1,5", "x"], ["-0"]),
    *(["1d3", "x"], ["true", "false", "half-true"], ["10", "2", "9"], ["\u0661", "x"]),
]


def _typed(columns: tuple[str, ...], or_names: bool, folder: Path) -> list:
    numeric = Numeric(columns, or_names)
    [source] = find_sources("a.csv", folder)
    return [record.fields[columns[-1]] for record in read_file(source, numeric)]


@pytest.mark.parametrize("cells", COLUMNS, ids=repr)
def test_a_column_of_numbers_has_the_type_that_datasets_reads(cells, tmp_path):
    lines = "".join(f'"x","{cell}"\n' for cell in cells)
    (tmp_path / "a.csv").write_text(f"text,label\n{lines}", encoding="utf-8")
    theirs = datasets.load_dataset(
        "csv", data_files=str(tmp_path / "a.csv"), split="train", cache_dir=str(tmp_path / "c")
    )["label"]
    found = _typed(("other", "label"), True, tmp_path)
    assert [(value, type(value)) for value in found] == [(each, type(each)) for each in theirs]


MIXED = [
    (["1", "2", "many"], True, r"a\.csv:4: label is 'many', unlike '1' \(.*a\.csv:2\)"),
    (["good", "1"], True, r"a\.csv:2: label is 'good', unlike '1'"),
    (["0.5", "", "1"], True, r"a\.csv:3: label is '', unlike '0\.5'"),
    (["1", "True"], True, r"a\.csv:3: label is 'True', unlike '1'"),
    (["true", "maybe"], False, r"a\.csv:3: label is 'maybe', unlike 'true'"),
    (["high"], False, r"a\.csv:2: label is 'high', and not a number"),
]


@pytest.mark.parametrize(("cells", "or_names", "message"), MIXED)
def test_a_column_of_several_kinds_is_refused_by_its_row(cells, or_names, message, tmp_path):
    (tmp_path / "a.csv").write_text("text,label\n" + "".join(f"x,{cell}\n" for cell in cells))
    with pytest.raises(DataError, match=message):
        _typed(("label",), or_names, tmp_path)


def _write_all(rows: datasets.Dataset, folder: Path) -> list[str]:
    """The same table as a file of each kind."""
    rows.to_csv(str(folder / "a.csv"), index=True)
    rows.to_csv(str(folder / "a.tsv"), sep="\t")
    rows.to_json(str(folder / "a.jsonl"))
    rows.to_parquet(str(folder / "a.parquet"))
    rows.to_pandas().set_index("text", drop=False).rename_axis(None).to_parquet(
        folder / "i.parquet"
    )
    (folder / "a.json").write_text(json.dumps(rows.to_list()))
    _stream(rows.data.table, folder / "a.arrow")
    _feather(rows.data.table, folder / "a.feather")
    for name, pack in (("a.csv", gzip.compress), ("a.tsv", lzma.compress), ("a.jsonl", zstandard)):
        end = {gzip.compress: "gz", lzma.compress: "xz", zstandard: "zst"}[pack]
        (folder / f"{name}.{end}").write_bytes(pack((folder / name).read_bytes()))
    return sorted(path.name for path in folder.iterdir() if path.is_file())


@pytest.mark.parametrize(
    "labels", [[10, 2, 0], [True, False, True], [0.5, 1.0, -2.0], ["10 a", "2 b", "c"]], ids=repr
)
def test_labels_are_the_same_in_every_kind_of_file(labels, tmp_path):
    rows = datasets.Dataset.from_dict(
        {"text": [f"t{k}" for k in range(len(labels))], "label": labels}
    )
    kind = kind_of("labelled")
    found = {}
    for name in _write_all(rows, tmp_path):
        reader = SplitReader("train", columns={"label": "label"}, numeric=kind.numeric)
        records = list(reader.read(find_sources(name, tmp_path), print))
        classes = kind.labels.find(records, None)
        found[name] = classes, [classes.target(r.fields["label"], r.where) for r in records]
    expected = found["a.parquet"]
    assert len(found) == 11
    assert all(each == expected for each in found.values()), found


def _zstd_arrow(table: pyarrow.Table, path: Path) -> None:
    how = pyarrow.ipc.IpcWriteOptions(compression="zstd")
    with (
        pyarrow.OSFile(str(path), "wb") as file,
        pyarrow.ipc.new_file(file, table.schema, options=how) as writer,
    ):
        writer.write_table(table)


def _parquet(table: pyarrow.Table, path: Path) -> None:
    how = {"dictionary_pagesize_limit": 2**24, "store_schema": False}
    pyarrow.parquet.write_table(table, path, compression="zstd", **how)


_TEXT = "a " * 2**20
_SHARED = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 1000, "int32"), [_TEXT])
_LISTED = pyarrow.ListArray.from_arrays([0, 1000], _SHARED)
_NULLS = pyarrow.ListArray.from_arrays([0, 10**8], pyarrow.nulls(10**8))


@pytest.mark.parametrize(
    ("write", "name"), [(_zstd_arrow, "a.arrow"), (_parquet, "a.parquet")], ids=["arrow", "parquet"]
)
def test_few_bytes_that_hold_many_texts_take_little_memory(write, name, tmp_path):
    """2 GB of rows in a kilobyte; in one row they are refused."""
    write(pyarrow.table({"text": _SHARED}), tmp_path / name)
    [source] = find_sources(name, tmp_path)
    pyarrow.default_memory_pool().release_unused()
    tracemalloc.start()
    assert sum(record.fields["text"] == _TEXT for record in read_file(source)) == 1000
    assert tracemalloc.get_traced_memory()[1] < 80 * 2**20
    tracemalloc.stop()
    for column in (_LISTED, *([_NULLS] * (name == "a.arrow"))):
        write(pyarrow.table({"text": ["a"], "l": column}), tmp_path / name)
        with pytest.raises(DataError, match=rf"{name} row 1: the row is longer than 16 MiB"):
            list(read_file(source))
    write(pyarrow.table({"text": [_TEXT * 160]}), tmp_path / name)
    with pytest.raises(DataError, match=r"group 1 are longer than 16 MiB|takes 320 MiB once"):
        list(read_file(source))


def test_a_column_that_is_there_twice_is_refused_in_every_table(tmp_path):
    one = pyarrow.array(["x"])
    inner = pyarrow.StructArray.from_arrays([one, one], names=["a", "a"])
    for table in (
        pyarrow.Table.from_arrays([one, one], names=["a", "a"]),
        pyarrow.table({"text": one, "m": pyarrow.ListArray.from_arrays([0, 1], inner)}),
    ):
        for write, name in (
            (_zstd_arrow, "a.arrow"),
            (_stream, "b.arrow"),
            (_parquet, "a.parquet"),
        ):
            write(table, tmp_path / name)
            with pytest.raises(DataError, match=r"two columns are called 'a'"):
                list(read_file(find_sources(name, tmp_path)[0]))


@pytest.mark.parametrize(
    "texts", [pyarrow.array(["a", _TEXT], "string_view"), pyarrow.array([Decimal("0.5"), None])]
)
def test_a_dictionary_of_any_type_is_read_within_the_limit(texts, tmp_path):
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([1, 0, 1]), texts)
    _stream(pyarrow.table({"x": column}), tmp_path / "a.arrow")
    expected = [{"x": v if isinstance(v, str | None) else float(v)} for v in column.to_pylist()]
    assert read("a.arrow", tmp_path) == expected
    listed = pyarrow.ListArray.from_arrays([0, 12], column.take(pyarrow.array([0, 1, 2] * 4)))
    _stream(pyarrow.table({"x": listed}), tmp_path / "a.arrow")
    if texts.type == "string_view":
        with pytest.raises(DataError, match=r"a\.arrow row 1: the row is longer than 16 MiB"):
            read("a.arrow", tmp_path)


def _features(about: bytes) -> pyarrow.Table:
    return pyarrow.table({"a": ["x"]}).replace_schema_metadata({"huggingface": about})


_OF_NEWER = b'{"info": {"features": {"a": {"_type": "Newer"}}}}'


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (pyarrow.table({"a": pyarrow.array([b"\xff"]).view("string")}), "0: 'utf-8' codec"),
        (pyarrow.table({"a": pyarrow.array([2**62]).view(pyarrow.timestamp("us"))}), "0: date"),
        (pyarrow.table({"a": pyarrow.array(["{"], pyarrow.json_())}), "1: Expecting property"),
        (_features(_OF_NEWER), r"0: features .* Feature type 'Newer' not found"),
        (_features(b"[{"), "0: features .*: Expecting"),
        (_features(b'{"info": null}'), "0: features"),
    ],
)
@pytest.mark.parametrize(
    ("write", "name"), [(_stream, "a.arrow"), (_feather, "b.feather"), (_parquet, "a.parquet")]
)
def test_a_value_that_cannot_be_read_is_named(table, message, write, name, tmp_path):
    if write is _parquet:
        pyarrow.parquet.write_table(table, tmp_path / name)
    else:
        write(table, tmp_path / name)
    with pytest.raises(DataError, match=rf"{name} cannot be read behind row {message}"):
        read(name, tmp_path)


def test_decimals_are_the_numbers_that_a_text_table_has(tmp_path):
    cells = {"whole": ["10", "2"], "part": ["0.50", "2.00"]}
    decimals = {name: [Decimal(cell) for cell in cells[name]] for name in cells}
    _stream(pyarrow.table({**decimals, "l": [decimals["whole"]] * 2}), tmp_path / "a.arrow")
    found = read("a.arrow", tmp_path)
    for name, column in cells.items():
        (tmp_path / "a.csv").write_text("\n".join(["label", *column, ""]))
        expected = _typed(("label",), True, tmp_path)
        assert repr([row[name] for row in found]) == repr(expected)
    assert repr(found[0]["l"]) == "[10, 2]"


def test_names_of_classes_are_texts(tmp_path):
    about = b'{"info": {"features": {"a": {"_type": "ClassLabel", "names": [5, 7]}}}}'
    table = pyarrow.table({"a": [1, 0]}).replace_schema_metadata({"huggingface": about})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert {row["a"].names for row in read("a.parquet", tmp_path)} == {("5", "7")}


@pytest.mark.parametrize("more", [b"junk", None], ids=["junk", "a second stream"])
def test_a_stream_with_more_behind_its_end_is_refused(more, tmp_path):
    """Its rows would be lost: pyarrow reads one stream."""
    _stream(pyarrow.table({"a": ["x"]}), tmp_path / "a.arrow")
    once = (tmp_path / "a.arrow").read_bytes()
    (tmp_path / "a.arrow").write_bytes(once + (more or once))
    with pytest.raises(DataError, match=r"after row 1 \(more follows the end of its stream"):
        read("a.arrow", tmp_path)


@pytest.mark.parametrize("content", ["a\n1\n  \n \t\n2\n \n", 'a,b\n  \n"1\n \n2",3\n\t\n'])
def test_lines_of_spaces_are_left_out_as_in_pandas(content, tmp_path):
    (tmp_path / "a.csv").write_text(content)
    theirs = pandas.read_csv(tmp_path / "a.csv", dtype=str)
    assert read("a.csv", tmp_path) == theirs.to_dict("records")


def test_a_column_without_cells_does_not_hide_the_next_one(tmp_path):
    (tmp_path / "a.csv").write_text("text,label,labels\nx,,10\ny,,2\n")
    (tmp_path / "b.csv").write_text("label,labels\n5,0.5\nx,1\n")
    numeric = kind_of("labelled").numeric
    for name, columns, labels in (("a.csv", None, [10, 2]), ("b.csv", {"text": "label"}, [0.5, 1])):
        reader = SplitReader("train", columns=columns, numeric=numeric)
        rows = [record.fields for record in reader.read(find_sources(name, tmp_path), print)]
        assert [row["labels"] for row in rows] == labels
        assert [row.get("label") for row in rows] == [None, None]


WORDS = ["maybe", "true"]


@pytest.mark.parametrize(
    ("given", "cells", "numbers"),
    [
        ([*WORDS, "false"], ["true", "false"], [2, 0]),
        (["True", "None", "False"], ["True"], [2]),
        (WORDS, ["true"], [1]),
        (WORDS, ["false"], "label false may be a class's number, maybe"),
        (["b", "a"], ["1", "0"], [1, 0]),
        (["b", "a"], ["true", "false"], [1, 0]),
    ],
    ids=repr,
)
def test_true_and_false_are_the_names_that_the_classes_have(given, cells, numbers, tmp_path):
    """A held-out file may hold no other of the names, so that its column looks like numbers."""
    for name, labels in (("train.csv", given), ("eval.csv", cells)):
        lines = "".join(f"The fox {k},{label}\n" for k, label in enumerate(labels))
        (tmp_path / name).write_text(f"text,label\n{lines}")
    config = make_config(
        tmp_path, {"train": "train.csv", "eval": "eval.csv"}, objective="classification"
    )
    if isinstance(numbers, str):
        with pytest.raises(DataError, match=numbers):
            load_data(config, tiny_tokenizer())
    else:
        assert load_data(config, tiny_tokenizer()).eval_sets[""].targets[:, 0].tolist() == numbers


def test_an_old_feather_file_is_named(tmp_path):
    (tmp_path / "a.feather").write_bytes(b"FEA1" + bytes(99))
    with pytest.raises(DataError, match=r"a\.feather is a Feather file of version 1"):
        list(read_file(find_sources("a.feather", tmp_path)[0]))
