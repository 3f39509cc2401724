from __future__ import annotations

import pytest
import torch

from hetero_framework.core.devices import open_device
from hetero_framework.engine import state_snapshot
from hetero_framework.engine.state_snapshot import StateSnapshot, in_parts
from hetero_framework.errors import ProtocolError


@pytest.fixture
def live(monkeypatch):
    """Four tensors, of which two fit into a part."""
    monkeypatch.setattr(state_snapshot, "STATE_PART_BYTES", 32)
    return [torch.full((4,), float(k)) for k in range(4)]


def snapshot_of(live: list[torch.Tensor]) -> StateSnapshot:
    return StateSnapshot([(str(k), t, {}) for k, t in enumerate(live)], open_device("cpu"))


def change(live: list[torch.Tensor]) -> None:
    for tensor in live:
        tensor.add_(100.0)


def test_parts_are_copies_made_when_they_were_read_or_kept(live):
    snapshot = snapshot_of(live)
    first = snapshot.part(0)
    snapshot.keep()
    change(live)
    second = snapshot.part(1)
    snapshot.keep()  # for a later commit: it has all it needs
    change(live)
    values = [t[0].item() for part in (first, second) for t in part.tensors.values()]
    assert values == [0.0, 1.0, 2.0, 3.0]
    assert [first.last, second.last] == [False, True]


def test_part_that_was_asked_for_last_may_be_asked_for_again(live):
    """Its bytes may have been lost with a link; and others committed since."""
    snapshot = snapshot_of(live)
    snapshot.part(0)
    snapshot.keep()
    change(live)
    assert snapshot.part(0).tensors["0"][0] == 0.0


@pytest.mark.parametrize("number", [0, 2])
def test_part_that_is_past_or_absent_is_refused(live, number):
    snapshot = snapshot_of(live)
    snapshot.part(1)
    with pytest.raises(ProtocolError, match=f"part {number} was asked for out of order"):
        snapshot.part(number)


def test_state_of_nothing_is_one_empty_part():
    [part] = in_parts([])
    assert (part.tensors, part.values, part.last) == ({}, {}, True)
