from __future__ import annotations

import gzip
import json
import lzma
import re
import tracemalloc
import zlib
from pathlib import Path

import datasets
import pyarrow
import pytest
from trl.trainer.utils import remove_none_values

from hetero_framework import registry
from hetero_framework.data import sources
from hetero_framework.data.files import json_list
from hetero_framework.data.sources import Record, find_sources
from hetero_framework.data.splits import SplitReader
from hetero_framework.errors import DataError
from tests.unit.data_helpers import write_jsonl

ROWS = [{"text": "one"}, {"text": "zwei ü"}, {"text": "three"}]


def read(
    spec: str | list[str], base_dir: Path, split: str = "train", said: list[str] | None = None
) -> list[dict]:
    say = print if said is None else said.append
    records = SplitReader(split).read(find_sources(spec, base_dir), say)
    return [record.fields for record in records]


def zstandard(content: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


def gzipped(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)


def as_jsonl(rows: list[dict]) -> str:
    return "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)


LINES = as_jsonl(ROWS).encode()
POINTER = b"version https://git-lfs.github.com/spec/v1\noid"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", LINES),
        ("newline_at_end.jsonl", LINES + b"\n"),
        ("bom.jsonl", b"\xef\xbb\xbf" + LINES),
        ("crlf.jsonl", as_jsonl(ROWS).replace("\n", "\r\n").encode() + b"\r\n"),
        ("blank.jsonl", as_jsonl(ROWS).replace("\n", "\n\n  \n").encode() + b"\n\n"),
        ("a.jsonl.gz", gzipped(LINES)),
        ("a.jsonl.xz", lzma.compress(LINES)),
        ("a.jsonl.zst", zstandard(LINES)),
        ("renamed_gzip.jsonl", gzipped(LINES)),
        ("list.json", json.dumps(ROWS, indent=2).encode()),
        ("list_in_a_line.json", b"\xef\xbb\xbf" + json.dumps(ROWS).encode()),
        ("data.json", json.dumps({"data": ROWS}).encode()),
        ("data_and_more.json", json.dumps({"version": 1, "data": ROWS}).encode()),
        ("lines.json", LINES),
        ("data_first.json", json.dumps({"data": ROWS, "version": {"of": [1]}}).encode()),
        ("upper.JSONL", LINES),
        ("plain.txt", "one\nzwei ü\nthree".encode()),
        ("plain_end.txt", "one\r\nzwei ü\r\nthree\r\n".encode()),
    ],
)
def test_read_records_each_kind_of_text_file_gives_the_same_rows(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert read(name, tmp_path) == ROWS


def test_read_records_text_lines_equal_the_datasets_loader(tmp_path):
    other = "form\x0cfeed\x0bnext\x85line\u2028sep\u2029\x1c\ufefftext"
    lines = f"one\n\n two \r\nthree\n\nmac\rold\r\r\nend \r\n\n\rx{other}\r\r\ny\r"
    (tmp_path / "a.txt").write_bytes(lines.encode())
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
        ("a.txt", b"one\rtwo \xff\r\n", r"a\.txt:2: byte 5 is not valid UTF-8"),
        ("a.jsonl", b'{"a": ' + b"[" * 100_000, r"a\.jsonl:1: (too deep|not JSON)"),
        ("a.jsonl", b'[\n {"text": "a"}\n]', r"a\.jsonl:1: expected .* goes into a \.json file"),
        ("a.jsonl", b'[{"text": "a"}]', r"a\.jsonl:1: expected .* goes into a \.json file"),
        ("a.jsonl", b'{\n "text": "a"\n}', r"a\.jsonl:1: not JSON .* each line is one object"),
        ("a.jsonl", b'{"t": 1}\n{"t": 1, "t": 2}', r'a\.jsonl:2: t: the key "t" is given twice'),
        ("a.jsonl", b'{"messages": [{"role": "user"}, {"role": "a", "content": "b", "role": "c"}]}',
         r'a\.jsonl:1: messages\[1\]\.role: the key "role" is given twice in one object'),
        ("a.json", b'[{"t": 1},\n {"u": {"t": 1, "t": 1}}]', r"a\.json:2: u\.t: the key"),
        ("a.json", b'{"data": [{"t": 1}],\n "data": [{"t": 2}]}', r"json:2: data: the key"),
        ("a.json", b'{"v": 1, "data": [{"t": 1}], "v": 2}', r"json:1: v: the key"),
        ("a.json", b'{"v": 1, 2: 3}', r"json:1: not JSON, a key must be a text: 2"),
        ("a.json", b'[{"t": 1},\n {"t": "\xe9"}]', r"json:2: there is a byte that is not valid"),
        ("a.json", b'{"v": 1, "data": [{"t": 1}], "data": []}', r"json:1: data: the key"),
        ("a.json", b'[{"t": 1}]\n[{"t": 2}]', r"a\.json:2: not JSON, more follows the list"),
        ("a.json", b'{"data": [{"t": 1}]}\n{"t": 2}', r"json:2: not JSON, more follows the list"),
        ("a.jsonl", POINTER, "Git LFS .*git lfs pull"),
        ("a.parquet", POINTER, "a Git LFS pointer"),
        ("a.jsonl.gz", gzipped(POINTER), "Git LFS"),
        ("a.json", b"\n<!DOCTYPE html><html>", r"a\.json is an HTML page, not the data"),
        ("a.jsonl", '{"text": "a"}'.encode("utf-16-le"), r"a\.jsonl holds UTF-16 text"),
        ("a.txt", '{"text": "a"}'.encode("utf-16-be"), r"a\.txt holds UTF-16 text"),
        ("a.jsonl", b"", r"a\.jsonl holds no example: it is empty"),
        ("a.jsonl.gz", gzipped(b""), r"a\.jsonl\.gz holds no example: it is empty"),
        ("a.parquet", b"", r"a\.parquet holds no example: it is empty"),
        ("a.jsonl", b" \n\n", r"a\.jsonl holds no example"),
        ("a.json", b"[]", r"a\.json holds no example"),
        ("a.parquet.gz", gzipped(b"PAR1"), r"a\.parquet\.gz is compressed Parquet"),
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
        ("a.jsonl.gz", gzipped(b'{"t": 1}' * 99)[:-9], r"a\.jsonl\.gz: damaged gzip"),
        ("a.jsonl.xz", lzma.compress(b'{"t": 1}' * 99)[:-9], r"a\.jsonl\.xz: damaged xz file"),
        ("a.jsonl.zst", zstandard(b'{"t": 1}\n' * 9999)[:-9],
         r"a\.jsonl\.zst: Truncated compressed stream"),
        ("a.parquet", b"PAR1 and nothing else", r"a\.parquet: damaged Parquet file"),
        ("a.parquet", b"hello", r"a\.parquet is not a Parquet file"),
        ("a.jsonl", b"\x80\x04}\x94.", r"a\.jsonl holds pickle data"),
        ("a.jsonl", b"PK\x03\x04", r"a\.jsonl holds zip data"),
        ("a.pkl", b"", r"pickled format, which can run code"),
        ("a.pt", b"PK\x03\x04", r"pickled format, which can run code"),
        ("a.xlsx", b"PK", r"a\.xlsx: unknown kind of file \.xlsx"),
    ],
)  # fmt: skip
def test_read_records_bad_file_names_file_and_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        read(name, tmp_path)
    assert re.search(message, str(caught.value), re.DOTALL | re.MULTILINE)


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
        ("folder", "the folder folder holds no file that can be read"),
    ],
)
def test_find_sources_absent_names_the_searched_place(tmp_path, spec, message):
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


SPLITS = [
    *("train", "train[:2]", "train[2:]", "train[-3:]", "train[:10%]", "train[10%:55%]"),
    *("train[:-20%]", "train[3:100]", "train[:2]+train[-1:]"),
]


@pytest.mark.parametrize("split", SPLITS)
def test_a_split_of_files_is_that_of_load_dataset(tmp_path, split):
    rows = [{"text": f"row {number}"} for number in range(11)]
    write_jsonl(tmp_path / "a.jsonl", rows[:4])
    write_jsonl(tmp_path / "b.jsonl", rows[4:])
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "c.parquet"))
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "d.txt").write_text("".join(row["text"] + "\n" for row in rows))
    (tmp_path / "e.json").write_text(json.dumps(rows))
    files = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    expected = datasets.load_dataset(
        "json", data_files=files, split=split, cache_dir=str(tmp_path / "cache")
    ).to_list()
    assert 0 < len(expected) <= 11
    for spec in (["a.jsonl", "b.jsonl"], "[ab].jsonl", "c.parquet", "saved", "d.txt", "e.json"):
        assert read(spec, tmp_path, split) == expected


def folder_of(files: dict[str, str], folder: Path) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)


TRAIN, TEST = as_jsonl([{"text": f"train {n}"} for n in range(5)]), as_jsonl([{"text": "test"}])
README = """---
configs:
- config_name: one
  default: true
  data_files:
  - {split: train, path: "first/*.jsonl"}
  - {split: validation, path: other.jsonl}
- config_name: two
  data_files: other.jsonl
---
"""


@pytest.mark.parametrize("split", ["train", "train[1:3]", "test", "validation", "train+test"])
@pytest.mark.parametrize(
    "files",
    [
        {"train.jsonl": TRAIN, "test.jsonl": TEST},
        {"data/train-00000-of-00002.jsonl": TRAIN, "data/train-00001-of-00002.jsonl": TEST,
         "data/validation-00000-of-00001.jsonl": TEST},
        {"my_train.json": f"[{TRAIN.replace(chr(10), ',')}]", "my-dev.json": f"[{TEST}]"},
        {"train/a.txt": "a\nb\nc\n", "test/b.txt": "d\n", "README.md": "# no splits"},
        {"a.jsonl": TRAIN, "b.jsonl": TEST},
        {"first/x.jsonl": TRAIN, "other.jsonl": TEST, "README.md": README},
        {"train.parquet": "", "eval.parquet": ""},
    ],
)  # fmt: skip
def test_a_folder_has_the_splits_of_load_dataset(tmp_path, files, split):
    folder = tmp_path / "folder"
    folder_of(files, folder)
    for file in folder.glob("*.parquet"):
        datasets.Dataset.from_list([{"text": file.name}] * 4).to_parquet(str(file))
    cache = str(tmp_path / "cache")
    try:
        expected = datasets.load_dataset(str(folder), split=split, cache_dir=cache).to_list()
    except (ValueError, KeyError):
        text = r"folder has no split '(test|validation)', only 'train'"
        with pytest.raises(DataError, match=text):
            read("folder", tmp_path, split)
    else:
        assert read("folder", tmp_path, split) == expected


def test_a_folder_names_the_files_that_are_in_no_split(tmp_path):
    hidden = {"f/.hidden.jsonl": TEST, "f/.git/a.csv": TEST, "f/README.md": "", "f/LICENSE": ""}
    folder_of({"f/train.jsonl": TRAIN, "f/more.jsonl": TEST, **hidden}, tmp_path)
    said: list[str] = []
    assert len(read("f", tmp_path, said=said)) == 5
    assert said == ["warning: f also holds more.jsonl, in no split, which is not read"]
    folder_of(dict.fromkeys(("f/a.csv", "f/b.jsonl.zst", "f/sub/c.arrow"), TEST), tmp_path)
    read("f", tmp_path, said=said)
    shown = "a.csv, b.jsonl.zst, more.jsonl and 1 more"
    assert said[1:] == [f"warning: f also holds {shown}, in no split, which is not read"]


def test_a_pattern_that_matches_a_folder_reads_it_or_is_refused(tmp_path):
    folder_of({"f/sub.jsonl": TRAIN, "f/sub/more.jsonl": TEST}, tmp_path)
    with pytest.raises(DataError, match=r"f/\* matches the folder f/sub, which is not read"):
        read("f/*", tmp_path)
    assert len(read("f/**", tmp_path)) == len(read(["f/*.jsonl", "f/sub/*"], tmp_path))


def test_a_subset_of_a_folder_is_chosen_by_its_readme(tmp_path):
    folder_of({"first/x.jsonl": TRAIN, "other.jsonl": TEST, "README.md": README}, tmp_path)
    found = find_sources(".", tmp_path)
    records = SplitReader("train", dataset_config="two").read(found, print)
    assert [record.fields for record in records] == [{"text": "test"}]
    with pytest.raises(DataError, match=r"'three' not found. Available: \['one', 'two'\]"):
        list(SplitReader("train", dataset_config="three").read(found, print))


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("validation", r"a\.jsonl has no split 'validation', only 'train'"),
        ("validation[:2]", r"a\.jsonl has no split 'validation', only 'train'"),
        ("train[:2", r"the split 'train\[:2' of a\.jsonl cannot be taken: Unrecognized"),
        ("train[:0.5]", "cannot be taken: Unrecognized"),
        ("train[:2%:3]", "cannot be taken: Unrecognized"),
        ("train[:200%]", "cannot be taken"),
        ("train[:5%](pct1_dropremainder)", "cannot be taken: .*less than 100"),
        ("train[5:]", r"a\.jsonl: the split train\[5:\] holds no example"),
        ("train+nothing", r"a\.jsonl has no split 'nothing'"),
    ],
)
def test_a_split_that_cannot_be_taken_is_refused(tmp_path, split, message):
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(DataError, match=message):
        read("a.jsonl", tmp_path, split)


@pytest.mark.skipif(not hasattr(datasets, "Json"), reason="datasets has no type for it yet")
def test_columns_of_json_are_read_and_filled_nulls_left_out(tmp_path):
    rows = [
        {"m": [{"role": "a", "args": {"x": None, "y": [1, None]}}, {"n": None}], "o": None},
        {"m": [{"role": "b", "args": {}}], "o": {"p": 1, "q": {"r": 2}}},
    ]
    inner = {"p": datasets.Value("int64"), "q": datasets.Json()}
    features = datasets.Features({"m": datasets.List(datasets.Json()), "o": inner})
    stored = datasets.Dataset.from_list(rows, features=features)
    stored.to_parquet(str(tmp_path / "a.parquet"))
    stored.save_to_disk(str(tmp_path / "saved"))
    assert read("a.parquet", tmp_path) == read("saved", tmp_path) == rows
    typed = [{"o": {"a": 1, "b": {"c": None}}, "l": [{"d": 1}, {"e": [{"f": 2}, {"g": 3}]}]}, {}]
    stored = datasets.Dataset.from_list(typed)
    stored.to_parquet(str(tmp_path / "b.parquet"))
    stored.save_to_disk(str(tmp_path / "other"))
    first = {"o": {"a": 1, "b": {}}, "l": [{"d": 1}, {"e": [{"f": 2}, {"g": 3}]}]}
    assert remove_none_values(stored[0]) == first
    for name in ("b.parquet", "other"):
        assert read(name, tmp_path) == [first, {"o": None, "l": None}]


def test_pictures_in_a_saved_dataset_are_not_decoded(tmp_path):
    features = datasets.Features({"text": datasets.Value("string"), "image": datasets.Image()})
    rows = [{"text": "a", "image": {"bytes": b"no picture", "path": None}}]
    datasets.Dataset.from_list(rows, features=features).save_to_disk(str(tmp_path / "saved"))
    [row] = read("saved", tmp_path)
    assert row == {"text": "a", "image": {"bytes": b"no picture"}}


def test_rows_of_a_selection_that_was_saved_are_its_own(tmp_path):
    rows = datasets.Dataset.from_list([{"n": number} for number in range(2500)])
    chosen = rows.select(range(2400, 3, -3))
    chosen.save_to_disk(str(tmp_path / "saved"))
    assert read("saved", tmp_path, "train[2:]") == chosen.to_list()[2:]


def test_columns_take_the_names_of_a_format(tmp_path):
    rows = [{"question": "One?", "answer": "Two.", "prompt": 1, "id": 7}]
    write_jsonl(tmp_path / "a.jsonl", rows)

    def renamed(**columns: str) -> list[dict]:
        reader = SplitReader("train", columns=columns)
        return [r.fields for r in reader.read(find_sources("a.jsonl", tmp_path), print)]

    expected = {"prompt": "One?", "completion": "Two.", "number": 1, "id": 7}
    assert renamed(prompt="question", completion="answer", number="prompt") == [expected]
    with pytest.raises(DataError, match=r"a.jsonl:1: data.columns calls question prompt"):
        renamed(prompt="question")
    with pytest.raises(DataError, match=r"a.jsonl:1: .* the column q, and the columns are q"):
        renamed(prompt="q")


def test_a_kind_of_file_is_one_entry_of_the_registry(tmp_path, monkeypatch):
    """An unknown kind is refused with those that there are."""
    (tmp_path / "a.bars").write_text("one\ntwo\n")
    with pytest.raises(DataError, match="unknown kind of file"):
        find_sources("a.bars", tmp_path)
    monkeypatch.setattr(registry, "_registered", {})

    def records(path):
        return (Record(str(path), {"text": line}) for line in path.read_text().split())

    registry.register("files", ".bars", records)
    assert read("a.bars", tmp_path) == [{"text": "one"}, {"text": "two"}]
    (tmp_path / "a.odd").write_text("one")
    with pytest.raises(DataError, match=r"kind of file \.odd\n.*\.jsonl, .*\.txt, .*\.bars"):
        find_sources("a.odd", tmp_path)


def test_xz_of_several_streams_is_read_to_its_end(tmp_path):
    one = lzma.compress(LINES + b"\n")
    (tmp_path / "a.jsonl.xz").write_bytes(one + bytes(8) + one + one + bytes(4))
    assert read("a.jsonl.xz", tmp_path) == ROWS * 3


def test_xz_that_asks_for_much_memory_is_refused(tmp_path):
    packed = bytearray(lzma.compress(LINES))
    end = 12 + 4 * packed[12]  # of the first block's header, before its checksum
    assert packed[14:16] == b"\x21\x01"  # LZMA2 and the size of its settings
    packed[16] = 39  # 3 GiB
    packed[end : end + 4] = zlib.crc32(packed[12:end]).to_bytes(4, "little")
    (tmp_path / "a.jsonl.xz").write_bytes(packed)
    with pytest.raises(DataError, match=r"a\.jsonl\.xz: damaged xz file \(Memory usage limit"):
        read("a.jsonl.xz", tmp_path)


def test_a_saved_set_without_rows_is_named(tmp_path):
    datasets.Dataset.from_dict({"text": []}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(DataError, match="saved"):
        read("saved", tmp_path)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64])
def test_json_is_the_same_whatever_part_of_it_is_read_at_once(tmp_path, chunk, monkeypatch):
    odd = {"text": 'a"\\ü\U0001f600\n', "n": -1.5e-3, "l": [[], {}, True, None]}
    rows = [odd, {"text": "b"}] * 3
    whole = json.dumps({"v": 12, "data": rows, "w": [1]})
    monkeypatch.setattr(json_list, "_CHUNK", chunk)
    for text in (json.dumps(rows, indent=1), whole, as_jsonl(rows)):
        (tmp_path / "a.json").write_bytes(text.encode())
        assert read("a.json", tmp_path) == rows
    (tmp_path / "a.json").write_text('[{"t": 1},\n {"t": 1}, {"t": }]')
    with pytest.raises(DataError, match=r"a\.json:2: not JSON \(.*column 18\)"):
        read("a.json", tmp_path)


@pytest.mark.parametrize(
    "begin", ['[{"text": "', '{"v": "', '{"data": [{"t": ["', "[[", '{"v": [1,']
)
def test_json_without_an_end_takes_little_memory(tmp_path, begin, monkeypatch):
    monkeypatch.setattr(json_list, "MAX_LINE_BYTES", 2**17)
    with gzip.open(tmp_path / "a.json.gz", "wb", 1) as file:
        file.write(b"\n" + begin.encode())
        file.write(b"1," * 2**23)
    tracemalloc.start()
    with pytest.raises(DataError, match=r"a\.json\.gz:2: the object is longer than 0 MiB"):
        read("a.json.gz", tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 5 * 2**20
    tracemalloc.stop()
