"""The estimates beside published speeds: benchmarks/published.json."""

from __future__ import annotations

import pytest

from benchmarks.estimates import PUBLISHED, compared, estimated, summary
from hetero_framework.extras.planner.known_devices import known_device

QUICK = {"torchtune", "torchtune-3b"}


def high(rows, use):
    return [row for row in rows if (row["trust"], row["use"]) == ("high", use)]


def case_of(model, method, tokens):
    names = ("model", "method", "tokens")
    cases = [case for case in PUBLISHED["cases"] if case["trust"] == "high"]
    (case,) = (c for c in cases if tuple(c[n] for n in names) == (model, method, tokens))
    return case


def test_each_case_says_where_it_is_from_and_what_is_not_known():
    cases = PUBLISHED["cases"]
    assert len(cases) >= 63
    for case in cases:
        source = PUBLISHED["sources"][case["source"]]
        assert source["at"].startswith("https://")
        assert source["unknown"]
        assert case["trust"] in ("high", "medium", "low")
        assert case["model"] in PUBLISHED["models"]
        assert case["use"] == "none" or case["trust"] == "high"
        assert known_device(case["device"]).half_flops > 0
    assert {case["source"] for case in cases} == PUBLISHED["sources"].keys()


@pytest.mark.long
def test_estimates_are_near_what_was_published():
    rows = list(compared(["high"]))
    fitted, held = (summary(high(rows, use)) for use in ("fit", "held"))
    assert fitted["deviation"] <= 1.25
    assert held["deviation"] <= 1.5
    assert min(fitted["least"], held["least"]) >= 0.6
    assert max(fitted["most"], held["most"]) <= 1.6


@pytest.mark.long
def test_estimates_of_torchtunes_cases_are_near_what_was_published():
    cases = [c for c in PUBLISHED["cases"] if c["source"] in QUICK and c["trust"] == "high"]
    rows = [{**case, "ratio": estimated(case) / case["tokens_per_s"]} for case in cases]
    found = summary(rows)
    assert found["deviation"] <= 1.25
    assert 0.6 <= found["least"] <= found["most"] <= 1.6


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "tokens"),
    [
        *[("Llama 3.1 8B", 2048), ("Llama 3.2 3B", 4096), ("Qwen 7B", 2048)],
        pytest.param("Qwen 14B", 2048, marks=pytest.mark.long),
    ],
)
def test_qlora_is_slower_than_lora_as_published(model, tokens):
    lora, qlora = (case_of(model, method, tokens) for method in ("lora", "qlora"))
    published = qlora["tokens_per_s"] / lora["tokens_per_s"]
    assert estimated(qlora) / estimated(lora) == pytest.approx(published, rel=0.1)


def test_recomputation_costs_as_published():
    case = case_of("Llama 3.2 3B", "lora", 4096)
    more = estimated({**case, "recompute": False}) / estimated(case)
    assert more == pytest.approx(9174 / 7210, rel=0.2)  # torchtune's table, without and with it
