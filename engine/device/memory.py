"""Free memory, and how the engine divides it among KV cache, prefix cache, swap and steps."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from chairlift.engine.config import EngineConfig
from chairlift.engine.device.limits import max_rows
from chairlift.engine.device.profile import DeviceProfile, current
from chairlift.engine.errors import ModelError

# Host memory for preempted rows: this much, or this share of the free memory if that is less.
SWAP_BYTES = 4 << 30
SWAP_SHARE = 1 / 8
# Memory that sampling uses for each logit of a step: counts for penalties, logits before and after
# they are changed, weights. 41 bytes were measured with all parameters in use.
SAMPLER_BYTES = 42


class KVMemory(NamedTuple):
    """Bytes for the KV cache of rows and prompts, and for the prefix cache."""

    kv_bytes: int
    prefix_bytes: int


def free_memory() -> int:
    """Bytes that can still be allocated where MLX computes.

    On Metal, device and host share their memory; this is the part of Metal's recommended working
    set that is not in use.
    """
    if current().on_cpu:
        return free_host_memory()
    info = mx.device_info()
    for key in ("max_recommended_working_set_size", "total_memory", "memory_size"):
        if key in info:
            return max(0, int(info[key]) - mx.get_active_memory())
    return free_host_memory()


def total_memory() -> int:
    """Bytes where MLX computes, whether they are in use or not."""
    if current().on_cpu:
        return total_host_memory()
    info = mx.device_info()
    for key in ("max_recommended_working_set_size", "total_memory", "memory_size"):
        if key in info:
            return int(info[key])
    return total_host_memory()


def total_host_memory() -> int:
    """Bytes of the host's memory, as far as this process may use it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # a control group without a limit says "max"
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total


def free_host_memory() -> int:
    """Bytes that the host can still allocate; on macOS all of its memory."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def configure_mlx(profile: DeviceProfile) -> None:
    """Bounds MLX's cache of freed buffers. Call it once the weights are loaded.

    On Metal it also wires the recommended working set, as mlx-lm does: otherwise macOS may page
    weights out between steps.
    """
    mx.set_cache_limit(cache_bytes(profile))
    if mx.metal.is_available():
        working_set = mx.device_info().get("max_recommended_working_set_size")
        if working_set is not None:
            mx.set_wired_limit(int(working_set))


def cache_bytes(profile: DeviceProfile) -> int:
    """Bytes of freed buffers that MLX may keep. Call it once the weights are loaded."""
    return min(profile.cache_bytes, int(free_memory() * profile.cache_share))


def step_bytes(config: EngineConfig, profile: DeviceProfile, vocabulary: int) -> int:
    """Upper bound for a step's logits, sampling and attention scores, which no cache counts."""
    sampled = max_rows(config, profile) * vocabulary * SAMPLER_BYTES
    return sampled + profile.scored_bytes + profile.attention_bytes


def plan_kv_memory(
    config: EngineConfig, profile: DeviceProfile, vocabulary: int, sharing: int = 1
) -> KVMemory:
    """Divides memory between rows and prefix cache. Call it once the weights are loaded.

    Without a configured size, both get a share of the free memory, a quarter of it for the prefix
    cache. The memory of a step and of MLX's buffer cache stays free. On Metal the memory for
    preempted rows stays free, too, because it is taken from the same memory. With a configured
    share of all memory, both get what the weights and these leave of it.

    Replicas on one device get equal parts. The first one measures before the others load their
    weights (``client.replicas``), so it leaves room for these.

    Args:
        sharing: the number of ranks that share this memory; each gets as much.

    Raises:
        ModelError: they leave nothing of the configured share.
    """
    if config.kv_memory is not None:
        prefix = config.prefix_cache_bytes
        return KVMemory(config.kv_memory, config.kv_memory // 3 if prefix is None else prefix)
    engines = config.device_engines
    free = max(0, free_memory() - (engines - 1) * mx.get_active_memory()) // engines // sharing
    reserved = step_bytes(config, profile, vocabulary) + cache_bytes(profile)
    if profile.unified_memory:
        reserved += swap_bytes(config, profile, sharing)
    if config.memory_share is None:
        share = int(free * profile.kv_share)
    else:
        share = _left_of_share(config.memory_share, reserved, engines * sharing)
    share = min(share, max(0, free - reserved))
    prefix = share // 4 if config.prefix_cache_bytes is None else config.prefix_cache_bytes
    return KVMemory(max(0, share - prefix), prefix)


def _left_of_share(memory_share: float, reserved: int, sharing: int) -> int:
    """What weights and ``reserved`` leave of an engine's part of the configured share."""
    total, weights = total_memory() // sharing, mx.get_active_memory()
    left = int(total * memory_share) - weights - reserved
    if left <= 0:
        raise ModelError(
            f"--gpu-memory-utilization {memory_share:g} is {total * memory_share / 1e9:.1f} GB, "
            f"which leaves nothing for the KV cache: the model takes {weights / 1e9:.1f} GB, a "
            f"step and MLX's cache {reserved / 1e9:.1f} GB"
        )
    return left


def swap_bytes(config: EngineConfig, profile: DeviceProfile, sharing: int = 1) -> int:
    """Bytes of host memory for preempted rows: as configured, else a share of what is free.

    Replicas on one host divide that share, as do ``sharing`` ranks.
    """
    if config.swap_memory is not None:
        return config.swap_memory
    free = free_memory() if profile.unified_memory else free_host_memory()
    return min(SWAP_BYTES, int(free * SWAP_SHARE) // sharing) // config.host_engines
