"""Settings that a machine cannot hold are refused, or warned about, in one line with the flag."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chairlift.cache.pages.page import step_size
from chairlift.engine.config import EngineConfig
from chairlift.engine.device import memory
from chairlift.engine.device.impossible import (
    CUDA_STEP_TOKENS,
    check_model_settings,
    check_settings,
)
from chairlift.engine.device.profile import CPU, CUDA, METAL
from chairlift.engine.errors import ModelError

TOTAL, FREE = 24 << 30, 10 << 30
FLAGS = {
    "kv_memory": "--kv-memory",
    "prefix_cache_bytes": "--prefix-cache-bytes",
    "swap_memory": "--swap-memory",
}
PATCHED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("total", TOTAL), ("free", FREE)):
        monkeypatch.setattr(memory, f"{name}_memory", lambda size=size: size)
        monkeypatch.setattr(memory, f"{name}_host_memory", lambda size=size: size)


@PATCHED
@given(
    field=st.sampled_from(sorted(FLAGS)),
    size=st.integers(0, 2**62),
    profile=st.sampled_from([CPU, CUDA, METAL]),
)
def test_a_size_is_refused_above_the_memory_and_warned_about_above_the_free(
    field: str, size: int, profile: object, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.clear()
    config = EngineConfig(**{field: size})
    if size > TOTAL:
        with pytest.raises(ModelError, match=FLAGS[field]) as caught:
            check_settings(config, profile)
        assert "\n" not in str(caught.value)
        assert "26 GB of memory" in str(caught.value)
        return
    check_settings(config, profile)
    assert any(FLAGS[field] in each for each in caplog.messages) == (size > FREE)


def test_caches_are_refused_together() -> None:
    with pytest.raises(ModelError, match="--kv-memory and --prefix-cache-bytes together"):
        check_settings(EngineConfig(kv_memory=15 << 30, prefix_cache_bytes=15 << 30), CPU)


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        ({"max_step_tokens": CUDA_STEP_TOKENS}, None),
        ({"max_step_tokens": CUDA_STEP_TOKENS + 1}, "--max-step-tokens"),
        ({"max_step_tokens": 131_072, "max_rows": 9}, "--max-step-tokens"),
        ({"max_rows": 57_000}, "--max-rows"),
    ],
)
def test_steps_of_more_tokens_than_cuda_launches_are_refused(
    fields: dict[str, int], flag: str | None
) -> None:
    assert step_size(CUDA_STEP_TOKENS) < 2**16 <= step_size(CUDA_STEP_TOKENS + 1)
    config = EngineConfig(**fields)
    for profile in (CPU, METAL):
        check_settings(config, profile)
    with (
        pytest.raises(ModelError, match=f"{flag}: a step would compute") if flag else nullcontext()
    ):
        check_settings(config, CUDA)


def test_threads_above_the_cores_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    cores = os.cpu_count() or 1
    check_settings(EngineConfig(threads=cores), CPU)
    assert not caplog.messages
    check_settings(EngineConfig(threads=cores + 1), CPU)
    assert f"this machine has {cores} cores" in caplog.text


def test_a_directory_larger_than_its_disk_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "not" / "there"
    check_settings(EngineConfig(swap_dir=folder, prefix_cache_dir=folder), CPU)
    check_settings(EngineConfig(swap_dir=folder, swap_dir_bytes=1 << 60), CPU)
    check_settings(EngineConfig(prefix_cache_dir=folder, prefix_cache_dir_bytes=1 << 60), CPU)
    assert caplog.text.count("--swap-dir-bytes: ") == 1
    assert caplog.text.count("--prefix-cache-dir-bytes: ") == 1


@PATCHED
@given(rows=st.integers(1, 2**40), vocabulary=st.integers(1, 2**20))
def test_rows_that_sampling_cannot_hold_are_refused(rows: int, vocabulary: int) -> None:
    config = EngineConfig(max_rows=rows)
    if rows * vocabulary * memory.SAMPLER_BYTES > TOTAL:
        with pytest.raises(ModelError, match=f"--max-rows {rows}: "):
            check_model_settings(config, CPU, vocabulary, None)
    else:
        check_model_settings(config, CPU, vocabulary, None)


def test_a_context_above_the_models_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    check_model_settings(EngineConfig(max_context=100), CPU, 10, 100)
    check_model_settings(EngineConfig(max_context=100), CPU, 10, None)
    assert not caplog.messages
    check_model_settings(EngineConfig(max_context=101), CPU, 10, 100)
    assert "--max-context 101 has no effect" in caplog.text
