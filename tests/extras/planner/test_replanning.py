"""The plan of a run without workers that are away, by the times of its steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from hetero_framework.cluster.cluster import MachineFacts
from hetero_framework.config import PLAN_FILE, Config, StageSpec
from hetero_framework.engine.schedule.simulator import Profile
from hetero_framework.errors import ConfigError, PlanError
from hetero_framework.extras.planner.layout import Fleet
from hetero_framework.extras.planner.replanning import Replanning, simulated
from hetero_framework.trainer import setup
from tests.samples import machines_here, save_llama, save_texts

Make = Callable[..., Replanning]


@pytest.fixture
def make(tmp_path_factory):
    """Of a run with six layers over three processes."""
    folder = tmp_path_factory.mktemp("run")
    model, texts = save_llama(folder / "model"), save_texts(folder / "texts.jsonl", 8)

    def made(
        lacking: Sequence[int] = (),
        facts: dict[Any, MachineFacts] | None = None,
        plan: dict[Any, dict[str, Any]] | None = None,
        **kinds: str,
    ) -> Replanning:
        owners = ("local", 1, 2)
        raw = machines_here(("local", 2), (1, 4), (2, 6))
        for worker in raw["workers"]:
            worker["quantization"] = kinds.get(f"worker_{worker['id']}")
        for entry in raw["shard_plan"]:
            entry |= (plan or {}).get(entry["id"], {})
        out = {"output_dir": str(folder / "out"), "gradient_accumulation_steps": 4}
        raw |= {
            "adapter": {"target_modules": "all-linear"},
            "model": {"name_or_path": str(model), "quantization": kinds.get("all")},
            "data": {"train": str(texts), "max_length": 32},
            "training": {**out, "verify_architecture": False},
        }
        facts = facts or dict.fromkeys(owners, MachineFacts("cpu", "cpu", 1 << 40, 1 << 40))
        facts |= {k: replace(facts[k], no_four_bit="none here") for k in lacking}
        parts = setup.fit_devices(setup.prepare(Config.from_dict(raw)), facts)
        return Replanning(parts, facts, survivors=False)

    return made


def note(run: Replanning) -> None:
    """Steps whose middle stage takes three times as long as the others."""
    for _ in range(5):
        run.after_step(Profile.of([0.2, 0.6, 0.2], [0.4, 1.2, 0.4]))


def test_before_the_first_step_a_plan_has_no_prediction(make):
    assert make().without([2]).planned_s is None


def test_absent_workers_get_no_layers_until_they_return(make):
    run = make()
    note(run)
    change = run.without([2])
    owners = {stage.owner for stage in change.prepared.config.plan.stages}
    assert owners == {"local", 1}
    # 4 micro-batches of 2.7 s, two processes with a third of the layers, at the least.
    assert 7.2 < change.planned_s < 12
    run.taken(change)
    assert run.lacking == {2}
    back = run.with_back([2], [])
    run.taken(back)
    assert [stage.owner for stage in run.prepared.config.plan.stages] == ["local", 1, 2]
    assert run.lacking == set()


def test_layers_move_between_machines_of_one_precision_only(make):
    run = make(all="nf4", worker_2="none")
    kinds = run.prepared.config.kinds
    assert kinds == {"nf4": "embedding + layers 0-3", "none": "layers 4-5 + head"}
    others = run.without([1])
    assert others.prepared.config.kinds == kinds
    assert {stage.owner for stage in others.prepared.config.plan.stages} == {"local", 2}
    with pytest.raises(PlanError, match="layers keep their precision"):
        run.without([2])
    entries = [{"id": "local", "start": 0, "end": 3}, {"id": 2, "start": 3, "end": 6}]
    with pytest.raises(PlanError, match="layers would be held in another precision"):
        setup.replanned(run.prepared, entries, run.facts, "a test")


def test_a_device_without_4_bits_is_refused_before_anything_is_loaded(make):
    with pytest.raises(ConfigError, match="worker 2 cannot hold quantised weights: none here"):
        make([2], all="nf4")
    make([2], all="nf4", worker_2="none")


def test_a_process_that_streams_layers_streams_as_few_as_it_has_to(make):
    plenty = MachineFacts("cpu", "cpu", 1 << 40, 1 << 40, None, 1 << 40)
    facts = dict.fromkeys(("local", 1, 2), plenty)
    settings = {2: {"offload": "auto", "offload_optimizer": True}}
    run = make(facts=dict(facts), plan=settings)
    entries = run._with_settings(run._home)
    assert [entry["offload"] for entry in entries] == [0, 0, "auto"]
    assert [entry["offload_optimizer"] for entry in entries] == [None, None, True]
    needs = run._part_bytes[2]
    each = needs["layer_bytes"][0] + needs["activation_bytes_per_layer"][0]
    short = needs["layer_frozen_bytes"][0]
    free = int(5 * each + needs["head_bytes"] - short)
    stages = StageSpec(0, "local", 0, 1, True, False), StageSpec(1, 2, 1, 6, False, True)
    for host_free, fits in ((1 << 40, True), (3 * short, False), (None, False)):
        run.facts[2] = replace(plenty, device="cuda:0", memory_free=free, host_free=host_free)
        assert (simulated(Fleet(run._fleet((1,))), stages) is not None) == fits


def test_streamed_layers_come_at_the_measured_rate(make):
    plenty = MachineFacts("cpu", "cpu", 1 << 40, 1 << 40, None, 1 << 40)
    facts = dict.fromkeys(("local", 1, 2), plenty)
    settings = {1: {"offload": "auto"}, 2: {"offload": "auto"}}
    for rates, found in (({}, (12e9, 12e9)), ({"1": 20e9, "2": 2e9}, (20e9, 2e9))):
        run = make(facts=dict(facts), plan=settings)
        folder = run.prepared.resolved.given.output_dir
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PLAN_FILE).write_text(json.dumps({"host_rates": rates}))
        devices = run._fleet(()).devices
        (folder / PLAN_FILE).unlink()
        assert [d.host_to_device_bytes_per_s for d in devices] == [0.0, *found]
