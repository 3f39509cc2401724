from __future__ import annotations

from itertools import combinations_with_replacement, permutations
from typing import Any

import pytest

from hetero_framework.extras.planner import evaluate, plan
from hetero_framework.extras.planner.evaluated import Evaluated, evaluated
from hetero_framework.extras.planner.layout import Layout, Part
from hetero_framework.extras.planner.optimality import proof
from hetero_framework.extras.planner.optimality.proof import Proof
from hetero_framework.extras.planner.rules import Rules
from hetero_framework.extras.planner.search.scores import Scores
from tests.extras.planner.fleets import GB, device, fleet_of, rules_of

PROFILE = fleet_of(
    device("local", layer_forward_s=0.003, head_forward_s=0.002),
    device(1),
    device(2, layer_forward_s=0.002),
    layers=5,
    micro_batches=4,
    speed=5e7,
    direct=False,  # so some that bounds promise more of take longer
)
BAD = (Part(0, 0, 5),)


def proof_of(rules: Rules) -> Proof:
    return Proof(rules, Scores(rules, 0))  # it allows itself what it needs


def told(rules: Rules, layout: Layout) -> Evaluated:
    found = evaluated(rules.fleet, layout)
    assert found is not None
    return found


def every_layout(rules: Rules) -> list[Layout]:
    """With a stage for each device, computing nothing again."""
    layers, workers, found = rules.fleet.layers, rules.devices[1:], []
    for count in range(len(rules.devices)):
        for order in permutations(workers, count):
            for cut in combinations_with_replacement(range(layers + 1), count):
                ends = [0, *cut, layers]
                found.append(
                    tuple(Part(d, ends[k], ends[k + 1]) for k, d in enumerate([0, *order]))
                )
    return found


@pytest.mark.parametrize("hopeless", [1.06, 10.0])
def test_a_proof_finds_the_best_of_all_layouts(
    hopeless: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many of those that are open are tuned."""
    monkeypatch.setattr(proof, "_HOPELESS", hopeless)
    rules = rules_of(PROFILE, checkpointing=False)
    best, proved = proof_of(rules).run(told(rules, BAD))
    assert proved
    least = min(told(rules, layout).preference for layout in every_layout(rules))
    assert best.preference == pytest.approx(least, rel=1e-12)
    assert best.seconds < 0.6 * told(rules, BAD).seconds


def test_a_proof_returns_the_best_if_nothing_is_better() -> None:
    rules = rules_of(PROFILE, checkpointing=False)
    best, _ = proof_of(rules).run(told(rules, BAD))
    again, proved = proof_of(rules).run(best)
    assert again is best
    assert proved


@pytest.mark.parametrize("limit", ["_NODES", "_STAGES"])
@pytest.mark.parametrize("few", [True, False])
def test_an_unfinished_proof_still_uses_its_layouts(
    limit: str, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proof that runs out of work still simulates the layouts found, for few devices."""
    monkeypatch.setattr(proof, limit, (60, 60))
    monkeypatch.setattr(proof, "FEW", 3 if few else 2)
    rules = rules_of(PROFILE)
    given = told(rules, BAD)
    best, proved = proof_of(rules).run(given)
    assert not proved
    assert (best.seconds < given.seconds) == few
    assert few or best is given


def test_no_more_is_simulated_than_there_is_work_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "_TASKS", (0, 0))
    rules = rules_of(PROFILE)
    best, proved = proof_of(rules).run(told(rules, BAD))
    assert not proved
    assert best.seconds < told(rules, BAD).seconds  # the one that bounds promise most of


def test_pins_are_kept() -> None:
    free = rules_of(PROFILE)
    rules = Rules(free.fleet, free.devices, {2: (3, 5)}, checkpointing=True, chunks=False)
    best, proved = proof_of(rules).run(told(rules, (Part(0, 0, 3), Part(2, 3, 5))))
    assert proved
    assert rules.permits(best.layout)


def test_long_latencies_are_proved_with_a_large_enough_window() -> None:
    """Windows of twice the stages are no measure where latency is many times the work."""
    quick = [(8.52e-5, 1.936), (1.356e-5, 1.457), (3.937e-5, 1.929), (1.339e-5, 0.964)]
    fleet = fleet_of(
        *(_quick(k or "local", *one) for k, one in enumerate(quick)),
        layers=2,
        micro_batches=130,
        speed=5e11,
    )
    slow = fleet.model_copy(
        update={"links": tuple(link.model_copy(update={"latency_s": 3e-4}) for link in fleet.links)}
    )
    found = plan(slow, allow=["checkpointing"])
    order = [("local", 0), (2, 1), (1, 2), (3, 2)]
    starts = [0, 0, 1, 2]
    other = [
        {"id": owner, "start": start, "end": end}
        for start, (owner, end) in zip(starts, order, strict=True)
    ]
    again = {"0": False, "1": True, "2": True, "3": False}
    best = evaluate(slow, other, gradient_checkpointing=again)
    assert found.predicted_step_s <= best.predicted_step_s * (1 + 1e-9)


def _quick(name: int | str, layer_s: float, memory_gb: float) -> dict[str, Any]:
    return device(
        name,
        memory_bytes=memory_gb * GB,
        layer_forward_s=layer_s,
        layer_backward_s=layer_s,
        layer_recompute_s=layer_s,
        embedding_forward_s=layer_s,
        embedding_backward_s=layer_s,
        head_forward_s=5 * layer_s,
        head_backward_s=5 * layer_s,
        embedding_bytes=0.5 * GB,
        head_bytes=0.5 * GB,
        activation_bytes_per_layer=0.3 * GB,
        activation_bytes_recomputed=0.015 * GB,
    )
