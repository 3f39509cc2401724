"""The comparison of estimated with measured memory."""

from __future__ import annotations

import pytest

from benchmarks.stage_memory import CASES, Case, run

TINY = {
    **{"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "vocab_size": 160},
    **{"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2},
    "tie_word_embeddings": False,
}


def test_the_cases_are_those_that_were_asked_for():
    names = " ".join(case.name for case in CASES if case.padded)
    assert len(CASES) >= 12
    for word in ("full", "lora", "checkpointing", "long sequences", "large vocab", "two chunks"):
        assert word in names


@pytest.mark.long
def test_estimates_of_a_llama_match_the_memory_of_its_stages():
    cuts = (("local", 0, 1), (1, 1, 2), ("local", 2, 3))
    row = run(Case("tiny", model=TINY, tokens=24, cuts=cuts))
    assert [stage["process"] for stage in row["processes"]] == ["local", 1]
    assert row["within_goal"], row
    less = run(Case("tiny", model=TINY, tokens=24, cuts=cuts, padded=False))
    assert max(row["ratios"]) < min(less["ratios"])
