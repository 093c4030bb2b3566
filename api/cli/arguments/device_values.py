"""Defaults that depend on the device: as help says them, and as ``--print-config`` prints them.

``by_device`` knows all devices' values without MLX; ``chosen`` imports MLX, for this machine's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from chairlift.api.cli.arguments.setting import Chosen
from chairlift.engine.config import EngineConfig
from chairlift.engine.device.backend import BackendError, import_mlx
from chairlift.engine.device.limits import max_rows, max_step_tokens, step_seconds
from chairlift.engine.device.profile import CPU, CUDA, METAL, DeviceProfile, current

# The values of these without a flag, from the settings and the device.
_LIMITS: Mapping[str, Callable[[EngineConfig, DeviceProfile], object]] = {
    "max-rows": max_rows,
    "max-step-tokens": max_step_tokens,
    "max-step-ms": lambda config, profile: _milliseconds(step_seconds(config, profile)),
    "kv-memory": lambda _, profile: _share(profile),
}


def by_device(key: str) -> str:
    """The default of a flag on each kind of device, for help: "by device: cpu 32, cuda 256"."""
    values = (
        f"{profile.kind} {_LIMITS[key](EngineConfig(), profile)}" for profile in (CPU, CUDA, METAL)
    )
    # argparse formats help with %.
    return f"by device: {', '.join(values)}".replace("%", "%%")


def chosen(config: EngineConfig) -> dict[str, Chosen]:
    """The values that the engine will choose on this machine where ``config`` has None.

    If MLX cannot be imported here, the reason stands in the place of values.
    """
    try:
        import_mlx()
    except BackendError as error:
        return dict.fromkeys(_LIMITS, Chosen(None, f"device unknown: {error}"))
    from chairlift.engine.device.memory import swap_bytes

    profile = current()
    source = f"device {profile.kind}"
    values = {key: Chosen(value(config, profile), source) for key, value in _LIMITS.items()}
    if config.memory_share is not None:
        kv = "what gpu-memory-utilization leaves, with prefix-cache-bytes"
    else:
        kv = f"{_share(profile)} of the memory free after loading, with prefix-cache-bytes"
    prefix = "a quarter of what both caches get"
    if config.kv_memory is not None:
        prefix = "a third of kv-memory, on top of it"
    values["kv-memory"] = Chosen(None, f"{source}: {kv}")
    values["prefix-cache-bytes"] = Chosen(None, f"{source}: {prefix}")
    values["swap-memory"] = Chosen(swap_bytes(config, profile), source)
    return values | {
        "prefix-cache-dir-bytes": Chosen(config.prefix_cache_dir_bytes, "with prefix-cache-dir"),
        "swap-dir-bytes": Chosen(config.swap_dir_bytes, "with swap-dir"),
        "file-dir": Chosen(None, "files in $CHAIRLIFT_CACHE, or in the user's data folder"),
        "batch-concurrency": Chosen(None, "half of max-rows"),
        "kv-group-size": Chosen(config.kv_group_size, "with kv-bits"),
        "kv-bits": Chosen(None, "not quantized"),
        "threads": Chosen(None, "one for each core that is free"),
        "max-context": Chosen(None, "the model's"),
        "replicas": Chosen(config.replicas, "one for each of devices, else 1"),
        "served-model-name": Chosen(None, "the model's own"),
        "tool-parser": Chosen(None, "as the model's chat template needs"),
        "think-tags": Chosen(None, "those in the model's vocabulary"),
        "chat-template": Chosen(None, "the model's own"),
    }


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:g}"


def _share(profile: DeviceProfile) -> str:
    return f"{profile.kv_share:.0%}"
