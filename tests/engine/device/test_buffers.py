"""MLX's cache of freed buffers is emptied when it is full, and not in every step."""

from __future__ import annotations

import mlx.core as mx
import pytest

from chairlift.engine.device.buffers import MIN_STEPS, BufferCache


def test_a_full_cache_is_emptied_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    held, limits, cleared = 0, [], []
    monkeypatch.setattr(mx, "set_cache_limit", limits.append)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: held)
    monkeypatch.setattr(mx, "clear_cache", lambda: cleared.append(step))
    buffers = BufferCache(1000)
    for step in range(5 * MIN_STEPS):
        held = 500 if step < 2 * MIN_STEPS else 1000
        buffers.trim()
    assert limits == [1000]
    assert cleared == [2 * MIN_STEPS, 3 * MIN_STEPS, 4 * MIN_STEPS]
