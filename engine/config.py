"""The engine's settings, and Chairlift's cache folder."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from chairlift.engine.messages.speculative_config import SpeculativeConfig
from chairlift.scheduler.limits import PREFILL_SLACK, PRIORITY_AGEING

KV_BITS = (4, 8)
KV_GROUP_SIZES = (32, 64, 128)
# More than the cores of any machine. BLAS libraries allocate arrays of the size they are given.
MAX_THREADS = 1024
# More than the devices of any machine; each replica is a process with its own weights.
MAX_REPLICAS = 64
# More devices than any model file of mlx-lm can be divided among.
MAX_RANKS = 256
DEFAULT_MODEL = "SmolLM2-135M-Instruct"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The settings for serving one model. None lets the engine choose, by device or by free memory.

    Attributes:
        model: DEFAULT_MODEL, a hub id, an mlx-lm or Hugging Face directory, or a ``.gguf`` file.
        revision: a hub id's branch, tag or commit. None: its main branch.
        dtype: "auto", "float32", "float16" or "bfloat16". "auto" is float32 on the CPU and the
            model's own type elsewhere. With compiled kernels it also rounds weights of a quantized
            file that do not stay quantized to bfloat16; with AMX these are all weights, if their
            float32 copies leave half of the free memory.
        threads: threads for matrix products on the CPU. None: one per core, and fewer while other
            processes use the cores.
        max_rows: rows of the decode batch.
        max_step_tokens: upper bound of the prompt and decode tokens computed in one step.
        max_step_ms: the predicted time that a step may take while rows are decoding, in
            milliseconds; prompts are cut to fit. None also lets prompts take about as long as the
            rows themselves.
        kv_memory: bytes for the KV cache.
        memory_share: share of the device's memory for weights, KV cache, prefix cache and a step
            together, above 0 and at most 1.
        memory_bytes: bytes for weights, KV cache, prefix cache and a step together, where several
            engines share a device.
        max_queue: waiting requests above which further ones are refused.
        max_context: tokens of a prompt and its output. None: the model's limit.
        priority_ageing: a request is scheduled as if it had come this many seconds later for each
            step of its priority above 0, and earlier for each below.
        prefill_slack: a prompt is overtaken by others that come within this many times the time
            that it takes alone; 0: first come, first served.
        text_only: a vision model is served without images.
        trust_remote_code: a model may run Python code from its own folder.
        prefix_cache_bytes: memory for prefixes of earlier prompts; 0 turns the prefix cache off.
        prefix_cache_dir: keeps prefixes in this directory as well.
        prefix_cache_dir_bytes: upper bound of the files in ``prefix_cache_dir``.
        swap_memory: host memory for the states of preempted sequences; with 0 they are computed
            again.
        swap_dir: directory to which states move when half of ``swap_memory`` is full.
        swap_dir_bytes: upper bound of the files in ``swap_dir``.
        kv_bits: bits of a quantized KV cache. None keeps the model's type.
        kv_group_size: values that share a scale in a quantized KV cache.
        replicas: engines of the model, which share its requests.
        devices: the CUDA device of each replica. None: one after the other, as far as there are.
        host_engines: replicas that share the host's cores and memory, this engine included.
            ``engine.client.placement`` sets this and the next.
        device_engines: those of them that share this engine's device.
        tensor_parallel_size: ranks that compute the model together, each on a device of its own.
        hostfile: lists the hosts of the ranks, in mlx.launch's format. None: all on this machine.
        max_loras: the maximum number of loaded LoRA adapters.
        max_lora_rank: the maximum rank of each.
        speculative: how tokens of every request are proposed. None: only grammars and predicted
            outputs propose tokens.

    Raises:
        ValueError: a value is out of range; the text names the command line's flag.
    """

    model: str = DEFAULT_MODEL
    revision: str | None = None
    dtype: str = "auto"
    threads: int | None = None
    max_rows: int | None = None
    max_step_tokens: int | None = None
    max_step_ms: float | None = None
    kv_memory: int | None = None
    memory_share: float | None = None
    memory_bytes: int | None = None
    max_queue: int = 256
    max_context: int | None = None
    priority_ageing: float = PRIORITY_AGEING
    prefill_slack: float = PREFILL_SLACK
    text_only: bool = False
    trust_remote_code: bool = False
    prefix_cache_bytes: int | None = None
    prefix_cache_dir: Path | None = None
    prefix_cache_dir_bytes: int = 10 << 30
    swap_memory: int | None = None
    swap_dir: Path | None = None
    swap_dir_bytes: int = 10 << 30
    kv_bits: int | None = None
    kv_group_size: int = 64
    replicas: int = 1
    devices: tuple[str, ...] | None = None
    host_engines: int = 1
    device_engines: int = 1
    tensor_parallel_size: int = 1
    hostfile: Path | None = None
    max_loras: int = 8
    max_lora_rank: int = 64
    speculative: SpeculativeConfig | None = None

    def __post_init__(self) -> None:
        if self.threads is not None and not 1 <= self.threads <= MAX_THREADS:
            raise ValueError(f"threads must be 1 to {MAX_THREADS}, not {self.threads}")
        if self.memory_share is not None and not 0 < self.memory_share <= 1:
            raise ValueError(
                f"gpu-memory-utilization must be above 0 and at most 1, not {self.memory_share}"
            )
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
        if not 1 <= self.replicas <= MAX_REPLICAS:
            raise ValueError(f"replicas must be 1 to {MAX_REPLICAS}, not {self.replicas}")
        if self.devices is not None and len(self.devices) != self.replicas:
            raise ValueError(
                f"devices names {len(self.devices)} devices for {self.replicas} replicas; each "
                "replica has one"
            )
        if self.kv_group_size not in KV_GROUP_SIZES:
            raise ValueError(
                f"kv-group-size must be one of {KV_GROUP_SIZES}, not {self.kv_group_size}"
            )
        if not 1 <= self.tensor_parallel_size <= MAX_RANKS:
            raise ValueError(
                f"tensor-parallel-size must be 1 to {MAX_RANKS}, not {self.tensor_parallel_size}"
            )
        if self.tensor_parallel_size == 1 and self.hostfile is not None:
            raise ValueError("hostfile needs a tensor-parallel-size above 1")
        if self.tensor_parallel_size > 1:
            if self.replicas > 1 or self.devices is not None:
                raise ValueError(
                    "replicas and devices do not work with tensor-parallel-size above 1: one "
                    "server has either several engines or one that is divided"
                )
            # Disks answer each rank at another time, and the ranks have to do the same.
            for name in ("prefix_cache_dir", "swap_dir"):
                if getattr(self, name) is not None:
                    flag = name.replace("_", "-")
                    raise ValueError(f"{flag} does not work with tensor-parallel-size above 1")
            if self.speculative is not None and self.speculative.model is not None:
                raise ValueError("a draft model does not work with tensor-parallel-size above 1")

    @property
    def takes_adapters(self) -> bool:
        """Whether LoRA adapters can be loaded: only into one engine that is not divided."""
        return self.replicas == 1 and self.tensor_parallel_size == 1


def cache_dir() -> Path:
    """The folder for files that can be made again: models, tokenizers, renamed libraries.

    It is ``$CHAIRLIFT_CACHE``, or else a folder in the user's cache.
    """
    if chosen := os.environ.get("CHAIRLIFT_CACHE"):
        return Path(chosen).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "chairlift"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "chairlift"


def encode_path(value: object) -> str:
    """Encodes a path as text, for msgspec."""
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(type(value))


def decode_path(kind: type, value: object) -> object:
    """Decodes a path from text, for msgspec."""
    if kind is Path:
        return Path(str(value))
    raise NotImplementedError(kind)
