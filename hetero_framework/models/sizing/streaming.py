"""Visits of the device: streamed layers and their slots, and groups of optimizer states."""

from __future__ import annotations

from collections.abc import Sequence

SLOTS = 2
"""One is computed with, the other filled."""
STATES_GROUP_BYTES = 128 << 20
"""Of the states of a group, as far as it has more than one parameter."""
STATES_OF_NUMBER = 8  # bytes, as Adam has them
BUS_RATE, FILE_RATE = 25e9, 3e9
"""Bytes a second over PCIe 4, and of a disk (NVMe), assumed where nothing was measured."""
VISITING_INPUTS = 3
"""Stored inputs of layers that are on the device, in use or on their way."""


def spread(count: int, start: int, end: int) -> list[int]:
    """`count` of the layers [start, end), with the others evenly between them: while those are
    computed with, there is more time for a copy."""
    layers = end - start
    return [start + (2 * k + 1) * layers // (2 * count) for k in range(count)]


def layers_in_turn(count: int, shared: int = SLOTS) -> int:
    """How many of `count` streamed layers share slots. Neighbours in the order, from the last one
    to the first too, have different slots; where the count is odd, one layer thus keeps a slot to
    itself, and so does each of few."""
    return count - count % shared if count >= 2 * shared else 0


def slots_of(count: int, shared: int = SLOTS) -> int:
    """Slots for `count` streamed layers."""
    return min(count, shared + count % shared)


def slot_of(position: int, count: int, shared: int = SLOTS) -> int:
    """The slot of one of `count` streamed layers."""
    turns = layers_in_turn(count, shared)
    return position % shared if position < turns else min(turns, shared) + position - turns


def slot_sizes(sizes: Sequence[int], shared: int = SLOTS) -> list[int]:
    """Bytes of each slot, for streamed layers of these bytes."""
    slots = [0] * slots_of(len(sizes), shared)
    for position, nbytes in enumerate(sizes):
        slot = slot_of(position, len(sizes), shared)
        slots[slot] = max(slots[slot], nbytes)
    return slots
