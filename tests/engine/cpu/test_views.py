"""Memory for weights: side by side, in huge pages, and freed with the last weight in it."""

from __future__ import annotations

import gc
import mmap
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.engine.cpu.views import weight_memory


@given(st.lists(st.integers(0, 6 << 20), max_size=20))
def test_weights_have_aligned_memory_of_their_own(sizes: list[int]) -> None:
    weights = [weight_memory(size) for size in sizes]
    for number, memory in enumerate(weights):
        memory[:] = number
    for number, (size, memory) in enumerate(zip(sizes, weights, strict=True)):
        assert memory.ctypes.data % 64 == 0 or not size
        assert memory.shape == (size,)
        assert np.all(memory == number)


@pytest.mark.slow
def test_memory_is_freed_with_its_last_weight() -> None:
    # More than is requested at a time, so that the first request is full.
    weights = [weight_memory(3 << 20) for _ in range(30)]
    first = weakref.ref(owner(weights[12]))
    del weights[:12]
    gc.collect()
    assert first() is not None
    weights.clear()
    gc.collect()
    assert first() is None


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has huge pages on request")
def test_huge_pages_are_requested() -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage").is_dir():
        pytest.skip("this kernel has no huge pages")
    assert "hg" in flags(weight_memory(1 << 20).ctypes.data)


def owner(memory: Any) -> mmap.mmap:
    """The mapping that an array is a part of."""
    while not isinstance(memory, mmap.mmap):
        memory = memory.obj if isinstance(memory, memoryview) else memory.base
    return memory


def flags(address: int) -> list[str]:
    """Linux's flags of the mapping at an address; see ``VmFlags`` in proc(5)."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(maxsplit=1)[0]
        if "-" in head and not head.endswith(":"):
            start, end = (int(part, 16) for part in head.split("-"))
            inside = start <= address < end
        elif inside and head == "VmFlags:":
            return line.split()[1:]
    raise AssertionError("no mapping has this address")
