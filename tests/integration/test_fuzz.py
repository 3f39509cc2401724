"""Random plans, limits, orders and links, and links that break at random moments: the result is
that of one process, to the last bit."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from hetero_framework.config import Config
from hetero_framework.engine.schedule.step_schedule import StepSchedule
from hetero_framework.engine.schedule.tuner import Tuner
from hetero_framework.engine.schedule.tuning import TunedSchedule
from hetero_framework.trainer.coordinator import train
from tests.fault_proxy import FaultProxy
from tests.integration.test_parity import LORA, assert_same, weights
from tests.integration.test_resume import evals
from tests.pools import NUM_WORKERS, Notes, read_metrics
from tests.samples import plan_of

pytestmark = [pytest.mark.xdist_group("pool"), pytest.mark.usefixtures("nothing_left")]

LAYERS = 6


def random_plan(dice: random.Random) -> list[dict[str, Any]]:
    cuts = sorted(dice.sample(range(1, LAYERS), dice.randint(1, LAYERS - 1)))
    owners: list[int | str] = ["local"]
    for _ in cuts:
        others = [w for w in ("local", *range(1, NUM_WORKERS + 1)) if w != owners[-1]]
        owners.append(dice.choice(others))
    plan = plan_of(*zip(owners, [*cuts, LAYERS], strict=True))
    return [{**entry, "links": dice.choice([None, "relay", "auto"])} for entry in plan]


def random_sections(dice: random.Random) -> dict[str, Any]:
    """What decides the numbers: the same for the whole model."""
    some_layers = {**LORA, "layers_to_transform": dice.sample(range(LAYERS), 2)}
    return {
        "adapter": dice.choice([None, LORA, some_layers]),
        "padding_free": dice.random() < 0.3,
        "training": {
            "max_steps": 4,
            "gradient_accumulation_steps": dice.choice([1, 2, 5, 8]),
            "per_device_train_batch_size": dice.choice([1, 2]),
            "gradient_checkpointing": dice.random() < 0.3,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "verify_architecture": False,
            "step_timeout_s": 20.0,
        },
    }


def any_order(dice: random.Random, schedule: StepSchedule) -> StepSchedule:
    """The same tasks and transfers, which then wait for each other in vain."""
    tasks, transfers = list(schedule.tasks), list(schedule.transfers)
    dice.shuffle(tasks)
    dice.shuffle(transfers)
    return dataclasses.replace(schedule, tasks=tuple(tasks), transfers=tuple(transfers))


def random_choices(dice: random.Random) -> Callable[..., TunedSchedule]:
    """In place of the schedule's: any max_in_flight, any limits, any order."""
    real = Tuner.choice

    def choice(pace: Tuner, micro_batches: int, direct: frozenset[int]) -> TunedSchedule:
        found = real(pace, micro_batches, direct)
        limits: dict[str, Any] = {
            "max_in_flight": dice.choice([1, 2, 3, 100]),
            "in_flight_limits": tuple(dice.randint(1, 4) for _ in found.in_flight_limits),
        }
        changed = dataclasses.replace(found, **limits)
        vars(changed)["schedule"] = any_order(dice, dataclasses.replace(found.schedule, **limits))
        return changed

    return choice


class Breaks(Notes):
    """Resets everything that goes through a proxy, a random moment after every step."""

    def __init__(self, dice: random.Random, proxies: list[FaultProxy]) -> None:
        super().__init__()
        self.dice = dice
        self.proxies = proxies
        self.timers: list[threading.Timer] = []

    def step(self, metrics: Any) -> None:
        super().step(metrics)
        chosen = [proxy for proxy in self.proxies if self.dice.random() < 0.5]
        delay_s = self.dice.uniform(0, 2 * metrics["step_seconds"])
        self.timers.append(threading.Timer(delay_s, lambda: [p.reset() for p in chosen]))
        self.timers[-1].start()


@pytest.mark.parametrize("broken", [False, True], ids=["calm", "broken"])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))]
)
def test_any_plan_equals_one_process(seed, broken, configured, texts, tmp_path, monkeypatch):
    dice = random.Random(f"{seed} {broken}")
    sections = random_sections(dice)
    padding_free = sections.pop("padding_free")
    files = {"train": str(texts), "eval": str(texts), "max_length": 64}
    sections["data"] = {**files, "padding_free": padding_free}
    train(configured([], "whole", **sections), progress=Notes())

    plan = random_plan(dice)
    monkeypatch.setattr(Tuner, "choice", random_choices(dice))
    raw = configured([], "cut", shard_plan=plan, **sections).to_dict()
    with ExitStack() as stack:
        proxies = []
        for worker in raw["workers"] if broken else []:
            proxies.append(stack.enter_context(FaultProxy((worker["ip"], worker["port"]))))
        if broken:
            # The last break may come between the last step and the goodbye: the worker then keeps
            # its stages for so long, and the next test waits for it.
            raw["training"] = {**raw["training"], "rejoin_wait_s": 20}
            raw["workers"] = [
                {**worker, "port": proxy.port}
                for worker, proxy in zip(raw["workers"], proxies, strict=True)
            ]
        notes = Breaks(dice, proxies)
        try:
            train(Config.from_dict(raw), progress=notes)
        finally:
            for timer in notes.timers:
                timer.cancel()
                timer.join()
    assert read_metrics(tmp_path / "cut") == read_metrics(tmp_path / "whole"), (plan, sections)
    assert evals(tmp_path / "cut") == evals(tmp_path / "whole")
    assert_same(weights(tmp_path / "cut"), weights(tmp_path / "whole"))
