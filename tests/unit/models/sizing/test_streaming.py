import pytest

from hetero_framework.models.sizing.streaming import (
    layers_in_turn,
    slot_of,
    slot_sizes,
    slots_of,
    spread,
)


def test_layers_that_stay_lie_between_those_that_stream():
    assert spread(4, 0, 8) == [1, 3, 5, 7]
    assert spread(2, 3, 9) == [4, 7]
    assert spread(5, 2, 7) == [2, 3, 4, 5, 6]
    assert spread(8, 4, 12) == [*range(4, 12)]
    assert spread(0, 0, 4) == []


@pytest.mark.parametrize(
    ("count", "slots"), [(0, 0), (1, 1), (2, 2), (3, 3), (4, 2), (5, 3), (6, 2), (7, 3)]
)
def test_neighbours_have_different_slots_in_every_order(count, slots):
    held = [slot_of(position, count) for position in range(count)]
    assert slots_of(count) == slots == len(set(held))
    turns = held[: layers_in_turn(count)]
    assert all(a != b for a, b in zip(turns, turns[1:] + turns[:1], strict=True))
    assert not {*turns} & {*held[len(turns) :]}


def test_a_slot_is_as_large_as_its_largest_layer():
    assert slot_sizes([1, 2, 5, 3, 4]) == [5, 3, 4]
    assert slot_sizes([7, 1]) == [7, 1]
    assert slot_sizes([]) == []
    assert slot_sizes([4, 6, 5], 1) == [6]
