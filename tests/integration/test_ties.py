"""Weights shared by blocks of several stages: under any cut they train to the bit as in one
process, and are written once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.test_parity import assert_same_runs
from tests.samples import plan_of, save_tiny

LORA = {"r": 4, "target_modules": ["q_proj", "down_proj"]}
# Worker 1 holds a source and a target of it, worker 2 another source whose target is here.
INTERLEAVED = plan_of(("local", 1), (1, 2), (2, 4), (1, 5), ("local", 6))
INTERLEAVED[1]["gradient_checkpointing"] = True
# The sources are here, with a target of one of them.
FROM_HERE = plan_of(("local", 5), (1, 6))
FROM_HERE[0]["gradient_checkpointing"] = True


@pytest.fixture(scope="module")
def zamba2(tmp_path_factory):
    """Layers 1 and 4 have one transformer in common, layers 2 and 5 another one."""
    kinds = ["linear_attention", "hybrid", "hybrid"] * 2
    changes: dict[str, Any] = {"layers_block_type": kinds, "hybrid_layer_ids": [1, 2, 4, 5]}
    return save_tiny("zamba2", tmp_path_factory.mktemp("zamba2"), num_mem_blocks=2, **changes)


@pytest.mark.parametrize(
    ("plan", "adapter"),
    [
        (INTERLEAVED, None),
        pytest.param(FROM_HERE, None, marks=pytest.mark.long),
        pytest.param(INTERLEAVED, LORA, marks=pytest.mark.long),
    ],
    ids=["full", "from here", "lora"],
)
def test_blocks_in_common_over_processes_equal_one_process(plan, adapter, zamba2, losses, tmp_path):
    sections = {"model": {"name_or_path": str(zamba2)}, "adapter": adapter}
    losses([], "whole", **sections)
    losses([], "cut", shard_plan=plan, **sections)
    assert_same_runs(tmp_path / "cut", tmp_path / "whole")
