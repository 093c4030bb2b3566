"""What one engine does with its part of a device that several engines share."""

from __future__ import annotations

import pytest

from chairlift.engine.config import EngineConfig
from chairlift.engine.device import memory
from chairlift.engine.device.profile import CPU, CUDA, METAL, DeviceProfile
from chairlift.engine.errors import ModelError

VOCABULARY = 1000


@pytest.fixture(autouse=True)
def weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of 2 GB on a device with 60 GB left."""
    monkeypatch.setattr(memory.mx, "get_active_memory", lambda: 2 * 10**9)
    monkeypatch.setattr(memory, "free_memory", lambda: 60 * 10**9)
    monkeypatch.setattr(memory, "total_memory", lambda: 64 * 10**9)


@pytest.mark.parametrize("profile", [CPU, CUDA, METAL])
@pytest.mark.parametrize("part", [12, 20, 40])
def test_an_engine_stays_within_its_part(profile: DeviceProfile, part: int) -> None:
    config = EngineConfig(memory_bytes=part * 10**9)
    kv, prefix = memory.plan_kv_memory(config, profile, VOCABULARY)
    step = memory.step_bytes(config, profile, VOCABULARY)
    buffers = memory.cache_bytes(profile, config.memory_bytes)
    assert kv > prefix > 0
    assert 2 * 10**9 + step + buffers + kv + prefix <= part * 10**9
    # A larger part is a larger cache, whatever else is free.
    smaller = EngineConfig(memory_bytes=(part - 1) * 10**9)
    assert memory.plan_kv_memory(smaller, profile, VOCABULARY).kv_bytes < kv


@pytest.mark.parametrize("profile", [CPU, CUDA, METAL])
def test_sizes_that_flags_give_are_known_before_the_start(profile: DeviceProfile) -> None:
    config = EngineConfig(kv_memory=3 * 10**9)
    working, caches = memory.engine_bytes(config, profile, VOCABULARY)
    assert caches == sum(memory.plan_kv_memory(config, profile, VOCABULARY))
    assert working > memory.step_bytes(config, profile, VOCABULARY)
    assert memory.engine_bytes(EngineConfig(), profile, VOCABULARY).caches is None


def test_a_part_that_the_weights_fill_is_refused() -> None:
    with pytest.raises(ModelError, match=r"this model's part of --models-memory is 2\.1 GB"):
        memory.plan_kv_memory(EngineConfig(memory_bytes=2_100_000_000), CPU, VOCABULARY)


@pytest.mark.parametrize(("profile", "share"), [(CPU, 0.75), (CUDA, 0.925), (METAL, 0.85)])
def test_the_budget_of_all_models(profile: DeviceProfile, share: float) -> None:
    assert memory.models_budget(profile, None) == pytest.approx(share * 60e9)
    assert memory.models_budget(profile, 0.5) == 32 * 10**9


@pytest.mark.parametrize(
    ("config", "sharing", "spare"),
    [
        (EngineConfig(), 1, 60e9),
        (EngineConfig(), 2, 30e9),
        (EngineConfig(device_engines=3), 1, (60e9 - 2 * 2e9) / 3),
        (EngineConfig(memory_bytes=10 * 10**9), 1, 8e9),
        (EngineConfig(memory_bytes=10 * 10**9), 2, 3e9),
        (EngineConfig(memory_bytes=10**9), 1, 0),
        (EngineConfig(memory_share=0.5), 1, 30e9),
        (EngineConfig(kv_memory=45 * 10**9, prefix_cache_bytes=0), 1, 15e9),
        (EngineConfig(kv_memory=70 * 10**9), 1, 0),
    ],
)
def test_what_the_weights_leave_is_within_every_limit(
    config: EngineConfig, sharing: int, spare: float
) -> None:
    assert memory.spare_bytes(config, sharing) == pytest.approx(spare)
