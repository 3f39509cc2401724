"""Memory estimates against what real shards hold and what autograd really stores."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hetero_framework.config import AdapterConfig, Config, StageSpec
from hetero_framework.engine.optimizer import build_optimizer
from hetero_framework.models.adapters.trainable import tied_parameters, trainable_parameters
from hetero_framework.models.cut.chunked_loss import chunked_loss, spans
from hetero_framework.models.files.source import ModelSource
from hetero_framework.models.sizing import memory as sizes
from hetero_framework.models.sizing.footprint import PeakMemory
from hetero_framework.models.sizing.memory import (
    StageMemory,
    estimate_memory,
    in_flight_limits,
    offload_layers,
    recompute_stages,
    uncounted_lines,
)
from hetero_framework.units import size
from tests.cases import spread
from tests.installed import needs
from tests.samples import config_for
from tests.unit.adapter_helpers import batch, chain_backward, save_model, shards, stock


def config_of(
    base: Path, bounds: tuple[int, ...], adapter: AdapterConfig | None = None, **sections: Any
) -> Config:
    owners: tuple[Any, ...] = ("local", *range(1, len(bounds) - 1))
    return config_for(
        *zip(owners, bounds[1:], strict=True),
        device="auto",  # of which nobody knows yet that it has the host's memory
        model={"name_or_path": str(base), **sections.get("model", {})},
        adapter=adapter.model_dump(mode="json") if adapter else None,
        training={"per_device_train_batch_size": 2, **sections.get("training", {})},
        data=sections.get("data"),
    )


def memory_of(config: Config, **kwargs: Any) -> list[StageMemory]:
    return estimate_memory(config, ModelSource(config.model, Path()).config, **kwargs)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A Llama of four layers."""
    return save_model(tmp_path_factory.mktemp("llama"))


def held_bytes(model: nn.Module) -> int:
    """Bytes of all distinct storages, statistics of quantised weights included."""
    storages = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        state = getattr(tensor, "quant_state", None)
        found = [tensor, getattr(tensor, "SCB", None)]
        if state is not None:
            found += [state.absmax, state.code]
            if state.nested:
                found += [state.offset, state.state2.absmax, state.state2.code]
        for item in found:
            if item is not None:
                storage = item.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


CASES: dict[str, tuple[str, AdapterConfig | None, dict[str, Any]]] = {
    "full": ("llama", None, {}),
    "full tied": ("gemma", None, {}),
    "full gpt2": ("gpt2", None, {}),
    "lora bfloat16": ("llama", AdapterConfig(), {"dtype": "bfloat16"}),
    "qlora": ("llama", AdapterConfig(target_modules="all-linear"), {"quantization": "nf4"}),
    "int8": ("llama", AdapterConfig(), {"quantization": "int8"}),
    "experts, saved head": (
        "qwen3_moe", AdapterConfig(target_modules=("q_proj",), modules_to_save=("lm_head",)), {}
    ),
}  # fmt: skip


@pytest.mark.parametrize(("case", "bounds"), spread([*CASES], [(0, 1, 3, 4), (0, 4)]))
def test_weights_gradients_and_optimizer_are_counted_exactly(case, bounds, tmp_path):
    model_type, adapter, model = CASES[case]
    base = save_model(tmp_path, model_type)
    parts = shards(base, *bounds, adapter=adapter, **model)
    config = config_of(base, bounds, adapter, model=model)
    estimates = memory_of(config, tokens=12)
    assert [m.weights for m in estimates] == [held_bytes(part.model) for part in parts]
    chain_backward(parts)
    for part, estimated in zip(parts, estimates, strict=True):
        stepping = [p for _, p in trainable_parameters(part)]
        collecting = [*stepping, *tied_parameters(part).values()]
        assert estimated.gradients == sum(p.grad.nbytes for p in collecting if p.grad is not None)
        optimizer = build_optimizer(config.training, part.model, stepping)
        optimizer.step()
        states = [t for s in optimizer.state.values() for k, t in s.items() if k != "step"]
        assert estimated.optimizer == sum(t.nbytes for t in states)


@pytest.mark.parametrize("bounds", [(0, 4), (0, 2, 4)])
def test_shared_weights_count_once_per_stage_and_gradients_per_block(bounds, tmp_path):
    base = save_model(tmp_path, "zamba2")
    parts = shards(base, *bounds)
    estimates = memory_of(config_of(base, bounds), tokens=12)
    assert [m.weights for m in estimates] == [held_bytes(part.model) for part in parts]
    for part, estimated in zip(parts, estimates, strict=True):
        stepping = sum(p.nbytes for _, p in trainable_parameters(part))
        collecting = stepping + sum(p.nbytes for p in tied_parameters(part).values())
        assert (estimated.gradients, estimated.optimizer) == (collecting, 2 * stepping)


def stored_for_backward(model: nn.Module) -> int:
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = model(**batch(), use_cache=False)
    del output
    return sum(t.untyped_storage().nbytes() for t in kept.values())


@pytest.mark.parametrize(
    ("model_type", "dtype"),
    spread(["llama", "gpt2", "gemma", "qwen3_moe"], ["float32", "bfloat16"]),
)
def test_activations_are_of_the_right_size(model_type, dtype, tmp_path):
    base = save_model(tmp_path, model_type)
    model = stock(base, dtype=getattr(torch, dtype)).train()
    config = config_of(base, (0, 4), model={"dtype": dtype})
    (estimated,) = memory_of(config, tokens=12)
    real = stored_for_backward(model)
    assert 0.6 < (estimated.activations + estimated.logits) / real < 1.4


def test_layers_that_cannot_be_counted_are_left_out_and_said(base, monkeypatch):
    monkeypatch.setattr(sizes, "layer_footprint", lambda *_, **__: None)
    first, last = memory_of(config_of(base, (0, 0, 4)))
    assert (first.counted, last.counted) == (True, False)
    assert last.weights > 0
    assert "unknown" in str(last)
    assert uncounted_lines([first]) == []
    assert uncounted_lines([first, last])[0].startswith("warning: stage 1 needs more")


def test_activations_grow_in_flight_and_shrink_with_checkpointing(base):

    def activations(max_in_flight: int, **training: Any) -> list[int]:
        config = config_of(base, (0, 2, 4), training=training)
        return [m.activations for m in memory_of(config, max_in_flight=max_in_flight, tokens=32)]

    one = activations(4)
    assert activations(4, gradient_accumulation_steps=8) == [4 * one[0], one[1]]
    assert activations(4, gradient_accumulation_steps=3) == [3 * one[0], one[1]]
    less = activations(4, gradient_accumulation_steps=8, gradient_checkpointing=True)
    assert less[0] < activations(4, gradient_accumulation_steps=8)[0] / 3


def test_a_stage_is_estimated_with_its_own_checkpointing_and_micro_batches(base):
    config = config_of(base, (0, 1, 3, 4), training={"gradient_accumulation_steps": 8})
    plain = memory_of(config, max_in_flight=4, tokens=32)
    plan = [entry.model_dump(mode="json") for entry in config.shard_plan]
    plan[1]["gradient_checkpointing"] = True
    own = memory_of(
        Config.from_dict({**config.to_dict(), "shard_plan": plan}), max_in_flight=4, tokens=32
    )
    assert [m.index for m in own if m != plain[m.index]] == [1]
    assert own[1].total < plain[1].total
    held = memory_of(config, in_flight=[3, 2, 1], tokens=32)
    assert [m.in_flight for m in held] == [3, 2, 1]
    assert held[1].activations == plain[1].activations / 2 == plain[1].holding(2).activations
    assert own[1].holding(7).holding(4) == own[1]


def test_a_stage_below_the_lowest_trained_layer_stores_nothing_for_backward(base):
    adapter = AdapterConfig(layers_to_transform=(2, 3))
    config = config_of(base, (0, 1, 2, 4), adapter, training={"gradient_accumulation_steps": 8})
    few, many = (memory_of(config, max_in_flight=w, tokens=32) for w in (2, 6))
    assert [m.per_micro_batch > 0 for m in few] == [False, False, True]
    assert [m.activations for m in few] == [m.activations for m in many]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_of_a_loss_in_pieces_are_those_of_one_piece(dtype, tmp_path):
    base = save_model(tmp_path, vocab_size=4096)
    head = shards(base, 0, 4, 4, dtype=dtype)[-1]
    counted = []
    for tokens, limit in ((256, 64), (1024, 64), (256, None)):
        hidden = torch.randn(2, tokens, 64, requires_grad=True, dtype=getattr(torch, dtype))
        labels = torch.randint(3, 96, (2, tokens))
        inputs = {"labels": labels, "attention_mask": torch.ones_like(labels)}
        items, pieces = torch.tensor(9), spans(labels.shape, limit)
        with PeakMemory() as peak:
            if pieces:
                chunked_loss(
                    *(head, inputs, (hidden,), items, pieces),
                    running=nullcontext,
                    backward=torch.Tensor.backward,
                )
            else:
                head.loss(inputs, (hidden,), items).backward()
        head.model.zero_grad()
        training = {"loss_chunk_tokens": limit}
        config = config_of(base, (0, 4, 4), model={"dtype": dtype}, training=training)
        estimated = memory_of(config, tokens=tokens)[-1]
        counted.append(peak.most / (estimated.logits + estimated.gradients))
    assert all(0.6 < ratio < 1.4 for ratio in counted), counted


@pytest.mark.parametrize("device", ["cuda:1", "rocm:0", "xpu:0", "cpu", "mps", "auto"])
def test_adamw_needs_a_copy_of_weights_where_torch_steps_at_once(device, base):

    def memory(optim: str, tokens: int) -> StageMemory:
        training = {"optim": optim, "gradient_checkpointing": True}
        config = config_of(base, (0, 2, 4), training=training)
        return replace(memory_of(config, tokens=tokens)[0], device=device)

    few, many = memory("adamw_torch", 2), memory("adamw_torch", 4096)
    kept = few.weights + few.gradients + few.optimizer
    at_once = device.startswith(("cuda", "rocm", "xpu"))
    assert few.activations < few.gradients < many.activations
    assert few.total == kept + (few.gradients if at_once else few.activations + few.working)
    assert ("step" in str(few)) == at_once
    assert many.total == kept + many.activations + many.working
    for optim in ("adamw_torch_fused", "adamw_bnb_8bit", "sgd"):
        other = memory(optim, 2)
        assert other.total == other.kept + other.activations + other.working


def stage(index: int, owner: int | str, fixed: int, each: int, held: int = 2) -> StageMemory:
    spec = StageSpec(index, owner, index, index + 1, index == 0, index == 3)
    return StageMemory(spec, 0, fixed, 0, 0, held * each, 0, held, each)


def test_the_least_number_of_stages_is_computed_again():
    plain = [stage(0, "local", 10, 4), stage(1, 1, 10, 10), stage(2, 1, 10, 5), stage(3, 2, 10, 9)]
    less = [replace(m, activations=m.activations // 4) for m in plain]
    everything = {0, 1, 2, 3}

    def chosen(*free: int, optional: set[int] = everything) -> set[int]:
        devices = [({"local"}, free[0]), ({1}, free[1]), ({2}, free[2])]
        return recompute_stages(plain, less, optional, devices)

    assert chosen(100, 100, 100) == set()
    assert chosen(18, 50, 28) == set()
    assert chosen(17, 50, 28) == {0}
    # Worker 1 holds two stages: the one that saves more is enough, until it is not.
    assert chosen(18, 49, 28) == {1}
    assert chosen(18, 34, 28) == {1, 2}
    assert chosen(18, 0, 28) == {1, 2}
    assert chosen(18, 34, 27, optional={2}) == {2}
    # One device for all: the largest savings first.
    assert recompute_stages(plain, less, everything, [({"local", 1, 2}, 81)]) == {1}


def test_in_flight_limits_follow_from_memory():
    memory = [stage(0, "local", 10, 4), stage(1, 1, 10, 10), stage(2, 1, 10, 5), stage(3, 2, 10, 9)]

    def most(*free: int) -> tuple[int, ...]:
        return in_flight_limits(memory, 6, [({"local"}, free[0]), ({1}, free[1]), ({2}, free[2])])

    assert most(1000, 1000, 1000) == (6, 6, 6, 6)
    assert most(10 + 3 * 4, 20 + 2 * 15, 0) == (3, 2, 2, 6)
    assert most(10 + 3 * 4 - 1, 20 + 2 * 15 - 1, 0) == (2, 1, 1, 6)
    assert most(0, 0, 0) == (1, 1, 1, 6)
    # The last stage holds one micro-batch, however many its neighbour on the device has.
    assert in_flight_limits(memory, 6, [({1, 2}, 30 + 9 + 2 * 15)])[1:] == (2, 2, 2)
    assert in_flight_limits(memory, 6, [({1, 2}, 30 + 9 + 2 * 15 - 1)])[1:] == (1, 1, 1)


def test_optimizer_state_follows_the_optimizer(base):
    found = {
        name: memory_of(config_of(base, (0, 4), training={"optim": name}))[0]
        for name in ("adamw_torch", "adamw_bnb_8bit", "adamw_torch_8bit", "lion_32bit", "sgd")
    }
    count, embedding = found["sgd"].trained, 96 * 64  # which keeps 32 bits
    sizes = {name: m.optimizer for name, m in found.items()}
    narrow = 2 * (count - embedding) + 8 * embedding
    wide = {"adamw_torch": 8 * count, "lion_32bit": 4 * count, "sgd": 0}
    wide["adamw_torch_8bit"] = 2 * count  # torchao's makes no exception
    assert sizes == {**wide, "adamw_bnb_8bit": narrow}


def test_the_fewest_layers_stream_until_a_device_fits():
    def streaming(index: int, owner: int | str, frozen: tuple[int, ...]) -> StageMemory:
        return replace(stage(index, owner, sum(frozen), 0), frozen=frozen)

    first = streaming(0, "local", (10,) * 7)
    small, large = streaming(1, 1, (1,) * 8), streaming(2, 1, (5,) * 8)
    memory = [first, small, large]

    def chosen(here: int, there: int, optional: Sequence[int] = (0, 1, 2)) -> dict[int, int]:
        return offload_layers(memory, optional, [({"local"}, here), ({1}, there)])

    assert chosen(70, 48) == {0: 0, 1: 0, 2: 0}
    assert chosen(69, 48) == {0: 4, 1: 0, 2: 0}
    assert chosen(49, 48) == {0: 6, 1: 0, 2: 0}
    # Seven layers have three slots: they save no more than six.
    assert first.offloading(6).total == first.offloading(7).total == 30
    assert chosen(0, 48) == {0: 6, 1: 0, 2: 0}
    # A stage of large layers streams all of its own before another begins.
    assert chosen(70, 18) == {0: 0, 1: 0, 2: 8}
    assert chosen(70, 17) == {0: 0, 1: 4, 2: 8}
    assert chosen(70, 17, optional=[1]) == {1: 8}


def test_streamed_layers_leave_their_frozen_weights_to_host_memory(base):
    adapter = AdapterConfig(target_modules="all-linear")
    config = config_of(base, (0, 1, 4), adapter)
    plan = config.to_dict()["shard_plan"]
    plan[1]["offload"] = 3
    before, after = memory_of(config)[1], memory_of(config.with_changes(shard_plan=plan))[1]
    each = before.frozen[0]
    assert before.frozen == (each, each, each)
    assert (before.host, after.host) == (0, 3 * each)
    assert after.weights == before.weights  # each of three has a slot
    four = replace(before, frozen=(each, each, each + 8, each)).offloading(4)
    assert four.weights == before.weights - 2 * each
    assert four.offloading(0).weights == before.weights
    assert f"and {size(four.host)} of host memory" in str(four)
    full = memory_of(config_of(base, (0, 1, 4)))[1]
    assert full.frozen == (0, 0, 0)


@pytest.mark.parametrize("optim", ["adamw_torch", "paged_adamw_32bit"])
def test_trained_layers_leave_weights_gradients_and_states_to_host_memory(base, optim):
    config = config_of(base, (0, 4, 4), training={"optim": optim})
    plan = config.to_dict()["shard_plan"]
    plan[0]["offload"] = 4
    plain, away = memory_of(config)[0], memory_of(config.with_changes(shard_plan=plan))[0]
    each, moves = plain.learned[0], optim == "adamw_torch"
    assert plain.learned == (each,) * 4
    assert away.host == (8 + 3) * each + moves * plain.optimizer
    assert away.optimizer == plain.optimizer * (not moves)
    assert away.weights == plain.weights - 2 * each  # two have slots
    assert away.gradients == plain.gradients - each  # those of three are made, or on their way
    assert away.trained_bytes == plain.gradients
    assert away.states == plain.states
    assert away.visiting == 2 * plain.optimizer  # small enough for one group
    assert away.placed("mps", one_memory=True) == replace(plain, device="mps")


@needs("host_memory")
def test_states_and_inputs_in_host_memory(base, monkeypatch):
    monkeypatch.setattr(sizes, "STATES_GROUP_BYTES", 1000)
    training: dict[str, Any] = {"gradient_checkpointing": True, "max_in_flight": 2}
    training |= {"gradient_accumulation_steps": 2, "optim": "adamw_torch"}

    def stages(**more: Any) -> list[StageMemory]:
        return memory_of(config_of(base, (0, 4, 4), training={**training, **more}), tokens=16)

    plain, _ = stages()
    states, _ = stages(offload_optimizer=True)
    assert states.optimizer == 0
    assert states.host == plain.optimizer
    assert states.visiting == 128 * 64 * 8 + 2 * 1000  # of the largest matrix, and two groups
    assert states.kept == plain.weights + plain.gradients
    assert states.step == states.visiting
    on_card = states.placed("cuda:0", one_memory=False)
    assert on_card.step == states.visiting + on_card.foreach
    assert 0 < on_card.foreach < plain.foreach
    settings = {**training, "activation_offloading": True}
    inputs, _ = stages(activation_offloading=True)
    hidden = 2 * 16 * 64 * 4
    assert inputs.host == 2 * 4 * hidden
    assert inputs.activations == plain.activations - inputs.host
    assert inputs.working == plain.working + 3 * hidden
    assert inputs.holding(1).host == 4 * hidden
    last = memory_of(config_of(base, (0, 0, 4), training=settings), tokens=16)[1]
    assert last.host == 0  # the first was received, the last is used at once
    # Where the device has the machine's memory nothing leaves.
    for stage in (states, inputs.holding(1), plain.offloading(4)):
        placed = stage.placed("mps", one_memory=True)
        assert placed == replace(plain.holding(stage.in_flight), device="mps")
    assert stages(activation_offloading=True, gradient_checkpointing=False)[0].host == 0


@pytest.mark.parametrize(
    "adapter",
    [
        None,
        AdapterConfig(r=2, target_modules=("q_proj",), rank_pattern={r".*\.2\..*": 8}),
        AdapterConfig(r=2, target_modules=("q_proj",), layers_to_transform=(1, 3)),
    ],
)
def test_parts_that_are_alike_are_priced_once_and_others_apart(adapter, base, monkeypatch):
    config = config_of(base, (0, 4), adapter)
    model, priced = ModelSource(config.model, Path()).config, []

    def noted(spec: StageSpec, *rest: Any) -> StageMemory:
        priced.append(spec.start)
        return stage_memory(spec, *rest)

    stage_memory = sizes._stage_memory
    monkeypatch.setattr(sizes, "_stage_memory", noted)
    parts = sizes.memory_of_parts(config, model, 4)
    assert len(priced) < 6
    assert [part.stage.start for part in parts] == [0, 0, 1, 2, 3, 4]
    monkeypatch.setattr(sizes.Shapes, "form", lambda shapes, rng: rng)
    assert sizes.memory_of_parts(config, model, 4) == parts


def test_stored_attention_in_one_row_is_over_all_its_tokens(base):

    def stored(attention: str, padding_free: bool) -> int:
        model = {"attn_implementation": attention}
        data = {"train": "a.jsonl", "padding_free": padding_free}
        (memory,) = memory_of(config_of(base, (0, 4), model=model, data=data), tokens=12)
        return memory.activations

    # 2 rows of 12 tokens: of the matrices of 4 layers and 4 heads softmax and its float32 input's
    # share stay; the mask is one for all.
    more = 24 * 24 - 2 * 12 * 12
    assert stored("sdpa", True) - stored("sdpa", False) < more * 32
    assert stored("eager", True) - stored("eager", False) >= 4 * 4 * 4 * more
