"""Memory that the host writes and a GPU reads."""

from __future__ import annotations

import numpy as np
import pytest

from chairlift.engine.cuda import host_memory

Call = tuple[int, int, int, int]


@pytest.mark.parametrize("error", [0, 201])
def test_advice_covers_the_array(monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    """First where it is, then who reads it; nothing more after an error."""
    calls: list[Call] = []

    def advise(*call: int) -> int:
        calls.append(call)  # type: ignore[arg-type]
        return error

    monkeypatch.setattr(host_memory, "_advise", lambda: advise)
    numbers = np.arange(100, dtype=np.int32)
    host_memory.keep_on_host(numbers)
    place = numbers.ctypes.data, 400
    expected = [(*place, 3, -1), (*place, 5, 0)]
    assert calls == expected[: 1 if error else 2]


def test_nothing_happens_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(host_memory.ctypes, "CDLL", missing)
    host_memory._advise.cache_clear()
    numbers = np.arange(3, dtype=np.int32)
    try:
        host_memory.keep_on_host(numbers)
    finally:
        host_memory._advise.cache_clear()
    assert numbers.tolist() == [0, 1, 2]
