from __future__ import annotations

import io
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GPT2Config, LlamaConfig, PretrainedConfig

from hetero_framework import log
from hetero_framework.cluster.cluster import MachineFacts
from hetero_framework.config import Config
from hetero_framework.errors import ConfigError, DataError, DeviceError, PlanError
from hetero_framework.models.adapters.trainable import adapter_plan_of
from hetero_framework.models.cut.tiny import tiny_config
from hetero_framework.models.files.source import ModelSource
from hetero_framework.models.sizing.memory import estimate_memory
from hetero_framework.trainer import setup
from hetero_framework.trainer.resolution import Resolved
from hetero_framework.trainer.setup import (
    Prepared,
    check_compiled,
    check_positions,
    codec_lines,
    fit_devices,
    largest_boundary,
    largest_frame,
    resolve_loss_chunk,
)
from tests.installed import needs
from tests.samples import config_for, plan_of

GPT2 = GPT2Config(n_layer=2, n_head=2, n_embd=8, n_positions=16, vocab_size=32)
LLAMA = LlamaConfig(
    num_hidden_layers=4,
    hidden_size=16,
    intermediate_size=32,
    num_attention_heads=2,
    vocab_size=64,
    max_position_embeddings=16,
)


def test_a_terminal_says_when_a_tiny_copy_is_compared(llama, texts, monkeypatch):
    shown = []
    result = SimpleNamespace(subject="a tiny copy", model_type="llama", verdict="bit-equal")
    monkeypatch.setattr(setup, "admit", lambda *_: shown.append(log._shown) or result)
    monkeypatch.setattr("sys.stderr", terminal := io.StringIO())
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    sections = {"model": {"name_or_path": str(llama)}, "data": {"train": str(texts)}}
    setup.prepare(config_for(("local", 3), (1, 6), **sections))
    assert shown == ["comparing a tiny copy of the model, cut this way, with the whole ..."]
    assert log._shown == ""


def test_check_positions_longer_than_a_learned_table_is_refused():
    check_positions(GPT2, 16)
    with pytest.raises(DataError, match="17 tokens, but the model has 16 positions"):
        check_positions(GPT2, 17)


def test_check_positions_computed_ones_go_on():
    check_positions(LLAMA, 17)


def test_compiled_layers_and_the_loss_of_their_routers_are_refused():
    model = tiny_config("mixtral")
    check_compiled(config(torch_compile=True), model)
    model.output_router_logits = True
    check_compiled(config(), model)
    with pytest.raises(ConfigError, match=r"training\.torch_compile is set"):
        check_compiled(config(torch_compile=True), model)


def config(**training) -> Config:
    machine = {"hostname": "localhost", "ip": "127.0.0.1"}
    return Config.from_dict(
        {
            "coordinator": machine,
            "workers": [{**machine, "id": 1, "port": 9999}],
            "shard_plan": plan_of(("local", 2), (1, 4)),
            "model": {"from_config": {"model_type": "llama"}, "tokenizer": "tokenizer"},
            "data": {"train": "train.jsonl", "eval": "eval.jsonl"},
            "training": training,
        }
    )


def test_largest_frame_holds_any_boundary_and_any_tensor():
    boundary = largest_boundary(config(per_device_train_batch_size=4), LLAMA, 100)
    limit = largest_frame(LLAMA, boundary)
    assert limit > 4 * 100 * 16 * 4
    assert limit > 64 * 16 * 4


def prepared(cfg: Config, tokens: int) -> Prepared:
    memory = estimate_memory(cfg, LLAMA, tokens=tokens)
    data = SimpleNamespace(row_tokens=tokens, pictures=None)
    source = SimpleNamespace(config=LLAMA)
    return Prepared(Resolved.start(cfg), source, None, data, None, memory, 0, 0)  # type: ignore[arg-type]


def fact(device: str, free: int) -> MachineFacts:
    host = None if device in ("cpu", "mps") else 1 << 40
    return MachineFacts(device, "a device", free, free, host_free=host)


def test_checkpointing_auto_is_written_out_for_the_stages_that_need_it(logged):
    training = {"gradient_accumulation_steps": 4, "max_in_flight": 4}
    parts = prepared(config(**training, gradient_checkpointing="auto"), 512)
    need = [m.total for m in parts.memory]
    fitted = fit_devices(parts, {"local": fact("cuda:0", need[0]), 1: fact("cuda:1", need[1])})
    assert [fitted.config.checkpointing(k) for k in range(2)] == [False, False]
    fitted = fit_devices(parts, {"local": fact("cuda:0", need[0] - 1), 1: fact("cuda:1", need[1])})
    assert [fitted.config.checkpointing(k) for k in range(2)] == [True, False]
    assert fitted.memory[0].total < need[0]
    assert fitted.memory[1].total == need[1]
    assert logged[0] == "gradient checkpointing: no stage needs it"
    assert logged[1].endswith("to fit the memory: stage 0")
    nothing = {"local": fact("cuda:0", 1000), 1: fact("cuda:1", 1000)}
    with pytest.raises(PlanError, match="the coordinator has"):
        fit_devices(parts, nothing)


def test_a_stage_keeps_its_own_checkpointing_under_auto():
    cfg = config(gradient_checkpointing="auto")
    first, second = cfg.to_dict()["shard_plan"]
    cfg = cfg.with_changes(shard_plan=[{**first, "gradient_checkpointing": False}, second])
    parts = prepared(cfg, 512)
    with pytest.raises(PlanError, match="stage 0"):
        fit_devices(parts, {"local": fact("cuda:0", 1000), 1: fact("cuda:1", 1 << 40)})


def with_entries(cfg: Config, *entries: dict[str, Any]) -> Config:
    plan = cfg.to_dict()["shard_plan"]
    return cfg.with_changes(shard_plan=[a | b for a, b in zip(plan, entries, strict=True)])


def adapted(entries: tuple[dict[str, Any], ...], **training: Any) -> Prepared:
    """Two stages of six layers, with LoRA."""
    model = LlamaConfig(**{**LLAMA.to_dict(), "num_hidden_layers": 12, "hidden_size": 128})
    raw = {**config(**training).to_dict(), "adapter": {"r": 2}}
    cfg = with_entries(
        Config.from_dict({**raw, "shard_plan": plan_of(("local", 6), (1, 12))}), *entries
    )
    plan = adapter_plan_of(cfg, model)
    memory = estimate_memory(cfg, model, tokens=64, plan=plan)
    data = SimpleNamespace(row_tokens=64, pictures=None)
    source = SimpleNamespace(config=model)
    return Prepared(Resolved.start(cfg), source, None, data, plan, memory, 0, 0)  # type: ignore[arg-type]


@needs("host_memory")
def test_offload_auto_is_written_out_for_the_stages_that_need_it(logged):
    parts = adapted(({"offload": "auto"}, {"offload": "auto"}), max_in_flight=1)
    first, second = parts.memory
    enough = {"local": fact("cuda:0", first.total), 1: fact("cuda:1", second.total)}
    fitted = fit_devices(parts, enough)
    assert [entry.offload for entry in fitted.config.shard_plan] == [0, 0]
    fitted = fit_devices(parts, {**enough, 1: fact("cuda:1", second.total - 1)})
    assert [entry.offload for entry in fitted.config.shard_plan] == [0, 4]
    assert fitted.memory[1].total == second.total - 2 * second.frozen[0]
    assert fitted.memory[1].host == 4 * second.frozen[0]
    less = {**enough, "local": fact("cuda:0", first.total - 3 * first.frozen[0])}
    assert fit_devices(parts, less).config.shard_plan[0].offload == 6
    assert logged == [
        "offload: none is needed",
        "offload, to fit the memory: stage 1 streams 4 of its 6 layers",
        "offload, to fit the memory: stage 0 streams 6 of its 6 layers",
    ]
    with pytest.raises(PlanError, match="1 MiB too little: stage 0"):
        fit_devices(parts, {**enough, "local": fact("cuda:0", first.total - 6 * first.frozen[0])})
    with pytest.raises(PlanError, match="1 MiB too little: stage 1"):
        fit_devices(parts, {**enough, 1: fact("mps", second.total - 1)})


@needs("host_memory")
def test_layers_are_computed_again_before_they_are_streamed():
    auto = {"offload": "auto"}
    parts = adapted((auto, auto), max_in_flight=1, gradient_checkpointing="auto")
    first, second = parts.memory
    facts = {"local": fact("cuda:0", first.total - 1), 1: fact("cuda:1", second.total)}
    fitted = fit_devices(parts, facts)
    entries = fitted.config.shard_plan
    assert [(e.gradient_checkpointing, e.offload) for e in entries] == [(True, 0), (False, 0)]
    again = fitted.memory[0].total
    fitted = fit_devices(parts, {**facts, "local": fact("cuda:0", again - 1)})
    entry = fitted.config.shard_plan[0]
    assert (entry.gradient_checkpointing, entry.offload) == (True, 4)


@needs("host_memory")
def test_settings_for_all_stages_do_nothing_where_memory_is_one(logged):
    parts = adapted(({}, {}), max_in_flight=1, offload_optimizer=True)
    first, second = parts.memory
    room = 1 << 30
    fitted = fit_devices(parts, {"local": fact("cuda:0", room), 1: fact("cpu", room)})
    assert fitted.memory[0].host == first.host > 0
    assert fitted.memory[1].host == 0
    assert fitted.memory[1].optimizer == second.host_states
    assert [line.partition(": ")[0] for line in logged] == [
        "training.offload_optimizer does nothing for worker 1"
    ]
    for entry in ({"offload": 4}, {"offload_optimizer": True}):
        with pytest.raises(DeviceError, match=r"shard_plan\[1\].*are one memory, as for worker 1"):
            fit_devices(adapted(({}, entry)), {"local": fact("cuda:0", room), 1: fact("mps", room)})


def test_stages_hold_as_many_micro_batches_as_their_memory_allows():
    parts = prepared(config(gradient_accumulation_steps=8), 512)
    first, last = parts.memory
    assert first.in_flight == 4
    room = {"local": fact("cuda:0", first.holding(3).total), 1: fact("cuda:1", last.total)}
    fitted = fit_devices(parts, room)
    assert fitted.memory_limits[0] == 3
    assert fitted.memory[0] == replace(first.holding(3), device="cuda:0")
    chosen = prepared(config(gradient_accumulation_steps=8, max_in_flight=4), 512)
    with pytest.raises(PlanError, match="the coordinator has"):
        fit_devices(chosen, room)


def test_the_loss_chunk_is_decided_before_any_process_starts():
    def decided(model_config: PretrainedConfig, tokens: int, **training: Any) -> tuple[Any, str]:
        cfg = config(per_device_train_batch_size=2, **training)
        resolved = resolve_loss_chunk(Resolved.start(cfg), model_config, tokens)
        reasons = [decision.reason for decision in resolved.decisions]
        return resolved.config.training.loss_chunk_tokens, "".join(reasons)

    assert decided(LLAMA, 12) == (None, "the logits of a whole micro-batch, 24 tokens, fit at once")
    assert decided(LLAMA, 12, loss_chunk_tokens=24)[0] is None
    assert decided(LLAMA, 12, loss_chunk_tokens=None) == (None, "")
    assert decided(LLAMA, 12, loss_chunk_tokens=23) == (23, "")
    most = (1 << 26) // 64
    assert decided(LLAMA, 1 << 20) == (most, f"the logits of {most} tokens exist at once")
    evaluating = {"per_device_eval_batch_size": 4, "eval_strategy": "epoch"}
    assert decided(LLAMA, 12, loss_chunk_tokens=24, **evaluating) == (24, "")
    chunk, reason = decided(tiny_config("xlm"), 64, loss_chunk_tokens=8)
    assert chunk is None
    assert "the loss would differ" in reason


@needs("codecs")
@pytest.mark.parametrize(
    ("dtype", "wire", "said"),
    [
        ("float32", {}, []),
        ("float32", {"activations": "bf16"}, ["wire.activations bf16, so the result depends"]),
        ("bfloat16", {"gradients": "int8"}, ["wire.gradients int8, so the result depends"]),
        ("float16", {"activations": "bf16"}, ["activations travel as they are"]),
    ],
)
def test_codecs_report_their_effect_or_why_they_have_none(dtype, wire, said):
    cfg = config().with_changes(model={"dtype": dtype}, wire=wire)
    lines = codec_lines(cfg, ModelSource.of(cfg).dtype)
    assert len(lines) == len(said)
    assert all(text in line for text, line in zip(said, lines, strict=True))
