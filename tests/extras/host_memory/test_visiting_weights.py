"""Trained layers that visit give the bits of layers that stay."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from hetero_framework.core.devices import Device
from hetero_framework.engine.stage_api import StatePart, Tensors
from hetero_framework.extras.host_memory import optimizer_states
from tests.extras.host_memory.stages import MODEL, tensors_of
from tests.extras.host_memory.training import LORA, Training, Watched, config, differences

pytestmark = pytest.mark.usefixtures("own_memory")
OPTIMIZERS = [
    *("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adafactor"),
    *("adamw_8bit", "lion_8bit", "ademamix", "paged_adamw_32bit"),
]
CUTS: list[tuple[int, ...]] = [(), (3,), (2, 4)]
WIDE = {"intermediate_size": 160}  # matrices that bitsandbytes gives states of 8 bits
TIED = {"tie_word_embeddings": True}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Several groups in a small stage; and no search for cycles, which takes half of the time."""
    monkeypatch.setattr(optimizer_states, "STATES_GROUP_BYTES", 20_000)
    monkeypatch.setattr(Device, "empty_cache", lambda self: None)


def of_model(**changes: Any) -> dict[str, Any]:
    whole = {**MODEL, "vocab_size": 256, "num_hidden_layers": 6, **changes}
    return {"model": {"from_config": whole}}


def cases() -> Iterator[tuple[tuple[int, ...], int, dict[str, Any], dict[str, Any]]]:
    """Cut, layers of each stage that visit, what a step is told, and settings."""
    for optim, cuts in product(OPTIMIZERS, CUTS):
        yield cuts, 2, {}, {"optim": optim, **of_model(**WIDE if "8bit" in optim else {})}
    for offload, count in product((1, 4, 5, 6), (1, 2, 5)):
        yield (), offload, {"micro_batches": count}, {}
    for again, cuts, dtype in product((True, False), CUTS, ("float32", "bfloat16")):
        more = {"gradient_checkpointing": again, "activation_offloading": again}
        yield cuts, 2, {}, {"model": {"dtype": dtype}, **more}
    for half, cuts in product(({"bf16": True}, {"fp16": True}), CUTS):
        yield cuts, 2, {"loss_scale": 1024.0 if "fp16" in half else 1.0}, half
    for tokens, cuts in product((7, 64), CUTS):
        yield cuts, 2, {}, {"loss_chunk_tokens": tokens}
    for scale, cuts in product((1.0, 0.01), CUTS):
        yield cuts, 2, {"commit": (scale, (0.5, 0.7, 1e-6, 0.3))}, {}  # settings of Adam
    for cuts in CUTS:
        yield cuts, 2, {}, of_model(**TIED)
    yield (3,), 2, {}, {"torch_compile": True, "torch_compile_backend": "aot_eager"}


@cache
def whole(told: str, settings: str) -> tuple[list[float], Tensors]:
    """The weights of the uncut model after training on the device. All cuts share the result."""
    training = Training(config((), **json.loads(settings)), Device())
    return by_name(training.train(2, **json.loads(told)))


def by_name(found: tuple[list[float], Tensors]) -> tuple[list[float], Tensors]:
    """Without the numbers of stages."""
    return found[0], {name.partition("/")[2]: tensor for name, tensor in found[1].items()}


@pytest.mark.parametrize(
    ("cuts", "offload", "told", "settings"),
    [pytest.param(*c, marks=[pytest.mark.long] * bool(k % 6)) for k, c in enumerate(cases())],
)
def test_layers_that_visit_give_the_bits_of_layers_that_stay(cuts, offload, told, settings):
    optim = settings.get("optim", "")
    if "bit" in optim or optim == "ademamix":
        pytest.importorskip("bitsandbytes")
    visiting = Training(config(cuts, {"offload": offload}, **settings), Watched())
    assert all(stage.residence.trains for stage in visiting.stages)
    told_again = {k: list(v) if isinstance(v, tuple) else v for k, v in told.items()}
    right = whole(json.dumps(told_again), json.dumps(settings))
    assert differences(right, by_name(visiting.train(2, **told))) == []


def pair(cuts: tuple[int, ...] = (), offload: int = 2, **settings: Any) -> list[Training]:
    """The same training with all on the device, and with layers that visit."""
    plain, visiting = (config(cuts, {"offload": n}, **settings) for n in (0, offload))
    return [Training(plain, Watched()), Training(visiting, Watched())]


def test_passes_that_continue_a_step_add_up():
    found = []
    for training in pair((3,)):
        training.step(0, commit=None, tokens=16)
        norms = training.step(0, continues=True)
        found.append((norms, training.state()))
    assert differences(*found) == []


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


def test_layers_lend_their_slots_to_the_optimizer(monkeypatch):
    _, visiting = pair((), 6, model={"dtype": "bfloat16"})
    slots, seen = visiting.stages[0].residence._layers._slots, []  # type: ignore[attr-defined]
    kept = [StorageWeakRef(slot.untyped_storage()) for slot in slots]
    sent = optimizer_states.OptimizerStates._send_back

    def looked(self: optimizer_states.OptimizerStates, *args: Any) -> None:
        seen.append(all(storage.expired() for storage in kept))
        sent(self, *args)

    monkeypatch.setattr(optimizer_states.OptimizerStates, "_send_back", looked)
    del slots
    visiting.train(1)
    assert seen
    assert all(seen)


class _Casts(TorchDispatchMode):
    """Counts halved gate and up projections that are alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._made: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        is_cast = func is torch.ops.aten._to_copy.default and made.dtype == torch.bfloat16
        if is_cast and made.shape == (48, 32):
            self._made.append(StorageWeakRef(made.untyped_storage()))
        self.most = max(self.most, sum(not storage.expired() for storage in self._made))
        return made


def test_autocast_keeps_no_weights_of_layers_that_have_left():
    most = []
    for training in pair((), 6, bf16=True, gradient_checkpointing=True):
        with _Casts() as casts:
            training.step(0, micro_batches=2)
        most.append(casts.most)
    assert most == [12, 2]


def test_the_sums_of_replicas_take_the_place_of_gradients():
    found = []
    for training in pair((3,)):
        training.step(0)
        training.step(1, before_commit=lambda t=training: _double(t), summed=True)
        found.append(training.state())
    assert differences(([], found[0]), ([], found[1])) == []


def _double(training: Training) -> None:
    for stage in training.stages:
        parts = list(stage.gradients())
        assert [n for p in parts for n in p.tensors] == [name for name, _ in stage.trainable()]
        for part in parts:
            sums = {name: gradient * 2 for name, gradient in part.tensors.items()}
            stage.load_state("gradients", StatePart(sums, last=part.last))


def test_a_gradient_that_comes_home_wrong_is_seen(monkeypatch):
    plain, visiting = pair()
    weights = visiting.stages[0].residence._weights  # type: ignore[attr-defined]
    monkeypatch.setattr(weights, "expect", lambda layer: weights.added.clear())
    assert "losses or norms" in differences(plain.train(), visiting.train())
