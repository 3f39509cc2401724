from __future__ import annotations

import pytest

from hetero_framework.core.buffers import BufferPool, size_class


@pytest.mark.parametrize("nbytes", [1, 4096, 4097, 100_000, 2**20, 2**20 + 1, 16_000_000])
def test_size_class_wastes_at_most_an_eighth(nbytes: int) -> None:
    size = size_class(nbytes)
    assert nbytes <= size <= max(4096, nbytes * 9 // 8 + 1)
    assert size_class(size) == size


def test_pool_is_bounded_and_shares_sizes() -> None:
    pool = BufferPool(max_bytes=10_000)
    first, release_first = pool.take(5000)
    _, release_second = pool.take(5100)
    release_first()
    release_second()
    assert pool.free_bytes == size_class(5000)
    again, _ = pool.take(4999)
    assert again.obj is first.obj
    assert pool.free_bytes == 0
