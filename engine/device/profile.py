"""What the device is and how much memory there is to plan with."""

from __future__ import annotations

import math
import os
from pathlib import Path

import mlx.core as mx

from chairlift.engine.config import EngineConfig
from chairlift.engine.model.attention_blocks import SCORE_BYTES

# Parts of the free memory that KV may take: an accelerator's is ours alone; on the CPU the rest of
# the machine wants some too.
ACCELERATOR_SHARE = 0.85
CPU_SHARE = 0.5
# The host's memory for preempted rows: this much, or that part of what is free if it is less.
SWAP_BYTES = 4 << 30
SWAP_SHARE = 1 / 8
DEFAULT_MAX_ROWS = {"cpu": 32, "gpu": 256}
# Prompt tokens a step. On the CPU a chunk of 512 takes as long as six to eight decode steps.
DEFAULT_CHUNK = {"cpu": 512, "gpu": 1024}
# Beside running rows a step takes no longer than this, or so many times what the rows alone take.
# On the CPU chunks are cut by tokens only: by time (0.4 s) gaps between tokens were a third of what
# they are, but throughput was 8 % less.
DEFAULT_STEP_SECONDS = {"cpu": math.inf, "gpu": 0.033}
STRETCH = {"cpu": 0.0, "gpu": 1.75}
# Columns given to rows ahead of their tokens, so that buffers grow seldom. On the CPU attention
# reads the whole ring where rows lie across its end, and a wide one costs time.
AHEAD = {"cpu": 0, "gpu": 512}
# Bands of rows of like length, and the bytes of KV that another one has to save. On an accelerator
# its three launches a layer take as long as reading these bytes. So does on the CPU what is lost
# with a second band: attention that runs on the host from input to output, 6 to 8 ms a step.
BANDS = 4
BAND_BYTES = {"cpu": 96 << 20, "gpu": 1 << 30}
# A chunk has a multiple of this many tokens where its shape costs something when it is new.
CHUNK_MULTIPLE = {"cpu": 1, "gpu": 128}
# Of the logits of prompts whose log-probabilities are wanted, in float32, that a step holds at
# once; beside what KV and prefixes may take.
SCORED_BYTES = {"cpu": 128 << 20, "gpu": 512 << 20}
# Of one number of a step's logits, what sampling has at once: penalties' counts, the logits as they
# are and changed, weights (41 bytes measured with all parameters in use).
SAMPLER_BYTES = 42
# Buffers that MLX keeps for arrays to come: that part of the free memory, and no more than this.
# Without a limit it keeps any number of them, which no budget counts.
CACHE_SHARE = {"cpu": 1 / 16, "gpu": 1 / 10}
CACHE_BYTES = {"cpu": 512 << 20, "gpu": 16 << 30}
# A prompt more in a step costs launches, which an accelerator waits for.
WHOLE = {"cpu": False, "gpu": True}


def kind() -> str:
    """ "cpu" or "gpu": where MLX computes by default."""
    return "gpu" if mx.default_device() == mx.Device(mx.gpu) else "cpu"


def name() -> str:
    """The device's own name, as far as MLX knows it."""
    info = mx.device_info()
    return str(info.get("device_name") or info.get("architecture") or kind())


def free_memory() -> int:
    """Bytes that can still be allocated where MLX computes."""
    if kind() == "cpu":
        return _free_host_memory()
    info = mx.device_info()
    for key in ("max_recommended_working_set_size", "total_memory", "memory_size"):
        if key in info:
            return max(0, int(info[key]) - mx.get_active_memory())
    return _free_host_memory()


def _free_host_memory() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def max_rows(config: EngineConfig) -> int:
    """Rows of the batch: as configured, else by device."""
    return DEFAULT_MAX_ROWS[kind()] if config.max_rows is None else config.max_rows


def max_step_tokens(config: EngineConfig) -> int:
    """Tokens of a step: as configured, else a chunk and a decode token of every row."""
    if config.max_step_tokens is not None:
        return config.max_step_tokens
    return DEFAULT_CHUNK[kind()] + max_rows(config)


def max_scored(vocabulary: int) -> int:
    """Prompt tokens of a step whose logits are computed, by their size."""
    return max(1, SCORED_BYTES[kind()] // (4 * vocabulary))


def step_seconds(config: EngineConfig) -> float:
    """How long a step may take beside running rows: as configured, else by device."""
    if config.max_step_ms is not None:
        return config.max_step_ms / 1e3
    return DEFAULT_STEP_SECONDS[kind()]


def cache_bytes() -> int:
    """What MLX may keep of freed buffers. To be asked once the weights are loaded."""
    return min(CACHE_BYTES[kind()], int(free_memory() * CACHE_SHARE[kind()]))


def step_bytes(config: EngineConfig, vocabulary: int) -> int:
    """Most bytes of a step's logits, sampling and attention scores, which no cache accounts for."""
    sampled = max_rows(config) * vocabulary * SAMPLER_BYTES
    return sampled + SCORED_BYTES[kind()] + (SCORE_BYTES if kind() == "cpu" else 0)


def kv_and_prefix_bytes(config: EngineConfig, vocabulary: int) -> tuple[int, int]:
    """Bytes for rows and for the prefix cache: as configured, else shares of what is free.

    A step's own memory and MLX's cache of buffers are left free. To be asked once the weights are
    loaded. The prefix cache takes a quarter of what both may have.
    """
    if config.kv_memory is not None:
        prefix = config.prefix_cache_bytes
        return config.kv_memory, config.kv_memory // 3 if prefix is None else prefix
    free = free_memory()
    left = free - step_bytes(config, vocabulary) - cache_bytes()
    share = min(int(free * (CPU_SHARE if kind() == "cpu" else ACCELERATOR_SHARE)), max(0, left))
    prefix = share // 4 if config.prefix_cache_bytes is None else config.prefix_cache_bytes
    return max(0, share - prefix), prefix


def swap_bytes(config: EngineConfig) -> int:
    """Bytes of host memory for preempted rows: as configured, else a share of what is free."""
    if config.swap_memory is not None:
        return config.swap_memory
    return min(SWAP_BYTES, int(_free_host_memory() * SWAP_SHARE))
