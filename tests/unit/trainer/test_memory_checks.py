"""Refusals of plans for lack of memory, with figures and with what would help."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import LlamaConfig

from hetero_framework.cluster.cluster import MachineFacts
from hetero_framework.config import Config
from hetero_framework.errors import PlanError
from hetero_framework.models.adapters.trainable import adapter_plan_of
from hetero_framework.models.sizing.memory import StageMemory, estimate_memory
from hetero_framework.trainer.memory_checks import check_memory, host_memory_lines
from tests.installed import needs
from tests.samples import plan_of

LLAMA = LlamaConfig(
    num_hidden_layers=8, hidden_size=64, intermediate_size=512, num_attention_heads=2, vocab_size=64
)
MACHINE = {"hostname": "localhost", "ip": "127.0.0.1", "device": "cuda:0"}
ROOM = 1 << 40


def config(adapter: dict[str, Any] | None = None, cut: int = 4, **training: Any) -> Config:
    return Config.from_dict(
        {
            "coordinator": MACHINE,
            "workers": [{**MACHINE, "id": 1, "port": 9999, "device": "cuda:1"}],
            "shard_plan": plan_of(("local", cut), (1, 8)),
            "model": {"from_config": {"model_type": "llama"}, "tokenizer": "tokenizer"},
            "adapter": adapter,
            "training": {"per_device_train_batch_size": 1, "max_in_flight": 1, **training},
        }
    )


def memory_of(cfg: Config, tokens: int = 8) -> list[StageMemory]:
    return estimate_memory(cfg, LLAMA, tokens=tokens, plan=adapter_plan_of(cfg, LLAMA))


def fact(device: str, free: int = ROOM, host: int | None = None, **more: Any) -> MachineFacts:
    return MachineFacts(device, "a device", free, free, host_free=host, **more)


def refusal(cfg: Config, memory: list[StageMemory], *facts: MachineFacts) -> PlanError:
    with pytest.raises(PlanError) as caught:
        check_memory(cfg, memory, dict(zip(("local", 1), facts, strict=False)), LLAMA)
    return caught.value


def test_stages_that_do_not_fit_are_named_with_the_bytes_that_lack():
    cfg = config()
    memory = memory_of(cfg)
    need = memory[1].total
    check_memory(cfg, memory, {"local": fact("cuda:0"), 1: fact("cuda:1", need)}, LLAMA)
    refused = refusal(cfg, memory, fact("cuda:0"), fact("cuda:1", need - (5 << 20)))
    assert refused.message.startswith("worker 1 has ")
    assert " free, 5 MiB too little: stage 1 (layers 4-7) needs " in refused.message
    assert "coordinator" not in refused.message
    assert refused.hint.startswith("give it fewer layers in shard_plan; or an adapter instead")


def test_processes_on_one_device_are_counted_together():
    cfg = config()
    memory = [replace(m, device="cpu") for m in memory_of(cfg)]
    total = sum(m.total for m in memory)
    check_memory(cfg, memory, {"local": fact("cpu", total), 1: fact("cpu", total)}, LLAMA)
    refused = refusal(cfg, memory, fact("cpu", total), fact("cpu", total - 1))
    assert refused.message.startswith("the coordinator and worker 1 have ")
    assert "stage 0 " in refused.message
    assert "stage 1 " in refused.message
    apart = {"local": fact("cpu", memory[0].total), 1: fact("cuda:0", memory[1].total)}
    check_memory(cfg, memory, apart, LLAMA)


def test_only_changes_that_can_be_made_are_advised():
    def advice(cfg: Config, tokens: int = 2048, **more: Any) -> str:
        memory = memory_of(cfg, tokens)
        return refusal(cfg, memory, fact("cuda:0", 1000, **more), fact("cuda:1")).hint or ""

    full = advice(config(), no_four_bit="old card")
    assert "per_device_train_batch_size" not in full
    assert "max_in_flight" not in full
    assert "nf4" not in full
    assert "offload" not in full
    assert "a smaller data.max_length or gradient_checkpointing" in full
    assert "an adapter instead of full training" in full
    more = advice(
        config(per_device_train_batch_size=2, max_in_flight=2, gradient_accumulation_steps=2)
    )
    assert "a smaller per_device_train_batch_size or a smaller data.max_length or a smaller" in more
    assert "training.max_in_flight or gradient_checkpointing" in more
    adapted = advice(config({"r": 2}, gradient_checkpointing=True), host=ROOM)
    assert "gradient_checkpointing" not in adapted
    assert "instead of full training" not in adapted
    assert "training.offload_optimizer" in adapted
    head = config(cut=0)
    memory = memory_of(head, 1 << 14)
    last = fact("cuda:1", memory[1].kept)
    assert "loss_chunk_tokens" in (refusal(head, memory, fact("cuda:0"), last).hint or "")
    chunked = config(cut=0, loss_chunk_tokens=128)
    memory = memory_of(chunked, 1 << 14)
    assert "loss_chunk_tokens" not in (refusal(chunked, memory, fact("cuda:0"), last).hint or "")


def test_streamed_layers_are_advised_with_their_number_where_they_suffice():
    cfg = config({"r": 2}, cut=0)
    memory = memory_of(cfg)
    last = memory[1]

    def advice(free: int, host: int | None = ROOM) -> str:
        return refusal(cfg, memory, fact("cuda:0"), fact("cuda:1", free, host)).hint or ""

    enough = advice(last.total - 3 * last.frozen[0])
    assert "keep 6 of its layers in host memory (shard_plan[1].offload)" in enough
    assert "[1].offload" in advice(last.total - 6 * last.frozen[0])
    assert "[1].offload" not in advice(last.total - 6 * last.frozen[0] - 1)
    assert "[1].offload" not in advice(last.total - 1, host=None)
    assert "[1].offload" in advice(last.total - 1, host=4 * last.frozen[0])
    assert "[1].offload" not in advice(last.total - 1, host=4 * last.frozen[0] - 1)


@pytest.mark.parametrize("adapter", [{"r": 2}, None], ids=["adapter", "full"])
def test_a_machines_processes_share_its_host_memory(adapter):
    cfg = config(adapter, cut=4)
    memory = [m.offloading(4) for m in memory_of(cfg)]
    host = sum(m.host for m in memory)
    facts = [fact("cuda:0", host=host), fact("cuda:1", host=host + 1)]
    check_memory(cfg, memory, dict(zip(("local", 1), facts, strict=True)), LLAMA)
    refused = refusal(cfg, memory, fact("cuda:0", host=host - (3 << 20)), facts[1])
    assert refused.message.startswith("the coordinator and worker 1 have ")
    assert " of host memory free, 3 MiB too little: stage 0 keeps " in refused.message
    assert "a smaller shard_plan[0].offload; or " in str(refused)
    assert "or a smaller shard_plan[1].offload" in str(refused)
    assert ("adamw_8bit" in str(refused)) == (adapter is None)
    assert "offload_optimizer" not in str(refused)
    # A stage on the CPU of that machine takes its share, too.
    beside = [memory[0], replace(memory_of(cfg)[1], device="cpu")]
    room = memory[0].host + beside[1].total
    check_memory(cfg, beside, {"local": fact("cuda:0", host=room), 1: fact("cpu", room)}, LLAMA)
    refusal(cfg, beside, fact("cuda:0", host=room - 1), fact("cpu", room))


@needs("host_memory")
def test_states_and_inputs_in_host_memory_have_their_own_advice():
    settings = {"gradient_checkpointing": True, "gradient_accumulation_steps": 2}
    cfg = config(max_in_flight=2, offload_optimizer=True, activation_offloading=True, **settings)
    hint = refusal(cfg, memory_of(cfg), fact("cuda:0", host=9), fact("cuda:1", host=9)).hint or ""
    assert "a smaller training.max_in_flight; or no offload_optimizer" in hint


@needs("host_memory")
def test_host_memory_does_nothing_where_device_and_host_are_one_memory():
    cfg = config(activation_offloading=True)
    assert host_memory_lines(cfg, {"local"}) == [
        "training.activation_offloading does nothing for coordinator: device and host are one"
        " memory"
    ]
    assert host_memory_lines(cfg, set()) == []


@needs("host_memory")
@pytest.mark.parametrize("optim", ["adamw_torch_8bit", "paged_adamw_8bit"])
def test_states_that_stay_are_counted_on_the_device_and_told_of(optim):
    cfg = config(optim=optim)
    plain = memory_of(cfg)
    assert host_memory_lines(cfg, set()) == []
    cfg = config(optim=optim, offload_optimizer=True)
    assert memory_of(cfg) == plain
    assert [line.partition(",")[0] for line in host_memory_lines(cfg, set())] == [
        f"offload_optimizer does nothing with {optim}"
    ]
