from __future__ import annotations

import pytest
from transformers import BloomConfig, GPT2Config, LlamaConfig

from hetero_framework.config import Config
from hetero_framework.errors import ArchitectureError, DataError, PlanError
from hetero_framework.trainer.cluster import MachineFacts
from hetero_framework.trainer.preparation import (
    Prepared,
    check_memory,
    check_positions,
    largest_frame,
    without_padding,
)

GPT2 = GPT2Config(n_layer=2, n_head=2, n_embd=8, n_positions=16, vocab_size=32)
LLAMA = LlamaConfig(
    num_hidden_layers=4,
    hidden_size=16,
    intermediate_size=32,
    num_attention_heads=2,
    vocab_size=64,
    max_position_embeddings=16,
)


def test_check_positions_longer_than_a_learned_table_is_refused() -> None:
    check_positions(GPT2, 16)
    with pytest.raises(DataError, match="17 tokens, but the model has 16 positions"):
        check_positions(GPT2, 17)


def test_check_positions_computed_ones_go_on() -> None:
    check_positions(LLAMA, 17)


def config(**training) -> Config:
    machine = {"hostname": "localhost", "ip": "127.0.0.1"}
    return Config.from_dict(
        {
            "coordinator": machine,
            "workers": [{**machine, "id": 1, "port": 9999}],
            "shard_plan": [
                {"id": "local", "start": 0, "end": 2},
                {"id": 1, "start": 2, "end": 4},
            ],
            "model": {"from_config": {"model_type": "llama"}},
            "training": training,
        }
    )


def test_largest_frame_holds_any_boundary_and_any_tensor() -> None:
    limit = largest_frame(config(per_device_train_batch_size=4), LLAMA, 100)
    assert limit > 4 * 100 * 16 * 4
    assert limit > 64 * 16 * 4


def test_without_padding_every_process_is_told_the_attention() -> None:
    notes: list[str] = []
    told = without_padding(config(), LLAMA, notes.append)
    assert told.model is not None
    assert told.model.attn_implementation == "per_sample"
    assert "takes each sample by itself" in notes[0]


def test_without_padding_is_refused_where_samples_meet() -> None:
    with pytest.raises(ArchitectureError, match="do not stay apart") as caught:
        without_padding(config(), BloomConfig(n_layer=4), print)
    assert "data.padding_free to false" in str(caught.value)


def test_check_memory_counts_processes_on_one_device_together() -> None:
    from hetero_framework.models.memory import estimate_memory

    cfg = config()
    memory = estimate_memory(cfg, LLAMA, tokens=8)
    parts = Prepared(cfg, LLAMA, None, None, None, memory, 0)  # type: ignore[arg-type]
    total = sum(m.total for m in memory)
    fact = MachineFacts("cpu", "a processor", total, total)
    check_memory(parts, {"local": fact, 1: fact})
    less = MachineFacts("cpu", "a processor", total, total - 1)
    with pytest.raises(PlanError, match="worker 1 has"):
        check_memory(parts, {"local": less, 1: less})
    other = MachineFacts("cuda:0", "a card", total, memory[1].total)
    check_memory(parts, {"local": MachineFacts("cpu", "", total, memory[0].total), 1: other})
