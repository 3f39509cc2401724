"""Examples as a run reads them."""

from __future__ import annotations

from hetero_framework.extras.observe.shown import shown_examples
from tests.installed import needs
from tests.unit.data.test_conversations import CHAT, TOOLS
from tests.unit.data_helpers import CHATML, make_config, tiny_tokenizer, write_jsonl


@needs("mixtures")
def test_the_source_of_each_example_is_shown(tmp_path):
    for name in ("first", "second", "third"):
        rows = [{"text": f"{name} {number}"} for number in range(4)]
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
    sources = [{"path": "first.jsonl"}, {"path": "second.jsonl", "name": "other"}, "third.jsonl"]
    shown = shown_examples(make_config(tmp_path, {"train": sources}), tiny_tokenizer(), 4)
    places = [example.where for example in shown]
    files = [tmp_path / f"{name}.jsonl:1" for name in ("first", "second", "third")]
    assert places == [f"first: {files[0]}", f"other: {files[1]}", f"third: {files[2]}"]


def test_left_out_fields_are_shown_with_their_example(tmp_path):
    rows = [{"messages": CHAT, "id": 1}, {"messages": CHAT, "tools": TOOLS}, {"messages": CHAT}]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    config = make_config(tmp_path, {"train": "rows.jsonl"})
    shown = shown_examples(config, tiny_tokenizer(CHATML), 3)
    assert [example.left_out for example in shown] == [["the fields id"], ["tools"], []]


@needs("mixtures")
def test_no_more_of_a_source_is_shown_than_a_run_takes(tmp_path):
    write_jsonl(tmp_path / "rows.jsonl", [{"text": f"row {number}"} for number in range(4)])
    sources = [{"path": "rows.jsonl", "name": f"{n}", "max_samples": n} for n in (1, 2)]
    shown = shown_examples(make_config(tmp_path, {"train": sources}), tiny_tokenizer(), 8)
    assert len(shown) == 3
