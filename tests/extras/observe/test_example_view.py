"""Examples as a run reads them."""

from __future__ import annotations

import pytest

from hetero_framework.data import load_data
from hetero_framework.extras.observe.example_view import shown_examples
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


TEXTS = [{"text": f"The fox runs{' far' * k}"} for k in range(9)]
ASKED = [{"prompt": f"Fox {k}:", "completion": " runs" * k} for k in range(9)]
PAIRS = [{"prompt": f"Fox {k}:", "chosen": " far" * k, "rejected": " rests"} for k in range(1, 9)]
RATED = [{**row, "label": k % 2 == 0} for k, row in enumerate(ASKED[1:])]
CLASSES = [{"text": "The fox", "text_pair": " runs" * k, "label": k % 3} for k in range(1, 9)]
WORDS = [{"tokens": ["The", "fox"] * k, "labels": ["a", "b"] * k} for k in range(1, 9)]
CASES = {
    "text": (TEXTS, {}, {}),
    "cut": (ASKED, {"max_length": 12}, {}),
    "their end": (TEXTS, {"max_length": 6, "truncation_mode": "keep_end"}, {}),
    "padding_free": (TEXTS, {"padding_free": True}, {}),
    "bfd": (ASKED, {"packing": True, "max_length": 40}, {}),
    "wrapped": (TEXTS, {"packing": True, "packing_strategy": "wrapped", "max_length": 12}, {}),
    "held out": (TEXTS, {"val_set_size": 4}, {}),
    "held out of what teaches": (ASKED, {"val_set_size": 4, "max_length": 12}, {}),
    "packed, held out": (TEXTS, {"val_set_size": 4, "packing": True, "max_length": 30}, {}),
    "dpo": (PAIRS, {"val_set_size": 3}, {"objective": "dpo"}),
    "reward": (PAIRS, {"max_length": 14}, {"objective": "reward"}),
    "kto": (RATED, {}, {"objective": "kto", "train_sampling_strategy": "sequential"}),
    "kto held out": (
        RATED,
        {"val_set_size": 3},
        {"objective": "kto", "train_sampling_strategy": "sequential"},
    ),
    "unpaired": (PAIRS, {}, {"objective": "kto", "loss_type": "apo_zero_unpaired"}),
    "classes": (CLASSES, {"val_set_size": 2}, {"objective": "classification"}),
    "words": (WORDS, {"val_set_size": 2}, {"objective": "token-classification"}),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_shown_is_what_a_run_takes(tmp_path, case):
    rows, settings, training = CASES[case]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    config = make_config(tmp_path, {"train": "rows.jsonl", **settings}, **training)
    tokenizer = tiny_tokenizer()
    data = load_data(config, tokenizer)
    taken = []
    for number in range(len(data.examples)):
        batch = data.micro_batch([number])
        answers = 2 if training.get("objective") in ("dpo", "reward") else 1
        masks = batch.get("attention_mask")
        for row, ids in enumerate(batch["input_ids"][:answers]):
            own = slice(None) if masks is None else masks[row].bool()
            labels = batch["labels"]
            trained = (labels[row][own] >= 0).sum().item() if labels.ndim == 2 else 0
            taken.append((tokenizer.decode(ids[own]), trained))
    found = [
        ("".join(text for text, _ in example.pieces if text != " | "), example.trained)
        for example in shown_examples(config, tokenizer, 99)
        if not any(why.startswith("the whole example") for why in example.left_out)
    ]
    if "val_set_size" in settings and not settings.get("packing"):  # shuffled, as datasets does it
        taken.sort(key=str)
        found.sort(key=str)
    assert found == taken
