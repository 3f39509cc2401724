from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_framework.errors import ConfigError
from hetero_framework.extras.islands.fragments import cut, schedule

LAYER = ("self_attn.q_proj.weight", "mlp.up_proj.weight")
MODEL = {
    "model.embed_tokens.weight": 70,
    **{f"model.layers.{layer}.{part}": 10 for layer in range(4) for part in LAYER},
    "model.norm.weight": 1,
}


def test_fragments_are_whole_layers_balanced_by_bytes_in_the_order_of_the_model() -> None:
    assert cut(MODEL, 1) == (tuple(MODEL),)
    first, second = cut(MODEL, 2)
    assert first == ("model.embed_tokens.weight",)
    assert first + second == tuple(MODEL)
    assert [len(part) for part in cut(MODEL, 3)] == [1, 4, 5]
    assert [len(part) for part in cut(MODEL, 6)] == [1, 2, 2, 2, 2, 1]


def test_tensors_of_a_layer_stay_together_wherever_they_stand() -> None:
    sizes = {f"h.{layer}.experts.{e}.w": 1 for e in range(3) for layer in range(2)}
    assert cut(sizes, 2) == (
        tuple(f"h.0.experts.{e}.w" for e in range(3)),
        tuple(f"h.1.experts.{e}.w" for e in range(3)),
    )


def test_more_fragments_than_there_is_to_cut_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"island.fragments is 7, but only 6 layers or tensors"):
        cut(MODEL, 7)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.data())
def test_no_other_cut_is_more_even(sizes: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(sizes)))

    def unevenness(ends: tuple[int, ...]) -> int:
        return sum(sum(sizes[a:b]) ** 2 for a, b in pairwise((0, *ends, len(sizes))))

    parts = cut({f"h.{layer}.w": size for layer, size in enumerate(sizes)}, count)
    assert len(parts) == count
    assert all(parts)
    found = sum(sum(sizes[int(name.split(".")[1])] for name in part) ** 2 for part in parts)
    assert found == min(map(unevenness, combinations(range(1, len(sizes)), count - 1)))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ((20, 1, 0), [(0, 20, 20)]),
        ((20, 2, 2), [(0, 8, 10), (1, 18, 20)]),
        ((6, 2, 1), [(0, 2, 3), (1, 5, 6)]),
        ((7, 3, 1), [(0, 1, 2), (1, 3, 4), (2, 6, 7)]),
    ],
)
def test_each_fragment_has_its_time_in_a_round(
    settings: tuple[int, int, int], expected: list[tuple[int, int, int]]
) -> None:
    found = schedule(*settings)
    assert [(s.fragment, s.sent_after, s.applied_after) for s in found] == expected


@given(st.integers(1, 60), st.integers(1, 12), st.integers(0, 20))
def test_one_fragment_is_under_way_at_a_time(steps: int, fragments: int, delay: int) -> None:
    """With settings as the configuration accepts them: less delay than lies between two."""
    steps = max(steps, fragments * (delay + 1))
    times = [t for s in schedule(steps, fragments, delay) for t in (s.sent_after, s.applied_after)]
    assert times == sorted(times)
    assert times[0] > 0
    assert times[-1] == steps
    assert all(sent > before for before, sent in zip(times[1::2], times[2::2], strict=False))
