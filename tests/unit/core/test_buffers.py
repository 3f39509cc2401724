from __future__ import annotations

import pytest

from hetero_framework.core.buffers import (
    MAX_PINNED_BYTES,
    BufferPool,
    pinned_size_class,
    size_class,
)


@pytest.mark.parametrize("nbytes", [1, 4096, 4097, 100_000, 2**20, 2**20 + 1, 16_000_000])
def test_size_class_wastes_at_most_an_eighth(nbytes):
    size = size_class(nbytes)
    assert nbytes <= size <= max(4096, nbytes * 9 // 8 + 1)
    assert size_class(size) == size


@pytest.mark.parametrize(
    ("nbytes", "size"),
    [
        (1, 4096),
        (4097, 8192),
        (2**20, 2**20),
        (5 * 2**20, 8 * 2**20),
        (MAX_PINNED_BYTES, MAX_PINNED_BYTES),
        (MAX_PINNED_BYTES + 1, size_class(MAX_PINNED_BYTES + 1)),
    ],
)
def test_pinned_size_class_is_a_power_of_two_as_far_as_memory_is_pinned(nbytes, size):
    assert pinned_size_class(nbytes) == size


def test_pool_is_bounded_and_shares_sizes():
    pool = BufferPool(max_bytes=10_000)
    first, release_first = pool.take(5000)
    _, release_second = pool.take(5100)
    release_first()
    release_second()
    again, _ = pool.take(4999)
    assert again.obj is first.obj
    other, _ = pool.take(4999)
    assert other.obj is not first.obj
