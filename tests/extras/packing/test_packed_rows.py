"""Packed data against a real SFTTrainer's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hetero_framework.data import load_data
from hetero_framework.errors import ConfigError, DataError
from tests.unit.data.test_formats import PAIRS, TEXT, sft_trainer
from tests.unit.data_helpers import make_config, tiny_tokenizer, write_jsonl

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
ROWS = [*PAIRS, {"prompt": "Only a question, ", "completion": ""}, *PAIRS[:3]]
SETTINGS = [
    {"packing": True, "max_length": 24},
    {"packing": True, "packing_strategy": "bfd_split", "max_length": 24},
    {"packing": True, "packing_strategy": "wrapped", "max_length": 24},
    {"packing": True, "max_length": 200},
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("rows", [TEXT * 3, ROWS], ids=["text", "pairs"])
def test_micro_batches_are_those_of_sft_trainer(tmp_path: Path, rows, settings) -> None:
    trainer = sft_trainer(rows, tiny_tokenizer(), tmp_path, **settings)
    write_jsonl(tmp_path / "rows.jsonl", rows)
    data = load_data(make_config(tmp_path, {"train": "rows.jsonl", **settings}), tiny_tokenizer())
    count = len(trainer.train_dataset)
    assert len(data.examples) == count
    for numbers in ([0], list(range(count))):
        theirs = trainer.data_collator([trainer.train_dataset[k] for k in numbers])
        batch = data.collate(data.examples, numbers)
        assert batch.keys() <= theirs.keys() | {"attention_mask"}
        for name in batch:
            assert torch.equal(batch[name], theirs[name]), name


def test_the_report_says_how_full_rows_are_and_what_was_cut(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", TEXT * 3)
    config = make_config(tmp_path, {"train": "rows.jsonl", "packing": True, "max_length": 24})
    data = load_data(config, tiny_tokenizer())
    (line,) = [line for line in data.report if "packed into" in line]
    assert "rows (bfd)" in line
    assert "lost" in line
    share = data.examples.tokens / (len(data.examples) * 24)
    assert f"{share:.1%} filled" in line
    assert 'packing_strategy "bfd_split" keeps them' in line


@pytest.mark.parametrize("given", [None, False])
def test_evaluation_data_are_packed_as_asked(tmp_path: Path, given: bool | None) -> None:
    write_jsonl(tmp_path / "rows.jsonl", TEXT * 3)
    section = {"train": "rows.jsonl", "eval": "rows.jsonl", "packing": True, "eval_packing": given}
    data = load_data(make_config(tmp_path, section), tiny_tokenizer())
    assert (len(data.eval_sets[""]) == len(TEXT * 3)) is (given is False)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"packing": True, "max_length": None}, "packing fills rows up to max_length"),
        ({"packing": True, "truncation_mode": "keep_end"}, "packing keeps the start"),
        (
            {"packing": True, "packing_strategy": "wrapped", "padding_free": True},
            'rows of packing_strategy "wrapped" are full',
        ),
    ],
)
def test_settings_that_do_not_go_together(tmp_path: Path, section, message) -> None:
    write_jsonl(tmp_path / "rows.jsonl", TEXT)
    with pytest.raises((ConfigError, DataError), match=message):
        make_config(tmp_path, {"train": "rows.jsonl", **section})
