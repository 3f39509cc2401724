"""Models whose boundaries carry more than the hidden state: cut over processes, they train to the
bit as in one."""

from __future__ import annotations

import pytest

from tests.integration.test_parity import assert_same, weights
from tests.samples import save_tiny

LORA = {"r": 4, "target_modules": "all-linear"}


@pytest.mark.parametrize(
    "adapter", [pytest.param(None, marks=pytest.mark.long), LORA], ids=["full", "lora"]
)
def test_inputs_of_single_layers_and_shared_keys_cross_and_their_gradients_come_back(
    adapter, losses, tmp_path
) -> None:
    model = save_tiny("gemma3n_text", tmp_path / "model")
    sections = {"model": {"name_or_path": str(model)}, "adapter": adapter}
    whole = losses([], "whole", **sections)
    plan = [
        {"id": "local", "start": 0, "end": 1},
        {"id": 1, "start": 1, "end": 3, "gradient_checkpointing": True},
        {"id": 2, "start": 3, "end": 4},
        {"id": 1, "start": 4, "end": 5},
        {"id": "local", "start": 5, "end": 6, "is_last": True},
    ]
    assert losses([], "cut", shard_plan=plan, **sections) == whole
    assert_same(weights(tmp_path / "cut"), weights(tmp_path / "whole"))


def test_token_ids_go_to_the_stages_whose_layers_read_them(losses, tmp_path) -> None:
    model = save_tiny("deepseek_v4", tmp_path / "model")
    sections = {"model": {"name_or_path": str(model)}}
    whole = losses([], "whole", **sections)
    assert losses([1, 4], "cut", **sections) == whole
    assert_same(weights(tmp_path / "cut"), weights(tmp_path / "whole"))


@pytest.mark.long
@pytest.mark.parametrize("links", ["direct", "relay"])
def test_the_loss_of_routers_crosses_processes_that_hold_several_stages(
    links, losses, tmp_path
) -> None:
    model = save_tiny("mixtral", tmp_path / "model")
    sections = {
        "model": {"name_or_path": str(model), "router_aux_loss_coef": 0.1},
        "adapter": {"r": 4, "target_modules": ["q_proj"], "target_parameters": ["mlp.gate.weight"]},
    }
    whole = losses([], "whole", **sections)
    plan = [
        {"id": "local", "start": 0, "end": 1},
        {"id": 1, "start": 1, "end": 3, "gradient_checkpointing": True},
        {"id": 2, "start": 3, "end": 4},
        {"id": 1, "start": 4, "end": 6, "gradient_checkpointing": True},
        {"id": "local", "start": 6, "end": 6, "is_last": True},
    ]
    assert losses([], "cut", shard_plan=plan, links=links, **sections) == whole
    assert_same(weights(tmp_path / "cut"), weights(tmp_path / "whole"))
    assert losses([2, 4], "three", **sections) == whole
