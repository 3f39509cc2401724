from __future__ import annotations

import gzip
import json
from pathlib import Path

import datasets
import pytest

from hetero_framework.data import sources
from hetero_framework.data.sources import find_sources, read_records
from hetero_framework.errors import DataError
from tests.unit.data_helpers import write_jsonl

ROWS = [{"text": "one"}, {"text": "zwei ü"}, {"text": "three"}]


def read(spec: str | list[str], base_dir: Path, **options: str) -> list[dict]:
    found = find_sources(spec, base_dir)
    return [record.fields for source in found for record in read_records(source, **options)]


def as_jsonl(rows: list[dict]) -> str:
    return "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", as_jsonl(ROWS).encode()),
        ("newline_at_end.jsonl", as_jsonl(ROWS).encode() + b"\n"),
        ("bom.jsonl", b"\xef\xbb\xbf" + as_jsonl(ROWS).encode()),
        ("crlf.jsonl", as_jsonl(ROWS).replace("\n", "\r\n").encode() + b"\r\n"),
        ("blank.jsonl", as_jsonl(ROWS).replace("\n", "\n\n  \n").encode() + b"\n\n"),
        ("a.jsonl.gz", gzip.compress(as_jsonl(ROWS).encode(), mtime=0)),
        ("renamed_gzip.jsonl", gzip.compress(as_jsonl(ROWS).encode(), mtime=0)),
        ("list.json", json.dumps(ROWS, indent=2).encode()),
        ("list_in_a_line.json", b"\xef\xbb\xbf" + json.dumps(ROWS).encode()),
        ("data.json", json.dumps({"data": ROWS}).encode()),
        ("data_and_more.json", json.dumps({"version": 1, "data": ROWS}).encode()),
        ("lines.json", as_jsonl(ROWS).encode()),
        ("upper.JSONL", as_jsonl(ROWS).encode()),
        ("plain.txt", "one\nzwei ü\nthree".encode()),
        ("plain_end.txt", "one\r\nzwei ü\r\nthree\r\n".encode()),
    ],
)
def test_read_records_each_kind_of_text_file_gives_the_same_rows(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert read(name, tmp_path) == ROWS


def test_read_records_text_lines_equal_the_datasets_loader(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\n\n two \r\nthree\n\n")
    loaded = datasets.load_dataset(
        "text", data_files=str(tmp_path / "a.txt"), split="train", cache_dir=str(tmp_path / "c")
    )
    assert read("a.txt", tmp_path) == list(loaded)


def test_read_records_parquet_is_read_also_under_another_name(tmp_path):
    datasets.Dataset.from_list(ROWS).to_parquet(str(tmp_path / "a.parquet"))
    (tmp_path / "b.jsonl").write_bytes((tmp_path / "a.parquet").read_bytes())
    assert read("a.parquet", tmp_path) == ROWS
    assert read("b.jsonl", tmp_path) == ROWS


def test_read_records_saved_dataset_and_its_splits(tmp_path):
    rows = datasets.Dataset.from_list(ROWS)
    rows.save_to_disk(str(tmp_path / "one"))
    splits = {"train": rows, "test": rows.select([0])}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "two"))
    assert read("one", tmp_path) == ROWS
    assert read("two", tmp_path) == ROWS
    assert read("two", tmp_path, split="test") == ROWS[:1]
    with pytest.raises(DataError, match=r"no split 'dev', only 'train', 'test'"):
        read("two", tmp_path, split="dev")


def test_find_sources_patterns_are_sorted_and_lists_keep_their_order(tmp_path):
    for name in "bca":
        write_jsonl(tmp_path / f"{name}.jsonl", [{"text": name}])
    assert read("*.jsonl", tmp_path) == [{"text": "a"}, {"text": "b"}, {"text": "c"}]
    assert read(["c.jsonl", "a.jsonl"], tmp_path) == [{"text": "c"}, {"text": "a"}]
    assert read(str(tmp_path / "b.jsonl"), tmp_path) == [{"text": "b"}]


def test_find_sources_brackets_in_names_are_not_a_pattern(tmp_path):
    folder = tmp_path / "runs[1]"
    folder.mkdir()
    write_jsonl(folder / "a[1].jsonl", ROWS)
    assert read("a[1].jsonl", folder) == ROWS
    assert read("*.jsonl", folder) == ROWS


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": 1}\n\nnope {', r"a\.jsonl:3: not JSON \(.* column 1\): nope \{"),
        ("a.jsonl", b'{"text": "' + b"x" * 100, r"a\.jsonl:1: not JSON .*: .{60}\.\.\.$"),
        ("a.jsonl", b'{"t": 1}\n[1, 2]', r"a\.jsonl:2: expected a JSON object, found a list"),
        ("a.jsonl", b'{"t": "', r"\(Unterminated string starting at column 7\)"),
        ("a.jsonl", b"null", r"a\.jsonl:1: expected a JSON object, found null"),
        ("a.jsonl", b'{"t": 1}\n{"t": "\xff"}', r"a\.jsonl:2: byte 8 is not valid UTF-8"),
        ("a.jsonl", b"[" * 100_000, r"a\.jsonl:1: (too deep|not JSON)"),
        ("a.jsonl", b'{"t": ' + b"1" * 5000 + b"}", r"a\.jsonl:1: too deep or too long a value"),
        ("a.json", b'[{"t": ' + b"1" * 5000 + b"}]", r"a\.json:1: too deep or too long a value"),
        ("a.jsonl", b"\xff\xfe{\x00", r"UTF-16"),
        ("a.txt", b"fine\nna\xefve", r"a\.txt:2: byte 3 is not valid UTF-8"),
        ("a.json", b'[{"t": 1},\n {"t": }]', r"a\.json:2: not JSON \(.*column 8\)"),
        ("a.json", b'[{"t": 1}\n {"t": 2}]', r"a\.json:2: not JSON, expected ',' or '\]'"),
        ("a.json", b'[{"t": 1},\n 7]', r"a\.json:2: expected a JSON object, found a number"),
        ("a.json", b'[{"t": 1}', r"a\.json:1: not JSON, expected ','"),
        ("a.json", b'[{"t": 1},\n]', r"a\.json:2: not JSON, a comma before the closing"),
        ("a.json", b'[{"t": 1},', r"a\.json:1: not JSON, the list does not end"),
        ("a.jsonl", b'{"t": 1} {"t": 2}', r"a\.jsonl:1: not JSON after column 8"),
        ("a.json", b'"text"', r"a\.json: expected a list of objects"),
        ("a.json", b'{"data": [{"t": 1},\n7]}', r"a\.json:2: expected a JSON object"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"t": 1}' * 99, mtime=0)[:-9],
            r"a\.jsonl\.gz: damaged gzip",
        ),
        ("a.parquet", b"PAR1 and nothing else", r"a\.parquet: damaged Parquet file"),
        ("a.parquet", b"hello", r"a\.parquet is not a Parquet file"),
        ("a.jsonl", b"\x80\x04}\x94.", r"a\.jsonl holds pickle data"),
        ("a.jsonl", b"PK\x03\x04", r"a\.jsonl holds zip data"),
        ("a.pkl", b"", r"pickled format, which can run code"),
        ("a.pt", b"PK\x03\x04", r"pickled format, which can run code"),
        ("a.csv", b"text\nhello", r"a\.csv: unknown kind of file \.csv"),
    ],
)
def test_read_records_bad_file_names_file_and_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(name, tmp_path)


def test_read_records_line_over_the_limit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 2**20)
    (tmp_path / "a.jsonl").write_bytes(b'{"t": 1}\n{"t": "' + b"x" * 2**20 + b'"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: the line is longer than 1 MiB"):
        read("a.jsonl", tmp_path)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("absent.jsonl", "data file not found: absent.jsonl"),
        ("absent/*.jsonl", r"no file matches absent/\*\.jsonl"),
        ("some/deep/path", "data file not found"),
        ("train.jsnol", "data file not found: train.jsnol"),
        ("folder/misspelt", "data file not found: folder/misspelt"),
        ([], "list of data files is empty"),
        (".", "not one that datasets.save_to_disk wrote"),
    ],
)
def test_find_sources_absent_says_where_it_looked(tmp_path, spec, message):
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=message):
        find_sources(spec, tmp_path)


def test_read_records_hub_name_without_network_is_a_clear_error(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="someone/no-such-dataset"):
        read("someone/no-such-dataset", tmp_path)


def test_read_records_damaged_saved_dataset_is_a_clear_error(tmp_path):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").write_text("{}")
    with pytest.raises(DataError, match="saved"):
        read("saved", tmp_path)
