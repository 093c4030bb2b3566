"""The division of a host among replicas: devices, memory, folders, cores."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.engine.client import factory
from chairlift.engine.client.combined import LEVELS, Levels
from chairlift.engine.client.placement import places, visible_devices
from chairlift.engine.client.process_client import ProcessClient
from chairlift.engine.client.replicas import ReplicaClient
from chairlift.engine.config import EngineConfig
from chairlift.engine.cpu.thread_count import ThreadWatch
from chairlift.engine.device import memory
from chairlift.engine.device.profile import CPU
from chairlift.engine.errors import ModelError
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.messages import StepStats
from chairlift.metrics.table import ENGINE, MODEL

SOURCE = ModelSource("tiny", "directory", Path("nowhere"))
SIZES = {"kv_memory": 8 << 30, "prefix_cache_bytes": 4 << 30, "swap_memory": 2 << 30}


@given(st.integers(1, 9), st.integers(1, 5))
def test_replicas_take_the_devices_in_turn(replicas: int, devices: int) -> None:
    config = EngineConfig(replicas=replicas, **SIZES)
    chosen = places(config, "cuda", [str(10 + number) for number in range(devices)])
    assert [place.device for place in chosen] == [str(10 + i % devices) for i in range(replicas)]
    for place in chosen:
        assert place.environment == {"CUDA_VISIBLE_DEVICES": place.device}
        sharing = sum(other.device == place.device for other in chosen)
        part = place.config
        assert (part.device_engines, part.host_engines) == (sharing, replicas)
        assert part.kv_memory == SIZES["kv_memory"] // sharing
        assert part.prefix_cache_bytes == SIZES["prefix_cache_bytes"] // sharing
        assert part.swap_memory == SIZES["swap_memory"] // replicas


def test_devices_are_named_by_number_or_by_name() -> None:
    def devices(*names: str) -> list[str]:
        config = EngineConfig(replicas=len(names), devices=names)
        return [place.device for place in places(config, "cuda", ["4", "GPU-ab", "6"])]

    # As for CUDA itself, a number counts the visible devices.
    assert devices("0", "2") == ["4", "6"]
    assert devices("GPU-ab", "1", "0") == ["GPU-ab", "GPU-ab", "4"]
    for name in ("3", "999", "GPU-cd"):
        with pytest.raises(ModelError, match=rf"no device '{name}'; this process sees 3"):
            devices(name)


def test_a_machine_without_cuda_has_no_devices_to_choose() -> None:
    chosen = places(EngineConfig(replicas=3), "cpu", [])
    assert [place.environment for place in chosen] == [{}] * 3
    assert {place.config.device_engines for place in chosen} == {3}
    for kind in ("cpu", "metal"):
        with pytest.raises(ModelError, match="--devices"):
            places(EngineConfig(replicas=2, devices=("0", "1")), kind, [])
    with pytest.raises(ModelError, match="one device"):
        places(EngineConfig(replicas=2), "metal", [])
    with pytest.raises(ModelError, match="CUDA_VISIBLE_DEVICES is empty"):
        places(EngineConfig(replicas=2), "cuda", [])


def test_visible_devices_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, expected in (("2, 3", ["2", "3"]), ("", []), ("GPU-ab,", ["GPU-ab"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
        assert visible_devices() == expected


def test_each_replica_has_its_own_folder(tmp_path: Path) -> None:
    config = EngineConfig(
        replicas=2,
        prefix_cache_dir=tmp_path,
        prefix_cache_dir_bytes=100,
        swap_dir=tmp_path,
        swap_dir_bytes=50,
    )
    parts = [place.config for place in places(config, "cpu", [])]
    assert [part.prefix_cache_dir for part in parts] == [
        tmp_path / "replica-0",
        tmp_path / "replica-1",
    ]
    # Files of swapped states have no names, so that a folder can be shared.
    assert {part.swap_dir for part in parts} == {tmp_path}
    assert {(part.prefix_cache_dir_bytes, part.swap_dir_bytes) for part in parts} == {(50, 25)}


@pytest.mark.parametrize("share", [None, 0.5])
def test_replicas_divide_what_one_engine_would_take(
    monkeypatch: pytest.MonkeyPatch, share: float | None
) -> None:
    """Each leaves room for the weights of those that load after it."""
    weights, total = 1 << 30, 16 << 30
    monkeypatch.setattr(memory, "free_memory", lambda: total - weights)
    monkeypatch.setattr(memory, "free_host_memory", lambda: total - weights)
    monkeypatch.setattr(memory, "total_memory", lambda: total)
    monkeypatch.setattr(memory.mx, "get_active_memory", lambda: weights)
    taken = []
    for engines in (1, 2, 4):
        config = EngineConfig(memory_share=share, device_engines=engines, host_engines=engines)
        kv, prefix = memory.plan_kv_memory(config, CPU, 1000)
        taken.append(engines * (kv + prefix))
        assert taken[-1] + engines * weights <= total
        assert engines * memory.swap_bytes(config, CPU) <= memory.SWAP_BYTES
    assert taken[0] > taken[1] > taken[2] > 0


class Threads:
    def __init__(self, number: int) -> None:
        self.number = number

    def get(self) -> int:
        return self.number

    def set(self, threads: int) -> None:
        self.number = threads


def test_replicas_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift.engine.cpu.cores.quota", lambda: None)
    for fixed, engines, expected in ((None, 2, 4), (None, 3, 2), (None, 20, 1), (3, 2, 3)):
        threads = Threads(8)
        with ThreadWatch(threads, fixed, engines):
            assert threads.number == expected
        assert threads.number == 8


def test_the_factory_makes_replicas_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(factory.make_client(EngineConfig(), SOURCE), ProcessClient)
    two = factory.make_client(EngineConfig(replicas=2), SOURCE)
    assert isinstance(two, ReplicaClient)
    assert len(two.replicas) == 2
    with pytest.raises(ModelError, match="--devices"):
        factory.make_client(EngineConfig(devices=("0",)), SOURCE)


def test_wrong_numbers_of_replicas_are_refused() -> None:
    for replicas in (0, 65):
        with pytest.raises(ValueError, match="replicas must be 1 to 64"):
            EngineConfig(replicas=replicas)
    with pytest.raises(ValueError, match="names 2 devices for 3 replicas"):
        EngineConfig(replicas=3, devices=("0", "1"))


def test_the_levels_that_are_summed_are_the_gauges_of_the_metrics() -> None:
    gauges = {f for m in (*MODEL, *ENGINE) if m.kind == "gauge" for f in m.fields}
    computed = {"kv_used_bytes", "kv_limit_bytes"}  # the share of both is a gauge
    assert gauges | computed == set(LEVELS)


def test_levels_are_sums_and_counts_are_not() -> None:
    levels = Levels(2)
    levels.record(0, StepStats(running=3, swapped_bytes={"memory": 5}, prefill_tokens=7))
    step = StepStats(running=1, waiting=2, swapped_bytes={"memory": 1, "disk": 4}, decode_tokens=9)
    levels.record(1, step)
    summed = levels.summed(step, waiting=10)
    assert (summed.running, summed.waiting) == (4, 12)
    assert summed.swapped_bytes == {"memory": 6, "disk": 4}
    assert (summed.prefill_tokens, summed.decode_tokens) == (0, 9)
