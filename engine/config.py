"""The engine's settings, which the command line builds, and its folder on disk."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from chairlift.scheduler.limits import PRIORITY_AGEING

KV_BITS = (4, 8)
KV_GROUP_SIZES = (32, 64, 128)
# More than any machine has cores; BLAS libraries take what they are given for an array's size.
MAX_THREADS = 1024
DEFAULT_MODEL = "SmolLM2-135M-Instruct"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How the engine serves one model.

    ``model`` is DEFAULT_MODEL, a hub id, an mlx-lm or Hugging Face directory, or a ``.gguf`` file.
    ``dtype`` is "auto", "float32", "float16" or "bfloat16"; auto means float32 on the CPU and the
    model's own type elsewhere; on a CPU that multiplies bfloat16, quantized weights are rounded to
    that. ``threads`` is how many threads compute matrix products on the CPU; None means as many as
    there are cores, and fewer while other processes want these. ``max_step_tokens`` bounds the
    prompt and decode tokens computed in one step; None chooses by device. ``max_step_ms`` is how
    long a step may take beside running rows, in milliseconds, as
    far as can be foreseen: prompts are cut accordingly; None chooses by device, and lets prompts
    take about as long as the rows themselves. ``kv_memory`` is in bytes; None takes a share of what
    the machine has left once the weights are loaded. ``max_context`` None is the model's own limit.
    A request is served as if it had come ``priority_ageing`` seconds later for each step that its
    priority is above 0, and earlier for each below.

    ``prefix_cache_bytes`` bounds the memory for prefixes of earlier prompts; None takes a share
    that the engine chooses, 0 turns the prefix cache off. ``prefix_cache_dir`` keeps prefixes in a
    directory as well, in at most ``prefix_cache_dir_bytes`` there. ``swap_memory`` bounds the host
    memory for the states of preempted sequences; None takes a share of what is free, with 0 they
    are computed again. With a ``swap_dir`` some of them go there, in at most ``swap_dir_bytes``,
    so that there is room in memory for the next. ``kv_bits`` None keeps the KV
    cache in the model's type; else it is quantized, in groups of ``kv_group_size`` values.

    Raises:
        ValueError: a value that cannot be served, in the words of the command line.
    """

    model: str = DEFAULT_MODEL
    dtype: str = "auto"
    threads: int | None = None
    max_rows: int | None = None
    max_step_tokens: int | None = None
    max_step_ms: float | None = None
    kv_memory: int | None = None
    max_queue: int = 256
    max_context: int | None = None
    priority_ageing: float = PRIORITY_AGEING
    trust_remote_code: bool = False
    prefix_cache_bytes: int | None = None
    prefix_cache_dir: Path | None = None
    prefix_cache_dir_bytes: int = 10 << 30
    swap_memory: int | None = None
    swap_dir: Path | None = None
    swap_dir_bytes: int = 10 << 30
    kv_bits: int | None = None
    kv_group_size: int = 64

    def __post_init__(self) -> None:
        if self.threads is not None and not 1 <= self.threads <= MAX_THREADS:
            raise ValueError(f"threads must be 1 to {MAX_THREADS}, not {self.threads}")
        if self.prefix_cache_bytes is not None and self.prefix_cache_bytes < 0:
            raise ValueError(
                f"prefix-cache-bytes must be at least 0, not {self.prefix_cache_bytes}"
            )
        if self.prefix_cache_dir_bytes < 1:
            raise ValueError(
                f"prefix-cache-dir-bytes must be at least 1, not {self.prefix_cache_dir_bytes}"
            )
        if self.prefix_cache_dir is not None and self.prefix_cache_bytes == 0:
            raise ValueError(
                "prefix-cache-dir needs the prefix cache, which prefix-cache-bytes 0 turns off"
            )
        if self.swap_memory is not None and self.swap_memory < 0:
            raise ValueError(f"swap-memory must be at least 0, not {self.swap_memory}")
        if self.swap_dir_bytes < 1:
            raise ValueError(f"swap-dir-bytes must be at least 1, not {self.swap_dir_bytes}")
        if self.swap_dir is not None and self.swap_memory == 0:
            raise ValueError("swap-dir needs memory on the way, which swap-memory 0 takes away")
        if self.kv_bits is not None and self.kv_bits not in KV_BITS:
            raise ValueError(f"kv-bits must be one of {KV_BITS}, not {self.kv_bits}")
        if self.kv_group_size not in KV_GROUP_SIZES:
            raise ValueError(
                f"kv-group-size must be one of {KV_GROUP_SIZES}, not {self.kv_group_size}"
            )


def cache_dir() -> Path:
    """The folder of what Chairlift can make again: models, tokenizers, linked libraries.

    It is ``$CHAIRLIFT_CACHE``, or else a folder in the user's cache.
    """
    if chosen := os.environ.get("CHAIRLIFT_CACHE"):
        return Path(chosen).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "chairlift"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "chairlift"
