"""The benchmarks measure what they say: work that is slowed on purpose shows in the figure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.pipeline import Load, Samples, measure, summarise

LOAD = Load(stages=2, micro_batches=4, forward_s=0.004, backward_s=0.008, activation_bytes=20_000)


def test_pipeline_figures_are_those_of_the_samples() -> None:
    load = Load(stages=4, micro_batches=16, forward_s=0.02, backward_s=0.04)
    samples = Samples(8, [1.3, 1.2, 1.1], [0.8] * 3, [7, 7, 7], [[0.5] * 4, [0.7] * 4, [0.6] * 4])
    figures = summarise("pipeline", load, samples)
    assert figures["bound_s"] == pytest.approx(19 * 0.06)
    assert figures["step_s"] == 1.2
    assert figures["ratio"] == round(1.2 / 1.14, 4)
    assert figures["simulated_ratio"] == 1.0
    assert figures["busy_share"] == [0.6] * 4
    # Per micro-batch: two boundaries between workers, both ways, and one that ends here.
    assert figures["relay_cpu_ms"] == 10.0


def test_pipeline_slowed_on_purpose_is_slower() -> None:
    plain = summarise("plain", LOAD, measure(LOAD, {"plain": 4}, steps=3)["plain"])
    slowed = replace(LOAD, slow_s=0.05)
    slow = summarise("slow", slowed, measure(slowed, {"slow": 4}, steps=1)["slow"])
    assert plain["bound_s"] == slow["bound_s"] == pytest.approx(5 * 0.012)
    assert plain["step_s_min"] >= plain["bound_s"]
    assert slow["step_s"] >= 5 * 0.062
    assert slow["ratio"] > plain["ratio"]
    # Four micro-batches, one boundary, both ways.
    assert plain["wire_bytes_per_step"] > 8 * 20_000 * 0.9
