"""Packed data against a real SFTTrainer's, and rows against TRL's `pack_dataset`."""

from __future__ import annotations

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trl import pack_dataset

from hetero_framework.data.train_data import load_data
from hetero_framework.errors import ConfigError, DataError
from hetero_framework.extras.packing.packed_rows import parts_of
from tests.unit.data.test_formats import PAIRS, TEXT, sft_trainer
from tests.unit.data_helpers import make_config, tiny_tokenizer, write_jsonl

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
ROWS = [*PAIRS, {"prompt": "Only a question, ", "completion": ""}, *PAIRS[:3]]
STRATEGIES = ("bfd", "bfd_split", "wrapped")
SETTINGS = [
    {"packing": True, "max_length": 24},
    {"packing": True, "packing_strategy": "bfd_split", "max_length": 24},
    {"packing": True, "packing_strategy": "wrapped", "max_length": 24},
    {"packing": True, "max_length": 200},
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("rows", [TEXT * 3, ROWS], ids=["text", "pairs"])
def test_micro_batches_are_those_of_sft_trainer(tmp_path, rows, settings):
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


def test_the_report_says_how_full_rows_are_and_what_was_cut(tmp_path):
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
def test_evaluation_data_are_packed_as_asked(tmp_path, given):
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
def test_settings_that_do_not_go_together(tmp_path, section, message):
    write_jsonl(tmp_path / "rows.jsonl", TEXT)
    with pytest.raises((ConfigError, DataError), match=message):
        make_config(tmp_path, {"train": "rows.jsonl", **section})


def ours(lengths: list[int], most: int, strategy: str) -> list[list[tuple[int, int]]]:
    """(example, token in it) of each place of each row."""
    rows: dict[int, list[tuple[int, int]]] = {}
    for row, example, begin, end in parts_of(np.array(lengths), most, strategy).tolist():
        rows.setdefault(row, []).extend((example, token) for token in range(begin, end))
    assert list(rows) == list(range(len(rows)))
    return list(rows.values())


def theirs(lengths: list[int], most: int, strategy: str) -> list[list[tuple[int, int]]]:
    ids = [[example * 10_000 + token for token in range(n)] for example, n in enumerate(lengths)]
    features = datasets.Features({"input_ids": datasets.List(datasets.Value("int64"))})
    rows = pack_dataset(datasets.Dataset.from_dict({"input_ids": ids}, features), most, strategy)
    return [[divmod(token, 10_000) for token in row] for row in rows["input_ids"] if row]


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=60),
    most=st.integers(1, 33),
    strategy=st.sampled_from(STRATEGIES),
)
def test_rows_are_those_of_trl(lengths, most, strategy):
    if any(lengths):
        assert ours(lengths, most, strategy) == theirs(lengths, most, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_thousand_examples_are_packed_by_themselves(strategy):
    lengths = np.random.default_rng(0).integers(0, 300, 2345).tolist()
    assert ours(lengths, 256, strategy) == theirs(lengths, 256, strategy)
