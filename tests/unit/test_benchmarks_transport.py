"""The transport benchmark: a slowed receiver shows in the link's figure."""

from __future__ import annotations

import pytest

from benchmarks.transport import build_parser, measure, summarise


def test_figures_are_those_of_the_samples():
    seconds = {"link": [0.004, 0.005, 0.009], "bare": [0.004, 0.004, 0.003], "gloo": [0.01] * 3}
    cpu = {name: {"sender": 0.001, "receiver": 0.002} for name in seconds}
    figures = summarise(seconds, cpu, 16_000_000)
    link = figures["engines"][0]
    assert (link["median_ms"], link["min_ms"], link["max_ms"]) == (5.0, 4.0, 9.0)
    assert link["gb_per_s"] == 3.2
    assert link["cpu_ms"] == {"sender": 1.0, "receiver": 2.0}
    assert figures["ratio_to_bare"] == 0.8
    assert figures["ratio_to_gloo"] == 2.0
    assert figures["cpu_ratio_to_bare"] == 1.0
    assert "ratio_to_ssl_of_tls" not in figures


@pytest.mark.long
@pytest.mark.parametrize("relay", [[], ["--relay"]], ids=["direct", "relayed"])
@pytest.mark.parametrize("mb", ["0", pytest.param("0.5", marks=pytest.mark.long)])
def test_receiver_slowed_on_purpose_is_slower(mb, relay):
    arguments = ["--mb", mb, "--rounds", "3", "--engines", "link,bare", "--slow-ms", "30", *relay]
    seconds, cpu = measure(build_parser().parse_args(arguments))
    assert min(seconds["link"]) >= 0.03
    assert min(seconds["bare"]) < 0.03
    processes = {"sender", "receiver", "relay"} if relay else {"sender", "receiver"}
    assert set(cpu["link"]) == set(cpu["bare"]) == processes
    assert all(used >= 0 for engine in cpu.values() for used in engine.values())
