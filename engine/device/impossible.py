"""Refuses settings that this machine cannot hold, and warns about those that will not help."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from chairlift.cache.pages.page import step_size_below
from chairlift.engine.config import EngineConfig
from chairlift.engine.device import memory
from chairlift.engine.device.limits import max_rows, max_step_tokens
from chairlift.engine.device.profile import DeviceProfile
from chairlift.engine.errors import ModelError

logger = logging.getLogger(__name__)

# Kernels for CUDA have a block, or several, for each token of a step, with its padding. CUDA allows
# 65,535 of them in a dimension.
CUDA_STEP_TOKENS = step_size_below(65_535)


def check_settings(config: EngineConfig, profile: DeviceProfile) -> None:
    """Checks the sizes that need no model. Call it before the model is loaded.

    Raises:
        ModelError: a size exceeds the memory that there is, or a step has more tokens than the
            device's kernels take; the message names the flag.
    """
    total, free = memory.total_memory(), memory.free_memory()
    caches = (config.kv_memory or 0) + (config.prefix_cache_bytes or 0)
    _check("--kv-memory", config.kv_memory or 0, total, free)
    _check("--prefix-cache-bytes", config.prefix_cache_bytes or 0, total, free)
    _check("--kv-memory and --prefix-cache-bytes together", caches, total, free)
    if profile.unified_memory:
        _check("--swap-memory", config.swap_memory or 0, total, free)
    else:
        host = memory.total_host_memory()
        _check("--swap-memory", config.swap_memory or 0, host, memory.free_host_memory())
    if config.prefix_cache_dir is not None:
        _check_disk(
            "--prefix-cache-dir-bytes", config.prefix_cache_dir_bytes, config.prefix_cache_dir
        )
    if config.swap_dir is not None:
        _check_disk("--swap-dir-bytes", config.swap_dir_bytes, config.swap_dir)
    tokens = max_step_tokens(config, profile)
    if profile.kind == "cuda" and tokens > CUDA_STEP_TOKENS:
        flag = "--max-rows" if config.max_step_tokens is None else "--max-step-tokens"
        raise ModelError(
            f"{flag}: a step would compute {tokens} tokens; on CUDA it computes at most "
            f"{CUDA_STEP_TOKENS}"
        )
    cores = os.cpu_count() or 1
    if config.threads is not None and config.threads > cores:
        logger.warning(
            "--threads %d: this machine has %d cores, and further threads only wait for them",
            *(config.threads, cores),
        )


def check_model_settings(
    config: EngineConfig, profile: DeviceProfile, vocabulary: int, max_context: int | None
) -> None:
    """Checks the sizes that depend on the model. Call it once the weights are loaded.

    Args:
        vocabulary: the last dimension of the model's logits.
        max_context: the model's own context in tokens; None if it has no limit.

    Raises:
        ModelError: the batch needs more memory than there is; the message names the flag.
    """
    rows, total = max_rows(config, profile), memory.total_memory()
    needed = rows * vocabulary * memory.SAMPLER_BYTES
    if config.max_rows is not None and needed > total:
        raise ModelError(
            f"--max-rows {rows}: sampling from a vocabulary of {vocabulary} needs {_gb(needed)} "
            f"for so many rows, and there are {_gb(total)} of memory; at most "
            f"{total // (vocabulary * memory.SAMPLER_BYTES)} rows fit"
        )
    if config.max_context and max_context and config.max_context > max_context:
        logger.warning(
            "--max-context %d has no effect: the model's own context is %d tokens",
            *(config.max_context, max_context),
        )


def _check(flag: str, size: int, total: int, free: int) -> None:
    if size > total:
        raise ModelError(f"{flag}: {_gb(size)} do not fit: there are {_gb(total)} of memory")
    if size > free:
        logger.warning("%s: %s are more than the %s of free memory", flag, _gb(size), _gb(free))


def _check_disk(flag: str, size: int, folder: Path) -> None:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        total = shutil.disk_usage(folder).total
    except OSError:  # the folder's user reports it
        return
    if size > total:
        logger.warning(
            "%s: %s are more than the disk of %s holds (%s)", flag, _gb(size), folder, _gb(total)
        )


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size < 10e9 else f"{size / 1e9:,.0f} GB"
