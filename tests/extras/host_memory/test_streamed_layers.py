"""Streamed layers: the bits of the stage that holds everything, its copies, and its bytes."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from hetero_framework.config import Config
from hetero_framework.core.devices import Device, DeviceEvent
from hetero_framework.core.planned_order import BACKWARD, FORWARD
from hetero_framework.core.spans import AWAITED, WEIGHTS
from hetero_framework.engine.loading import load_stages, take_apart
from hetero_framework.engine.stage import Stage
from hetero_framework.engine.stage_api import StepInfo
from hetero_framework.errors import ConfigError, HeteroError
from hetero_framework.extras.host_memory import streamed_layers
from hetero_framework.extras.host_memory.residence import HostMemory
from hetero_framework.extras.host_memory.streamed_layers import Feeder, HostLayer, StreamedLayers
from hetero_framework.models.adapters.trainable import adapter_plan_of
from hetero_framework.models.cut.introspect import BlockForm
from hetero_framework.models.files.source import ModelSource
from hetero_framework.models.sizing.memory import estimate_memory
from tests.cases import seldom
from tests.extras.host_memory.stages import (
    LAYERS,
    LORA,
    MODEL,
    configuration,
    load,
    same,
    state,
    train,
)
from tests.extras.host_memory.training import Watched
from tests.samples import save_llama

pytestmark = pytest.mark.usefixtures("own_memory")
Made = Callable[..., Config]
CASES: dict[str, dict[str, Any]] = {
    "lora": {"adapter": LORA},
    "dora": {"adapter": {**LORA, "use_dora": True}},
    "recomputed": {"adapter": LORA, "training": {"gradient_checkpointing": True}},
    "a norm trained beside": {"adapter": {**LORA, "modules_to_save": ["input_layernorm"]}},
    "bf16": {"adapter": LORA, "training": {"bf16": True}},
    "upper layers trained": {"adapter": {**LORA, "layers_to_transform": [4, 5]}},
    "loss in chunks": {"adapter": LORA, "training": {"loss_chunk_tokens": 7}},
}


def layers_of(stage: Stage) -> StreamedLayers:
    assert isinstance(stage.residence, HostMemory)
    assert isinstance(stage.residence._layers, StreamedLayers)
    return stage.residence._layers


@pytest.fixture
def stored(tmp_path):
    """Configurations of a model on disk in one stage, with settings of both."""
    save_llama(tmp_path / "model", layers=LAYERS)

    def made(model: dict[str, Any] | None = None, **entry: Any) -> Config:
        whole = {"name_or_path": str(tmp_path / "model"), **(model or {})}
        return configuration(({"end": LAYERS, **entry},), model=whole, adapter=LORA)

    return made


@pytest.mark.parametrize("case", seldom(CASES, "dora", "a norm trained beside", "loss in chunks"))
def test_a_stage_with_streamed_layers_has_the_bits_of_one_with_everything(case):
    right = None
    for offloads in ([0, 0], [3, 4], [2, 1]):
        entries = ({"end": 3, "offload": offloads[0]}, {"end": LAYERS, "offload": offloads[1]})
        stages = load(configuration(entries, **CASES[case]))
        found = train(stages), state(stages)
        right = right or found
        assert same(found[0], right[0])
        assert found[1].keys() == right[1].keys()
        assert all(torch.equal(found[1][name], right[1][name]) for name in right[1])
        for stage, offload in zip(stages, offloads, strict=True):
            assert (layers_of(stage).misses if offload else 0) == 0


def test_only_layers_that_are_not_there_are_copied():
    stage, *_ = stages = load(configuration(({"end": LAYERS, "offload": 6},), adapter=LORA))
    train(stages, steps=1, micro_batches=3)
    # Of six layers two are in their slots when the direction turns, and when a task ends. The
    # first two are on their way from the start.
    transfers = stage.residence.transfers()
    kinds = Counter(kind for kind, *_ in transfers)
    assert kinds == {WEIGHTS: 2 + 3 * (4 + 4), AWAITED: 2 + 3 * (4 + 4)}
    waits = [ends for kind, *ends in transfers if kind == AWAITED]
    assert all(there.made_s <= asked.made_s for asked, there in waits)  # the CPU never waits
    assert stage.residence.transfers() == []
    assert layers_of(stage).misses == 0


def test_layers_with_a_slot_for_each_are_copied_once():
    upper = {**LORA, "layers_to_transform": [5, 6]}  # below them forwards follow one another
    entries = ({"end": 5, "offload": 3}, {"end": LAYERS})
    stage, *_ = stages = load(configuration(entries, adapter=upper))
    train(stages)
    assert Counter(kind for kind, *_ in stage.residence.transfers())[WEIGHTS] == 3


def test_a_layer_that_nobody_expected_is_fetched_and_counted():
    stage, *_ = load(configuration(({"end": LAYERS, "offload": 6},), adapter=LORA))
    layers = layers_of(stage)
    layers._use(5)
    assert layers.misses == 1
    layers._use(5)
    assert layers.misses == 1


def test_the_first_layers_come_while_the_head_evaluates():
    stage, *_ = load(configuration(({"end": LAYERS, "offload": 6},), adapter=LORA))
    ids, layers = torch.arange(20).view(1, 20), layers_of(stage)
    inputs = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    stage.begin(StepInfo(0, 0, False, 1, 19))
    layers.begin(FORWARD, 0, FORWARD)
    stage.evaluate(0, inputs, ())
    assert layers._arriving.keys() == {0, 1}


@pytest.mark.parametrize(("used", "in_turn"), [([0, 1], 1), ([0, 4, 5], 2)], ids=str)
def test_a_layer_stays_until_its_backward_is_done(used, in_turn):
    """A received hidden state, a leaf, is done before the side tensor; and where the model leaves
    out layers, the one before them is there when the one behind them is done."""
    blocks = [nn.Linear(3, 3).requires_grad_(requires_grad=False) for _ in range(used[-1] + 1)]
    received, side = (torch.rand(2, 3).requires_grad_() for _ in range(2))

    def gradients(layers: StreamedLayers | None) -> list[torch.Tensor]:
        hidden = received
        for k in used:

            def forward(hidden: torch.Tensor, block: nn.Module = blocks[k]) -> torch.Tensor:
                return block(side) + hidden + block(hidden * side)

            if layers is not None:
                layers.begin(FORWARD, 0, BACKWARD)
                forward = layers.around(k, BlockForm(0, None, 1), forward)
            hidden = forward(hidden)
        if layers is not None:
            layers.begin(BACKWARD, 0, BACKWARD)
        return [*torch.autograd.grad((hidden * hidden).sum(), (received, side))]

    right = gradients(None)
    hosts = {k: HostLayer(Device(), block) for k, block in enumerate(blocks)}
    layers = StreamedLayers(Device(), hosts, is_last=False, in_turn=in_turn)
    assert same(gradients(layers), right)


def test_a_device_that_shares_the_machines_memory_holds_everything(monkeypatch):
    """A run is refused before anything is loaded."""
    monkeypatch.undo()  # what `own_memory` did
    [stage] = load(configuration(({"end": LAYERS, "offload": 4},), adapter=LORA))
    assert not isinstance(stage.residence, HostMemory)


def test_layers_that_are_rewritten_are_refused():
    adapter = {**LORA, "init_lora_weights": "pissa"}
    with pytest.raises(ConfigError, match=r"as they are stored, and adapter\.init_lora_weights"):
        configuration(({"end": LAYERS, "offload": 4},), adapter=adapter)


def test_a_checkpoint_streams_and_its_resident_layers_are_reused(stored):
    right = train(load(stored()))
    first = load(stored(offload=4))
    assert same(train(first), right)
    pool, config = take_apart(first, stored(offload=4)), stored(offload=6)
    again = load_stages(config, config.plan.stages, Device(), pool)
    assert same(train(again), right)
    assert again[0].fingerprint == load(stored())[0].fingerprint


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_quantised_layers_visit_with_their_statistics(quantization, stored):
    model = {"quantization": quantization}
    right, stages = train(load(stored(model))), load(stored(model, offload=6))
    assert same(train(stages), right)
    places = layers_of(stages[0])._layers[0]._places
    held = Counter(name for _, name, _, _ in places)
    # Of seven matrices and two norms; double quantisation has statistics of statistics.
    nf4, int8 = {"data": 9, "absmax": 14}, {"data": 9, "CB": 7, "SCB": 7}
    assert held == (nf4 if quantization == "nf4" else int8)
    # The weights of 8 bits have two names, and one place.
    assert len({offset for *_, offset in places}) == (23 if quantization == "nf4" else 16)
    # A copy into a slot is no change to autograd.
    tensors = (getattr(holder, name) for holder, name, *_ in places if name != "data")
    assert {tensor._version for tensor in tensors if tensor is not None} <= {0}


# Each tensor fills whole blocks of the device's allocator.
WIDE = {"from_config": {**MODEL, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}}


def held_bytes(stage: Stage) -> int:
    tensors = [*stage._shard.model.parameters(), *stage._shard.model.buffers()]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("offload", [0, 2, 4, 5, 6, 7])
def test_a_stage_holds_the_bytes_that_are_told(offload):
    config = configuration(({"end": 7, "offload": offload},), adapter=LORA, model=WIDE)
    config = config.with_changes(coordinator={"ip": "127.0.0.1", "device": "cuda:0"})
    model = ModelSource.of(config).config
    told = estimate_memory(config, model, plan=adapter_plan_of(config, model))[0]
    stage = load(config)[0]
    assert held_bytes(stage) == told.weights
    if offload:
        assert sum(layer.nbytes for layer in layers_of(stage)._layers) == told.host


def test_a_weight_that_is_not_in_one_piece_stays():
    block = nn.Linear(3, 2)
    block.weight.data = torch.rand(3, 2).t()
    layer = HostLayer(Device(), block)
    assert [holder is block.bias for holder, *_ in layer._places] == [True]
    assert block.weight.shape == (2, 3)


def test_layers_that_are_computed_again_to_their_end_stay_until_their_backward():
    again = {"adapter": LORA, "training": {"gradient_checkpointing": True}}
    with set_checkpoint_early_stop(False):
        right, found = (
            train(load(configuration(({"end": LAYERS, "offload": offload},), **again)))
            for offload in (0, 6)
        )
    assert same(found, right)


def test_slots_are_freed_when_a_stage_is_taken_apart(monkeypatch):
    """Once the copies are over, those that have failed too, and their thread."""
    config = configuration(({"end": LAYERS, "offload": 6},), adapter=LORA)
    stages = load(config)
    train(stages, steps=1)
    layers, waited, lost = layers_of(stages[0]), list[str](), Future[Any]()
    layers._feeder, threads = Feeder(Device()), threading.active_count()
    layers._feeder.copy([], DeviceEvent())
    slots = [weakref.ref(slot) for slot in layers._slots]
    layers._fetch(4)
    [arriving] = layers._arriving.values()
    monkeypatch.setattr(arriving.result()[1], "wait", lambda: waited.append("here"))
    lost.set_exception(MemoryError("full"))
    layers._arriving = {0: lost, **layers._arriving}
    kept = take_apart(stages, config)
    assert waited
    assert threading.active_count() == threads
    del layers
    assert all(slot() is None for slot in slots)
    assert next(iter(kept._of.values())).blocks.keys() == {3}


def test_a_layer_that_could_not_be_read_is_fetched_again(monkeypatch):
    """The step is done again, after a lack of memory say: its slot has another layer's weights."""
    config = configuration(({"end": LAYERS, "offload": 6},), adapter=LORA)
    whole, stages = load(config), load(config)
    layers, copies = layers_of(stages[0]), Device.queue_copies
    full, lost = MemoryError("full"), Future[Any]()
    lost.set_exception(full)

    def fail(self: Device, pairs: Any, *args: Any) -> Any:
        pairs[0][0].fill_(255)
        raise full

    layers._arriving[0] = lost  # as the feeder's thread leaves it
    layers._slots[layers._slot[0]].fill_(255)
    with pytest.raises(MemoryError):
        train(stages, steps=1)
    assert same(train(stages, steps=1), train(whole, steps=1))
    monkeypatch.setattr(Device, "queue_copies", fail)
    with pytest.raises(MemoryError):
        train(stages, steps=1, first=1)
    monkeypatch.setattr(Device, "queue_copies", copies)
    assert same(train(stages, steps=1, first=1), train(whole, steps=1, first=1))


def test_what_is_longer_than_its_buffers_comes_whole_and_the_thread_ends(monkeypatch):
    monkeypatch.setattr(streamed_layers, "_BUFFER_BYTES", 1000)
    before = threading.active_count()
    device = Watched()
    feeding = Feeder(device)
    sources = [torch.randint(0, 255, (n,), dtype=torch.uint8) for n in (1, 999, 1000, 4321)]
    targets = [torch.zeros_like(source) for source in sources]
    arrival = feeding.copy(list(zip(targets, sources, strict=True)), DeviceEvent())
    streamed_layers.ends_of(arrival)[1].wait()
    assert all(map(torch.equal, targets, sources))
    # The next part is read while the last one is on its way.
    assert len({*device.read}) == 2
    assert all(a != b for a, b in pairwise(device.read))
    feeding.close()
    assert threading.active_count() == before


def test_an_error_reaches_the_thread_that_waits(monkeypatch):
    monkeypatch.setattr(streamed_layers, "_LONGEST_S", 20.0)
    feeding = Feeder(Device())
    short, long = torch.zeros(4, dtype=torch.uint8), torch.zeros(5, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="must match"):
        streamed_layers.ends_of(feeding.copy([(short, long)], DeviceEvent()))
    feeding.close()


def test_a_copy_that_hangs_is_named(monkeypatch):
    monkeypatch.setattr(streamed_layers, "_LONGEST_S", 0.01)
    with pytest.raises(HeteroError, match="could not be copied from host memory"):
        streamed_layers.ends_of(Future())
