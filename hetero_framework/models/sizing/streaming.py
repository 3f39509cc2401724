"""Sizes of what visits a device: streamed layers in slots, and groups of optimizer states."""

from __future__ import annotations

from collections.abc import Sequence

SLOTS = 2
"""Slots that streamed layers share: one is computed with while the other is filled."""
STATES_GROUP_BYTES = 128 << 20
"""The most bytes of states of a group with more than one parameter."""
STATES_OF_NUMBER = 8  # bytes of states per number, as Adam has them
BUS_RATE = 25e9
"""Bytes a second over PCIe 4, assumed where nothing was measured."""
VISITING_INPUTS = 3
"""Stored inputs of layers that are on the device, in use or on their way."""


def visit_bytes(weights: int, gradients: int, states: int, micro_batches: int) -> int:
    """Bytes that move in a step for a trained layer that visits: for each micro-batch its weights
    come twice, and its gradient comes, but for the first, and leaves; then the gradient comes for
    its norm and for the optimizer's step, for which weights and states come and leave."""
    return 2 * micro_batches * (weights + gradients) + 2 * (weights + states) + gradients


def spread(count: int, start: int, end: int) -> list[int]:
    """`count` of the layers [start, end), spread evenly: each copy gets the time in which the
    layers between them compute."""
    layers = end - start
    return [start + (2 * k + 1) * layers // (2 * count) for k in range(count)]


def layers_in_turn(count: int, shared: int = SLOTS) -> int:
    """How many of `count` streamed layers share slots. Neighbours in the order have different
    slots, also the last layer and the first. So with an odd count one layer has a slot to itself.
    With few layers each has one to itself."""
    return count - count % shared if count >= 2 * shared else 0


def slots_of(count: int, shared: int = SLOTS) -> int:
    """Slots for `count` streamed layers."""
    return min(count, shared + count % shared)


def slot_of(position: int, count: int, shared: int = SLOTS) -> int:
    """The slot of the layer at `position` among `count` streamed layers."""
    turns = layers_in_turn(count, shared)
    return position % shared if position < turns else min(turns, shared) + position - turns


def slot_sizes(sizes: Sequence[int], shared: int = SLOTS) -> list[int]:
    """Bytes of each slot, for streamed layers of these bytes."""
    slots = [0] * slots_of(len(sizes), shared)
    for position, nbytes in enumerate(sizes):
        slot = slot_of(position, len(sizes), shared)
        slots[slot] = max(slots[slot], nbytes)
    return slots
