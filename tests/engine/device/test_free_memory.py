"""How much memory of a device an engine takes for free."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.engine.config import EngineConfig
from chairlift.engine.device import memory
from chairlift.engine.device.profile import CPU, CUDA, METAL, DeviceProfile

GB = 10**9


def a_device(
    patch: pytest.MonkeyPatch, profile: DeviceProfile, info: dict[str, Any], used: int, cached: int
) -> list[int]:
    """A device with ``info``, where MLX uses and caches bytes; returns the limits that are set."""
    limits: list[int] = []
    patch.setattr(memory, "current", lambda: profile)
    patch.setattr(memory.mx, "device_info", lambda: info)
    patch.setattr(memory.mx, "get_active_memory", lambda: used)
    patch.setattr(memory.mx, "get_cache_memory", lambda: cached)
    patch.setattr(memory.mx, "set_cache_limit", lambda limit: None)
    patch.setattr(memory.mx, "set_memory_limit", limits.append)
    patch.setattr(memory.mx.cuda, "is_available", lambda: profile is CUDA)
    return limits


@given(
    total=st.integers(4 * GB, 200 * GB),
    weights=st.floats(0.01, 0.8),
    others=st.floats(0.0, 0.5),
    cached=st.integers(0, 2 * GB),
)
def test_an_engine_keeps_to_what_other_programs_leave_of_a_gpu(
    total: int, weights: float, others: float, cached: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        used, taken = int(total * weights), int(total * others)
        left = max(0, total - used - taken - cached)
        info = {"total_memory": total, "free_memory": left}
        limits = a_device(patch, CUDA, info, used, cached)
        free = memory.free_memory()
        assert 0 <= free <= max(0, left + cached - memory.CUDA_MARGIN * total) + 1
        planned = memory.plan_kv_memory(EngineConfig(), CUDA, 150_000)
        step = memory.step_bytes(EngineConfig(), CUDA, 150_000)
        assert sum(planned) == 0 or sum(planned) + step + memory.cache_bytes(CUDA) <= free
        memory.configure_mlx(CUDA)
        assert limits == [used + free]


def test_an_80_gb_card_keeps_room_for_a_step_of_an_8b_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With 58.7 GB of keys and values, steps of 1,280 tokens had run out of memory there."""
    info = {"total_memory": 85_520_809_984, "free_memory": 68_000_000_000}
    a_device(monkeypatch, CUDA, info, used=16_400_000_000, cached=0)
    assert 50 * GB < sum(memory.plan_kv_memory(EngineConfig(), CUDA, 151_936)) < 55 * GB


def test_a_mac_has_its_recommended_working_set(monkeypatch: pytest.MonkeyPatch) -> None:
    info = {"max_recommended_working_set_size": 12 * GB, "memory_size": 16 * GB}
    limits = a_device(monkeypatch, METAL, info, used=5 * GB, cached=GB)
    assert memory.free_memory() == 7 * GB
    assert memory.total_memory() == 12 * GB
    memory.configure_mlx(METAL)
    assert limits == []


def test_the_cpu_has_the_host_s_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = a_device(monkeypatch, CPU, {"memory_size": 5}, used=0, cached=0)
    assert memory.free_memory() == pytest.approx(memory.free_host_memory(), rel=0.2)
    assert memory.total_memory() == memory.total_host_memory()
    memory.configure_mlx(CPU)
    assert limits == []
