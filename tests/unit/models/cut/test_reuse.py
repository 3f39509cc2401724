"""Modules that a process reuses when it gets another part of the model."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_framework.config import AdapterConfig, ModelConfig
from hetero_framework.core.devices import open_device
from hetero_framework.models.adapters.lora import plan_adapter
from hetero_framework.models.adapters.trainable import attach_adapter
from hetero_framework.models.cut.partition import ShardRange
from hetero_framework.models.cut.reuse import ReusePool
from hetero_framework.models.cut.shard import Shard, build_shard, load_shard
from hetero_framework.models.cut.side import Bundle
from hetero_framework.models.cut.tiny import tiny_config
from tests.reads import note_reads
from tests.unit.adapter_helpers import batch, randomise, ranges, save_model

Cut = Sequence[ShardRange]
FIRST, MIDDLE, LAST = ranges(0, 2, 3, 4)
WHOLE = ShardRange(0, 4, True, True)
LORA: dict[str, Any] = {"target_modules": ("q_proj", "down_proj"), "lora_dropout": 0.1}
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": LORA,
    "DoRA on all": {"target_modules": "all-linear", "use_dora": True},
    "saved ends": {"target_modules": ("q_proj",), "modules_to_save": ("embed_tokens", "lm_head")},
    "embedding": {"target_modules": ("embed_tokens", "o_proj")},
    "experts' own parameters": {
        "target_modules": ("q_proj",),
        "target_parameters": ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    },
}


class Process:
    """What one process does with its part of a model: the loading of stages without the stages."""

    def __init__(
        self, base: Path, adapter: dict[str, Any] | None, dtype: str = "float32", **model: Any
    ) -> None:
        self._model = ModelConfig(name_or_path=str(base), dtype=dtype, **model)  # type: ignore[arg-type]
        self._adapter = AdapterConfig(**adapter) if adapter is not None else None
        self.shards: list[Shard] = []

    def load(self, *ranges: ShardRange, origin: object = "the same") -> list[Shard]:
        pool = ReusePool("the same")
        for shard in self.shards:
            pool.add(shard.range, shard.dissolve())
        self.shards = []
        for rng, kept in zip(ranges, pool.hand_out(origin, ranges), strict=True):
            shard = load_shard(self._model, Path(), rng, open_device("cpu"), seed=5, kept=kept)
            plan = plan_adapter(shard.config, self._adapter) if self._adapter else None
            attach_adapter(shard, plan, 5)
            self.shards.append(shard)
        return self.shards


@pytest.fixture
def read(monkeypatch):
    """The names of the tensors that were read from the files."""
    names: list[str] = []
    note_reads(monkeypatch, names.append)
    return names


def layers_in(names: list[str]) -> set[str]:
    return {n.split(".")[2] if ".layers." in n or ".h." in n else n for n in names}


def assert_like_new(shards: list[Shard], base: Path, adapter: Any, **model: Any) -> None:
    """Every tensor is what a new process would have, and so are loss and output."""
    new = Process(base, adapter, **model).load(*(shard.range for shard in shards))
    for shard, fresh in zip(shards, new, strict=True):
        for kind in ("named_parameters", "named_buffers"):
            own, others = (dict(getattr(s.model, kind)()) for s in (shard, fresh))
            assert list(own) == list(others)
            for name, tensor in own.items():
                assert tensor.requires_grad == others[name].requires_grad, name
                assert torch.equal(tensor, others[name]), name
        assert fresh.fingerprint.items() <= shard.fingerprint.items()
    assert torch.equal(output(shards), output(new))


def output(shards: list[Shard]) -> torch.Tensor:
    """What the last one of these makes of a batch, or of what it is given instead of others."""
    received: Bundle = ()
    for shard in shards:
        shard.train()
        shard.on_enter = lambda place: torch.manual_seed(sum(map(ord, str(place))))
        if not received and not shard.range.is_first:
            width = shard.width
            received = (torch.linspace(-1, 1, 2 * 12 * width).reshape(2, 12, width),)
        inputs = {k: v[:2, :12] for k, v in batch().items()}
        if shard.range.is_last:
            return shard.loss(inputs, received, torch.tensor(9))
        received = shard.forward(inputs, received)
    return received[0]


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    types = ("llama", "gemma", "mixtral", "gpt2")
    return {kind: save_model(tmp_path_factory.mktemp(kind), kind) for kind in types}


CHANGES: dict[str, tuple[Cut, Cut, set[str]]] = {
    "more": ([FIRST], [ShardRange(0, 3, True, False)], {"2"}),
    "fewer": ([ShardRange(0, 3, True, False)], [FIRST], set()),
    "more of the last": ([LAST], [ShardRange(2, 4, False, True)], {"2"}),
    "others": ([LAST], [MIDDLE], {"2"}),
    "a part": ([ShardRange(1, 3, False, False)], [MIDDLE], set()),
    "two": ([FIRST, LAST], [ShardRange(0, 1, True, False), ShardRange(1, 4, False, True)], {"2"}),
    "the same": ([WHOLE], [WHOLE], set()),
    "all": ([FIRST], [WHOLE], {"2", "3", "ends"}),
}


@pytest.mark.parametrize(
    ("kind", "adapter", "change"),
    [
        *((kind, "lora", change) for kind in ("llama", "gemma") for change in CHANGES),
        ("llama", "DoRA on all", "two"),
        ("llama", "saved ends", "two"),
        ("gemma", "embedding", "two"),
        ("mixtral", "experts' own parameters", "two"),
    ],
)
@pytest.mark.filterwarnings("ignore:Model (has|with) `tie_word_embeddings=True`")
def test_only_missing_modules_are_read_and_the_shard_equals_a_new_one(
    kind, adapter, change, bases, read
):
    base, settings = bases[kind], ADAPTERS[adapter]
    before, after, expected = CHANGES[change]
    process = Process(base, settings)
    randomise(process.load(*before))
    output(process.shards)
    read.clear()
    process.load(*after)
    ends = {name for name in read if ".layers." not in name}
    assert layers_in([n for n in read if n not in ends]) == expected - {"ends"}
    assert bool(ends) == ("ends" in expected)
    assert_like_new(process.shards, base, settings)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", ["nf4", "int8"])
@pytest.mark.filterwarnings("ignore:MatMul8bitLt")
def test_quantised_weights_stay_as_they_are(quantization, dtype, bases, read):
    base, model = bases["llama"], {"quantization": quantization, "dtype": dtype}
    process = Process(base, LORA, **model)
    randomise(process.load(FIRST))
    output(process.shards)
    read.clear()
    process.load(ShardRange(0, 3, True, False))
    assert layers_in(read) == {"2"}
    assert_like_new(process.shards, base, LORA, **model)


@pytest.mark.parametrize(
    ("kind", "adapter", "is_kept"),
    [
        ("llama", None, False),
        ("gpt2", {"target_modules": ("c_attn",), "bias": "all"}, False),
        ("gpt2", {"target_modules": ("c_attn",)}, True),
    ],
    ids=["all of it", "biases", "an adapter alone"],
)
def test_trained_modules_are_not_reused(kind, adapter, is_kept, bases, read):
    process = Process(bases[kind], adapter)
    randomise(process.load(FIRST))
    read.clear()
    process.load(FIRST)
    assert {"0", "1"}.isdisjoint(layers_in(read)) == is_kept
    assert_like_new(process.shards, bases[kind], adapter)


def test_weights_of_another_origin_are_read_anew(bases, read):
    process = Process(bases["llama"], LORA)
    process.load(FIRST)
    read.clear()
    process.load(FIRST, origin="another")
    assert {"0", "1"} <= layers_in(read)


@pytest.mark.parametrize(("kind", "leaves"), [("llama", True), ("rwkv", False), ("zamba2", False)])
def test_blocks_that_the_model_shares_or_rescales_are_not_kept(kind, leaves):
    config = tiny_config(kind)
    shard = build_shard(config, None, ShardRange(0, config.num_hidden_layers, True, True))
    shard.model.requires_grad_(False)
    assert bool(shard.dissolve().blocks) == leaves


def test_modules_that_are_not_reused_are_freed_before_loading(bases):
    process = Process(bases["llama"], LORA)
    process.load(FIRST)
    blocks = [weakref.ref(block) for block in process.shards[0]._blocks[:2]]
    adapters = [weakref.ref(p) for p in process.shards[0].model.parameters() if p.requires_grad]
    pool = ReusePool()
    shard = process.shards.pop()
    pool.add(shard.range, shard.dissolve())
    del shard
    gc.disable()
    try:
        kept = pool.hand_out(None, [ShardRange(1, 3, False, False)])
        assert [block() is not None for block in blocks] == [False, True]
        assert not any(adapter() is not None for adapter in adapters)
    finally:
        gc.enable()
    assert list(kept[0].blocks) == [1]


def test_routers_of_blocks_that_move_report_once(tmp_path):
    base = save_model(tmp_path / "mixtral", "mixtral")
    process = Process(base, LORA | {"target_modules": ("q_proj",)}, router_aux_loss_coef=0.5)
    former = output(process.load(WHOLE))  # the model hooks its blocks in its first forward
    assert torch.equal(output(process.load(FIRST, ShardRange(2, 4, False, True))), former)
    assert torch.equal(output(process.load(WHOLE)), former)
