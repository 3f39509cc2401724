"""The configurations of examples/ train, with tiny models and data, on the processors of one
machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetero_framework import cli
from tests.pools import read_metrics
from tests.samples import DEVICE, free_ports, save_llama

pytestmark = [pytest.mark.xdist_group("pool"), pytest.mark.usefixtures("nothing_left")]

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 2


@pytest.fixture(scope="module")
def tall(tmp_path_factory):
    """As many layers as the model of 72B has."""
    small = {"hidden_size": 64, "intermediate_size": 64}
    return save_llama(tmp_path_factory.mktemp("tall"), layers=80, **small)


def train(name: str, model: Path, data: Path, output: Path, machines: dict[str, Any]) -> int:
    """`hetero train` by an example, with these settings of its machines."""
    changes = {
        **machines,
        "model.name_or_path": str(model),
        "model.dtype": "float32",
        "data.train": str(data),
        "training.output_dir": str(output),
        "training.max_steps": STEPS,
        "training.gradient_accumulation_steps": 2,
        "training.save_steps": 100,
        "training.verify_architecture": False,
        "training.visualize": False,
    }
    replaced = [f"--set={place}={json.dumps(value)}" for place, value in changes.items()]
    return cli.main(["train", "--config", str(EXAMPLES / name), "--role", "coordinator", *replaced])


@pytest.mark.long
@pytest.mark.parametrize("name", ["three_machines.json", "slurm.json"])
def test_machines_are_planned_for_and_train(name, llama, texts, tmp_path):
    """This process starts the workers, as it does those of its own machine; the laptop dials."""
    example = json.loads((EXAMPLES / name).read_text(encoding="utf-8"))
    entries = ["coordinator", *(f"workers[{i}]" for i in range(len(example["workers"])))]
    machines: dict[str, Any] = {}
    for entry, port in zip(entries, free_ports(len(entries)), strict=True):
        machines |= {f"{entry}.ip": "127.0.0.1", f"{entry}.device": DEVICE}
        machines |= {f"{entry}.hostname": "localhost", f"{entry}.port": port}
    if name == "three_machines.json":
        del machines["workers[1].port"]
    assert train(name, llama, texts, tmp_path / "run", machines) == 0
    assert len(read_metrics(tmp_path / "run")) == STEPS
    plan = json.loads((tmp_path / "run" / "plan.json").read_text(encoding="utf-8"))
    assert plan["shard_plan"][-1]["end"] == 6


@pytest.mark.long
def test_two_cards_and_a_mac_hold_the_layers_of_the_plan_in_4_bits_and_in_full(
    pool, tall, texts, tmp_path, capsys
):
    entries = {"coordinator": pool.machines["coordinator"]}
    entries |= {f"workers[{i}]": pool.machines["workers"][i] for i in range(2)}
    machines = {
        f"{entry}.{key}": machine[key]
        for entry, machine in entries.items()
        for key in ("hostname", "ip", "port", "device")
    }
    assert train("two_cards_and_mac.json", tall, texts, tmp_path / "run", machines) == 0
    assert len(read_metrics(tmp_path / "run")) == STEPS
    said = capsys.readouterr().out
    assert "worker 1, layers 0-10" in said
    assert "worker 2, layers 11-23" in said
