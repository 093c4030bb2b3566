"""Free memory, and how the engine divides it among KV cache, prefix cache, swap and steps."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from chairlift.engine.config import EngineConfig
from chairlift.engine.device.buffers import BufferCache
from chairlift.engine.device.control_group import group_memory
from chairlift.engine.device.limits import max_rows
from chairlift.engine.device.profile import DeviceProfile, current
from chairlift.engine.errors import ModelError

# Host memory for preempted rows: this much, or this share of the free memory if that is less.
SWAP_BYTES = 4 << 30
SWAP_SHARE = 1 / 8
# Memory that sampling uses for each logit of a step: counts for penalties, logits before and after
# they are changed, weights. 41 bytes were measured with all parameters in use.
SAMPLER_BYTES = 42

# This share of a CUDA device's memory stays free: for CUDA graphs, and because memory that MLX has
# given back is in fragments.
CUDA_MARGIN = 0.05

# With several engines, this share of what one engine's caches would leave free is left free, too.
FREE_SHARE = 1 / 2


class KVMemory(NamedTuple):
    """Bytes for the KV cache of rows and prompts, and for the prefix cache."""

    kv_bytes: int
    prefix_bytes: int


def free_memory() -> int:
    """Bytes that can still be allocated where MLX computes.

    On Metal, device and host share their memory; this is the part of Metal's recommended working
    set that is not in use. On CUDA it is what all programs leave, less ``CUDA_MARGIN``.
    """
    if current().on_cpu:
        return free_host_memory()
    info = mx.device_info()
    if "free_memory" in info:
        margin = int(int(info["total_memory"]) * CUDA_MARGIN)
        return max(0, int(info["free_memory"]) + mx.get_cache_memory() - margin)
    total = _device_memory()
    return free_host_memory() if total is None else max(0, total - mx.get_active_memory())


def total_memory() -> int:
    """Bytes where MLX computes, whether they are in use or not."""
    total = None if current().on_cpu else _device_memory()
    return total_host_memory() if total is None else total


def _device_memory() -> int | None:
    """Bytes of the accelerator's memory, in use or not; None if MLX does not say."""
    info = mx.device_info()
    for key in ("max_recommended_working_set_size", "total_memory", "memory_size"):
        if key in info:
            return int(info[key])
    return None


def total_host_memory() -> int:
    """Bytes of the host's memory, as far as this process may use it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    group = group_memory()
    return total if group is None else min(total, group.limit)


def free_host_memory() -> int:
    """Bytes that this process can still allocate on the host; on macOS all of its memory."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    group = group_memory()
    return free if group is None else min(free, group.free)


class EngineMemory(NamedTuple):
    """Bytes of an engine beside its weights, before it is started.

    Attributes:
        working: the memory of a step and of MLX's cache of buffers.
        caches: KV and prefix cache together; None if no flag gives their sizes.
    """

    working: int
    caches: int | None


def models_budget(profile: DeviceProfile, memory_share: float | None) -> int:
    """Bytes that the engines of several models may use together, if no flag gives them.

    Without a configured share of all memory, a part of the memory that is free now stays free:
    ``FREE_SHARE`` of what one engine would not use for its caches.
    """
    if memory_share is not None:
        return int(total_memory() * memory_share)
    return int(free_memory() * (1 - (1 - profile.kv_share) * FREE_SHARE))


def engine_bytes(config: EngineConfig, profile: DeviceProfile, vocabulary: int) -> EngineMemory:
    """The memory of one of several engines on a device, without its weights."""
    working = step_bytes(config, profile, vocabulary)
    if profile.unified_memory:
        working += swap_bytes(config, profile)
    if config.kv_memory is None:
        return EngineMemory(working, None)
    kv, prefix = _configured(config)
    return EngineMemory(working + _buffers(profile, kv + prefix), kv + prefix)


def configure_mlx(profile: DeviceProfile, memory_bytes: int | None = None) -> BufferCache:
    """Bounds MLX's cache of freed buffers. Call it once the weights are loaded.

    ``memory_bytes`` is the engine's part of the memory, if it has one.

    On CUDA it also bounds all of MLX's memory by what is free now. The host launches operations
    ahead of the GPU and allocates their results at once; at the bound it waits for earlier results
    to be freed, where it would otherwise run out of memory.

    On Metal it also wires the recommended working set, as mlx-lm does: otherwise macOS may page
    weights out between steps.
    """
    buffers = BufferCache(cache_bytes(profile, memory_bytes))
    if mx.cuda.is_available() and not profile.on_cpu:
        mx.set_memory_limit(mx.get_active_memory() + free_memory())
    if mx.metal.is_available():
        working_set = mx.device_info().get("max_recommended_working_set_size")
        if working_set is not None:
            mx.set_wired_limit(int(working_set))
    return buffers


def cache_bytes(profile: DeviceProfile, memory_bytes: int | None = None) -> int:
    """Bytes of freed buffers that MLX may keep. Call it once the weights are loaded."""
    if memory_bytes is not None:
        return _buffers(profile, max(0, memory_bytes - mx.get_active_memory()))
    return _buffers(profile, free_memory())


def _buffers(profile: DeviceProfile, free: int) -> int:
    return min(profile.cache_bytes, int(free * profile.cache_share))


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
    share of all memory, or a part of it in bytes, both get what the weights and these leave of it.

    Replicas on one device get equal parts. The first one measures before the others load their
    weights (``client.replicas``), so it leaves room for these.

    Args:
        sharing: the number of ranks that share this memory; each gets as much.

    Raises:
        ModelError: they leave nothing of the configured share or part.
    """
    if config.kv_memory is not None:
        return _configured(config)
    engines = config.device_engines
    free = max(0, free_memory() - (engines - 1) * mx.get_active_memory()) // engines // sharing
    part = part_bytes(config, sharing)
    reserved = step_bytes(config, profile, vocabulary) + cache_bytes(profile, part)
    if profile.unified_memory:
        reserved += swap_bytes(config, profile, sharing)
    if part is not None:
        share = _left(part, reserved, "this model's part of --models-memory")
    elif config.memory_share is not None:
        share = _left(
            int(total_memory() // (engines * sharing) * config.memory_share),
            *(reserved, f"--gpu-memory-utilization {config.memory_share:g}"),
        )
    else:
        share = int(free * profile.kv_share)
    share = min(share, max(0, free - reserved))
    prefix = share // 4 if config.prefix_cache_bytes is None else config.prefix_cache_bytes
    return KVMemory(max(0, share - prefix), prefix)


def spare_bytes(config: EngineConfig, sharing: int) -> int:
    """Bytes free for caches and everything else. Call it after the weights are loaded.

    ``sharing`` is the number of ranks that share this memory.
    """
    weights, engines = mx.get_active_memory(), config.device_engines
    spare = max(0, free_memory() - (engines - 1) * weights) // engines // sharing
    if (part := part_bytes(config, sharing)) is not None:
        spare = min(spare, part - weights)
    elif config.memory_share is not None:
        share = int(total_memory() * config.memory_share) // (engines * sharing)
        spare = min(spare, share - weights)
    if config.kv_memory is not None:
        spare -= sum(_configured(config))
    return max(0, spare)


def part_bytes(config: EngineConfig, sharing: int) -> int | None:
    """The part of ``memory_bytes`` of one of ``sharing`` ranks; None if there is no such limit."""
    return None if config.memory_bytes is None else config.memory_bytes // sharing


def _configured(config: EngineConfig) -> KVMemory:
    """The sizes that ``kv_memory`` gives."""
    assert config.kv_memory is not None, "the caller has checked it"
    prefix = config.prefix_cache_bytes
    return KVMemory(config.kv_memory, config.kv_memory // 3 if prefix is None else prefix)


def _left(memory: int, reserved: int, named: str) -> int:
    """The part of ``memory`` bytes, which the setting ``named`` gives, that stays free."""
    weights = mx.get_active_memory()
    left = memory - weights - reserved
    if left <= 0:
        raise ModelError(
            f"{named} is {memory / 1e9:.1f} GB, which leaves nothing for the KV cache: the model "
            f"takes {weights / 1e9:.1f} GB, a step and MLX's cache {reserved / 1e9:.1f} GB"
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
