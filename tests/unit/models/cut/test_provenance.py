"""The origin of each tensor, followed operation by operation."""

from __future__ import annotations

import pytest
import torch

from hetero_framework.models.cut.provenance import IDS, Provenance


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.tensor([1, 2, 3])


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.ones(4, 2, requires_grad=True)


def test_a_tensors_level_is_the_last_part_it_depends_on(
    ids: torch.Tensor, weight: torch.Tensor
) -> None:
    provenance = Provenance(ids, [weight])
    with provenance:
        hashed = ids * 7 % 4
        mask = torch.ones(3)
        hidden = weight[hashed]
        like = torch.zeros_like(hidden)
        provenance.phase = 0
        made = hidden + 1
        own_mask = mask * 2
        chosen = made.argmax(-1)
        provenance.phase = 1
        both = made * hidden
    found = [
        provenance.level(t) for t in (hashed, mask, hidden, like, made, own_mask, chosen, both)
    ]
    assert found == [IDS, None, -1, None, 0, 0, 0, 0]


def test_a_tensor_made_of_a_blocks_hidden_state_belongs_to_that_block(
    ids: torch.Tensor, weight: torch.Tensor
) -> None:
    provenance = Provenance(ids, [weight])
    with provenance:
        hidden, other = weight[ids], weight * 2
        provenance.received(hidden, 0)
        provenance.phase = 1
        kept, apart = hidden[None] * 1, other * 1
    assert [provenance.level(t) for t in (hidden, kept, apart)] == [-1, 0, -1]


def test_writes_in_place_reach_all_views(ids: torch.Tensor, weight: torch.Tensor) -> None:
    provenance = Provenance(ids, [weight])
    with provenance:
        room = torch.zeros(2, 4)
        row, other = room[0], room[1]
        provenance.phase = 2
        row.copy_(weight[:, 0].detach())
        provenance.phase = 3
    assert (provenance.level(room), provenance.level(other)) == (1, 1)


def test_a_view_that_a_block_takes_of_a_mask_leaves_the_mask_alone(
    ids: torch.Tensor, weight: torch.Tensor
) -> None:
    provenance = Provenance(ids, [weight])
    mask = torch.ones(3)
    with provenance:
        provenance.phase = 0
        mask[None, :2]
    assert provenance.level(mask) is None


def test_a_tensor_used_between_blocks_counts_as_held(
    ids: torch.Tensor, weight: torch.Tensor
) -> None:
    provenance = Provenance(ids, [weight])
    with provenance:
        residual, sliced, argument = weight * 1, weight * 2, weight * 3
        provenance.phase = 0
        argument + 1
        provenance.phase = 1
        residual + 1
        sliced[:, 0]  # a view by itself is no use
    assert provenance.is_held(residual, 0)
    assert not provenance.is_held(sliced, 0)
    assert not provenance.is_held(argument, 0)
    assert not provenance.is_held(residual, 1)


def test_a_block_reads_the_inputs_of_its_operations(
    ids: torch.Tensor, weight: torch.Tensor
) -> None:
    provenance = Provenance(ids, [weight])
    with provenance:
        first, second = weight[ids], weight * 2
        provenance.phase = 0
        first + 1
    assert provenance.is_read(first, 0)
    assert not provenance.is_read(second, 0)
    assert not provenance.is_read(first, 1)
