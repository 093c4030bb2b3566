"""MLX's cache of freed buffers is trimmed when it is full, and not in every step."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest

from chairlift.engine.device.buffers import FULL, KEPT, MIN_STEPS, BufferCache

LIMIT = 64 << 20


@pytest.fixture
def limit() -> Iterator[int]:
    """A limit of an empty cache; afterwards it has its former limit again."""
    mx.synchronize()
    mx.clear_cache()
    before = mx.set_cache_limit(LIMIT)
    yield LIMIT
    mx.set_cache_limit(before)
    mx.clear_cache()


def _free(count: int, size: int) -> None:
    """Frees so many buffers of ``size`` numbers."""
    arrays = [mx.zeros((size,)) + number for number in range(count)]
    mx.eval(arrays)
    mx.synchronize()


def test_a_full_cache_keeps_the_buffers_that_were_freed_last(limit: int) -> None:
    buffers = BufferCache(limit)
    _free(24, 1 << 19)
    _free(14, 1 << 18)
    assert mx.get_cache_memory() > FULL * limit
    buffers.trim()
    kept = mx.get_cache_memory()
    assert 0 < kept <= KEPT * limit
    # The newer, smaller ones are there: taking all of them allocates no memory.
    small = [mx.zeros((1 << 18,)) + number for number in range(14)]
    mx.eval(small)
    assert mx.get_cache_memory() <= kept - 14 * (1 << 20)


def test_a_cache_is_trimmed_only_when_full_and_not_in_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held, limits, step = 0, [], -1
    monkeypatch.setattr(mx, "set_cache_limit", lambda limit: limits.append((step, limit)))
    monkeypatch.setattr(mx, "get_cache_memory", lambda: held)
    buffers = BufferCache(1000)
    for step in range(5 * MIN_STEPS):
        held = 500 if step < 2 * MIN_STEPS else 1000
        buffers.trim()
    trims = [(n * MIN_STEPS, limit) for n in (2, 3, 4) for limit in (int(KEPT * 1000), 1000)]
    assert limits == [(-1, 1000), *trims]
