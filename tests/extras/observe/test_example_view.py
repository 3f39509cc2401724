"""Examples as a run reads them, and as `hetero check --show` has them."""

from __future__ import annotations

import io
import re

import pytest

from hetero_framework.data.train_data import load_data
from hetero_framework.extras.observe.example_view import shown_examples
from hetero_framework.extras.observe.token_view import print_examples
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


@pytest.mark.parametrize(("rows", "objective"), [(CLASSES, "classes"), (WORDS, "words")])
def test_what_the_tokenizer_cuts_off_is_told(tmp_path, rows, objective):
    write_jsonl(tmp_path / "rows.jsonl", rows)
    config = make_config(tmp_path, {"train": "rows.jsonl", "max_length": 7}, **CASES[objective][2])
    shown = shown_examples(config, tiny_tokenizer(), 99)
    lengths = [example.tokens for example in shown]
    assert max(lengths) == 7 > min(lengths)
    told = sum(any("data.max_length" in why for why in each.left_out) for each in shown)
    assert f"train: {told} of {len(rows)} examples were longer" in "".join(
        load_data(config, tiny_tokenizer()).report
    )


@needs("streams")
def test_no_more_of_a_stream_is_shown_than_a_run_takes(tmp_path):
    write_jsonl(tmp_path / "rows.jsonl", TEXTS)
    tiny_tokenizer().save_pretrained(tmp_path / "model")  # which the stream's process reads
    settings = {"train": "rows.jsonl", "streaming": True}
    counts = {"max_steps": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}
    assert len(shown_examples(make_config(tmp_path, settings, **counts), tiny_tokenizer(), 9)) == 4


def test_show_uses_colour_instead_of_brackets_on_a_terminal():
    example = {"where": "a:1", "tokens": 3, "trained": 1, "left_out": ["thinking"]}
    example["pieces"] = [("one", False), (" two\n", True), ("three", False)]

    class Terminal(io.StringIO):
        encoding = "ascii"

        def isatty(self) -> bool:
            return True

    for encoding, marks in (("utf-8", "⟦│⟧"), ("ascii", "[[|]]")):
        plain = Terminal()
        plain.encoding = encoding
        plain.isatty = lambda: False  # type: ignore[method-assign]
        print_examples([example], plain)
        assert all(mark in plain.getvalue() for mark in marks)
        assert " two" in plain.getvalue()
        assert "\x1b" not in plain.getvalue()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm-256color")
        patch.setenv("COLUMNS", "30")
        patch.delenv("NO_COLOR", raising=False)
        terminal = Terminal()
        print_examples([example], terminal)
    shown = terminal.getvalue()
    assert "\x1b[1;32m two\\n\x1b[0m" in shown
    assert "[[" not in shown
    plain_lines = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in shown.splitlines()]
    assert max(map(len, plain_lines)) <= 30
