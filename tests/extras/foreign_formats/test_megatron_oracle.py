"""Rows of Megatron's files against the readers and samplers of megatron-core itself."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hetero_framework.data.train_data import load_data
from hetero_framework.extras.foreign_formats.megatron import IndexedFile
from tests.unit.data_helpers import make_config, tiny_tokenizer

LENGTH, SEED = 16, 1234


@pytest.fixture(scope="module")
def core():
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets import (
            blended_megatron_dataset_builder,
            gpt_dataset,
            helpers,
            indexed_dataset,
        )
    return SimpleNamespace(
        builder=blended_megatron_dataset_builder.BlendedMegatronDatasetBuilder,
        config=gpt_dataset.GPTDatasetConfig,
        dataset=gpt_dataset.GPTDataset,
        files=indexed_dataset,
        helpers=helpers,
    )


def write(core: Any, prefix: Path, documents: int, dtype: type = np.uint16, seed: int = 0) -> str:
    draw = np.random.default_rng(seed)
    builder = core.files.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for _ in range(documents):
        length = int(draw.integers(0, 60))
        builder.add_document(draw.integers(0, 300, length), [length])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def theirs(core: Any, blend: Any, size: int | None) -> list[list[int]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = core.config(
            random_seed=SEED,
            sequence_length=LENGTH,
            blend_per_split=[blend, None, None],
            tokenizer=SimpleNamespace(vocab_size=300, eod=0, eos=0, unique_identifiers={}),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        built = core.builder(core.dataset, [size, None, None], lambda: True, config).build()[0]
        rows = [built[k] for k in range(len(built) if size is None else size)]
    return [[*row["tokens"].tolist(), int(row["labels"][-1])] for row in rows]


def ours(spec: Any, base: Path, steps: int, *, evaluation: bool = False, **data: Any) -> list[Any]:
    where = {"train": spec, "eval": spec} if evaluation else {"train": spec}
    training: dict[str, Any] = {"eval_strategy": "epoch"} if evaluation else {}
    training |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "seed": SEED}
    data = {**where, "max_length": LENGTH, **data}
    config = make_config(base, data, max_steps=steps, **training)
    loaded = load_data(config, tiny_tokenizer(), vocab_size=300)
    if evaluation:
        batches = list(loaded.eval_batches())
    else:
        batches = [batch for step in range(steps) for batch in loaded.step_batches(step)]
    for batch in batches:
        assert batch["labels"].equal(batch["input_ids"])
    return [row for batch in batches for row in batch["input_ids"].tolist()]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64])
def test_sequences_are_those_of_indexed_dataset(core, tmp_path, dtype):
    prefix = tmp_path / "corpus"
    builder = core.files.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    builder.add_document([1, 2, 3, 4], [1, 3])
    builder.add_document([], [0])
    builder.add_document([200, 7], [2])
    builder.finalize(f"{prefix}.idx")
    want, have = core.files.IndexedDataset(str(prefix)), IndexedFile(Path(f"{prefix}.idx"))
    assert len(have) == len(want) == 4
    for k in range(4):
        assert have.tokens(k, 0, 100).tolist() == want[k].tolist()
    assert have.tokens(1, 1, 1).tolist() == want.get(1, 1, 1).tolist() == [3]


# 1 epoch; the end of the last of several epochs; little of a last epoch, which is shuffled alone.
@pytest.mark.parametrize("steps", [5, 20, 47, 48, 55, 60, 75, 80, 95, 120])
def test_samples_are_those_of_gpt_dataset(core, tmp_path, steps):
    prefix = write(core, tmp_path / "corpus", 60)
    assert ours("corpus", tmp_path, steps) == theirs(core, ([prefix], None), 4 * steps)


def test_both_ways_to_shuffle_a_last_epoch_are_among_these(core, tmp_path):
    write(core, tmp_path / "corpus", 60)
    rules, data = set(), {"train": "corpus", "max_length": LENGTH}
    for steps in (5, 20, 47, 48, 55, 60, 75, 80, 95, 120):
        config = make_config(tmp_path, data, max_steps=steps, per_device_train_batch_size=4)
        rules.add(tuple(load_data(config, tiny_tokenizer()).examples.streams[0].rule))
    assert {separate for epochs, separate in rules if epochs > 1} == {True, False}
    assert (1, False) in rules


@pytest.mark.parametrize("weights", [["0.3", "0.7"], ["30", "1e1"], None])
@pytest.mark.parametrize("steps", [7, 30])
def test_blends_are_those_of_blended_dataset(core, tmp_path, weights, steps):
    a = write(core, tmp_path / "a", 60, seed=1)
    b = write(core, tmp_path / "b", 90, np.int32, seed=2)
    spec = ["a", "b"] if weights is None else [weights[0], "a", weights[1], "b"]
    blend = ([a, b], None if weights is None else [float(w) for w in weights])
    assert ours(spec, tmp_path, steps) == theirs(core, blend, 4 * steps)


def test_the_order_of_a_long_blend_is_that_of_build_blending_indices(core):
    from hetero_framework.extras.foreign_formats import megatron

    weights, size = [0.11, 0.29, 0.4, 0.2], 1000
    parts, numbers = np.zeros(size, np.int16), np.zeros(size, np.int64)
    core.helpers.build_blending_indices(parts, numbers, weights, 4, size, False)
    blend = megatron._Blend(weights)
    pairs = list(zip(parts.tolist(), numbers.tolist(), strict=True))
    assert [blend[k] for k in range(size)] == pairs
    again = megatron._Blend(weights)
    assert [again[k] for k in (700, 3, 999)] == [pairs[k] for k in (700, 3, 999)]


def test_evaluation_is_one_pass_as_in_a_full_validation(core, tmp_path):
    a, b = write(core, tmp_path / "a", 60, seed=1), write(core, tmp_path / "b", 90, seed=2)
    assert ours("a", tmp_path, 1, evaluation=True) == theirs(core, ([a], None), None)
    assert ours(["a", "b"], tmp_path, 1, evaluation=True) == theirs(core, ([a, b], None), None)
