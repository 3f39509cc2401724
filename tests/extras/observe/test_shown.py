"""Examples as a run reads them."""

from __future__ import annotations

from hetero_framework.extras.observe.shown import shown_examples
from tests.unit.data.test_conversations import CHAT, TOOLS
from tests.unit.data_helpers import CHATML, make_config, tiny_tokenizer, write_jsonl


def test_left_out_fields_are_shown_with_their_example(tmp_path):
    rows = [{"messages": CHAT, "id": 1}, {"messages": CHAT, "tools": TOOLS}, {"messages": CHAT}]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    config = make_config(tmp_path, {"train": "rows.jsonl"})
    shown = shown_examples(config, tiny_tokenizer(CHATML), 3)
    assert [example.left_out for example in shown] == [["the fields id"], ["tools"], []]
