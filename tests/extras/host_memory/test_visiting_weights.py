"""Trained layers that visit give the bits of layers that stay."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from hetero_framework.engine.stage_api import StatePart
from tests.extras.host_memory.stages import tensors_of
from tests.extras.host_memory.training import LORA, Training, Watched, config, differences

pytestmark = pytest.mark.usefixtures("own_memory")
OPTIMIZERS = [
    *("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adafactor"),
    *("adamw_8bit", "lion_8bit", "ademamix"),
]
CUTS: list[tuple[int, ...]] = [(), (3,), (2, 4)]


def pair(cuts: tuple[int, ...] = (), offload: int = 2, **settings: Any) -> list[Training]:
    """The same training with all on the device, and with layers that visit."""
    plain, visiting = (config(cuts, {"offload": n}, **settings) for n in (0, offload))
    return [Training(plain, Watched()), Training(visiting, Watched())]


def bits(cuts: tuple[int, ...] = (), offload: int = 2, count: int = 4, **settings: Any) -> None:
    plain, visiting = pair(cuts, offload, **settings)
    there = {"micro_batches": count}
    assert differences(plain.train(**there), visiting.train(**there)) == []
    assert all(stage.residence.trains for stage in visiting.stages)


def installed(optim: str) -> str:
    if "8bit" in optim or optim == "ademamix":
        pytest.importorskip("bitsandbytes")
    return optim


@pytest.mark.parametrize(("optim", "cuts"), list(product(OPTIMIZERS, CUTS)))
def test_each_optimizer_and_cut_gives_the_same_bits(optim, cuts):
    bits(cuts, optim=installed(optim))


@pytest.mark.parametrize(("offload", "count"), list(product((1, 4, 5, 6), (1, 2, 5))))
def test_each_number_of_layers_and_micro_batches_gives_the_same_bits(offload, count):
    bits((), offload, count)


@pytest.mark.parametrize(("recompute", "cuts"), list(product((True, False), CUTS)))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_types_and_recomputing(recompute, cuts, dtype):
    more = {"gradient_checkpointing": recompute, "activation_offloading": recompute}
    bits(cuts, model={"dtype": dtype}, **more)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast(precision):
    bits((3,), **{precision: True})


@pytest.mark.parametrize("tokens", [7, 64])
def test_chunks_of_the_loss(tokens):
    bits((3,), loss_chunk_tokens=tokens)


def test_tied_embeddings():
    model = {"from_config": {**config().model.from_config, "tie_word_embeddings": True}}
    bits((3,), model=model)
    bits((), model=model)


@pytest.mark.parametrize("bias", ["all", "none"])
def test_an_adapter_with_trained_parts_of_layers_stays_on_the_device(bias):
    adapter = {**LORA["adapter"], "bias": bias, "modules_to_save": ["input_layernorm", "lm_head"]}
    model = {"from_config": {**config().model.from_config, "attention_bias": True}}
    plain, visiting = pair((3,), adapter=adapter, model=model)
    assert differences(plain.train(), visiting.train()) == []
    assert visiting.stages[0].residence.misses is not None


def test_an_aborted_step_leaves_nothing():
    plain, visiting = pair((3,))
    plain.step(0)
    visiting.step(0)
    for tasks in (1, 5, 9):
        assert visiting.step(1, tasks=tasks) == []
    assert plain.step(1) == visiting.step(1)
    assert differences(([], plain.state()), ([], visiting.state())) == []


def test_a_checkpoint_continues_with_and_without_visits():
    for there in (0, 1):
        both = pair((3,))
        both[1 - there].train(2)
        both[there].load(both[1 - there].parts())
        assert both[0].step(2) == both[1].step(2)
        assert differences(([], both[0].state()), ([], both[1].state())) == []


def test_a_snapshot_and_an_export_are_of_the_step_that_they_follow():
    plain, visiting = pair((3,))
    plain.train(1)
    visiting.train(1)
    exported = [tensors_of([list(s.export()) for s in t.stages]) for t in (plain, visiting)]
    assert differences(([], exported[0]), ([], exported[1])) == []
    snapshots = [[s.snapshot() for s in t.stages] for t in (plain, visiting)]

    def keep(side: int) -> None:
        for snapshot in snapshots[side]:
            snapshot.keep()

    plain.step(1, before_commit=lambda: keep(0))
    visiting.step(1, before_commit=lambda: keep(1))
    kept = [tensors_of([list(s.parts()) for s in of]) for of in snapshots]
    assert differences(([], kept[0]), ([], kept[1])) == []
    assert plain.step(2) == visiting.step(2)


def test_weights_that_are_loaded_in_a_run_are_used():
    plain, visiting = pair()
    for side in (plain, visiting):
        stage = side.stages[0]
        names = [name for name, _ in stage.trainable()]
        changed = {n: t * 0.5 for n, t in stage.weights(names, 0).tensors.items()}
        stage.load_state("weights", StatePart(changed, last=True))
    assert differences(plain.train(), visiting.train()) == []


def test_gradients_and_weights_are_not_on_the_device_between_tasks():
    _, visiting = pair((), 6, model={"dtype": "bfloat16"})
    visiting.train(2)
    stage = visiting.stages[0]
    homes = stage.residence._weights.homes  # type: ignore[attr-defined]
    storages = {p.untyped_storage().data_ptr() for p in homes}
    assert len(homes) == 6 * 9
    assert len(storages) == 2
    assert all(p.grad is None for p in homes)


def test_the_sums_of_replicas_take_the_place_of_gradients():
    found = []
    for training in pair((3,)):
        training.step(0)
        training.step(1, before_commit=lambda t=training: _double(t))
        found.append(training.state())
    assert differences(([], found[0]), ([], found[1])) == []


def _double(training: Training) -> None:
    for stage in training.stages:
        sums = {
            name: gradient * 2
            for name, p in stage._parameters
            if (gradient := stage.residence.gradient(p)) is not None
        }
        stage.load_state("gradients", StatePart(sums, last=True))


def test_a_gradient_that_comes_home_wrong_is_seen(monkeypatch):
    plain, visiting = pair()
    weights = visiting.stages[0].residence._weights  # type: ignore[attr-defined]
    monkeypatch.setattr(weights, "expect", lambda layer: weights.added.clear())
    assert "losses or norms" in differences(plain.train(), visiting.train())
