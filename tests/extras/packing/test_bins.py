"""Rows against TRL's `pack_dataset`."""

from __future__ import annotations

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trl import pack_dataset

from hetero_framework.extras.packing.bins import parts_of

STRATEGIES = ("bfd", "bfd_split", "wrapped")


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
def test_rows_are_those_of_trl(lengths: list[int], most: int, strategy: str) -> None:
    if any(lengths):
        assert ours(lengths, most, strategy) == theirs(lengths, most, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_thousand_examples_are_packed_by_themselves(strategy: str) -> None:
    lengths = np.random.default_rng(0).integers(0, 300, 2345).tolist()
    assert ours(lengths, 256, strategy) == theirs(lengths, 256, strategy)
