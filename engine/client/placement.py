"""Divides a host among the replicas of a model: devices, memory, folders."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from chairlift.engine.config import EngineConfig
from chairlift.engine.errors import ModelError

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"

DeviceKind = Literal["cpu", "cuda", "metal"]


class ReplicaPlace(NamedTuple):
    """One replica's share of the host.

    Attributes:
        device: a name that replicas on the same device share.
        config: its engine's settings.
        environment: variables of its process.
    """

    device: str
    config: EngineConfig
    environment: Mapping[str, str]


def places(config: EngineConfig, kind: DeviceKind, visible: Sequence[str]) -> list[ReplicaPlace]:
    """A place for each replica.

    Sizes of the device's memory are divided among the replicas on it, sizes of the host's memory
    and disk among all. Each replica has a folder of its own in ``prefix_cache_dir``.

    Args:
        config: the settings of all replicas together.
        kind: the kind of MLX's default device.
        visible: the CUDA devices of this process, as CUDA_VISIBLE_DEVICES names them.

    Raises:
        ModelError: the machine has not what the settings ask for; the message is one line.
    """
    devices = _devices(config, kind, visible)
    sharing = Counter(devices)
    return [
        ReplicaPlace(
            device,
            _part(config, number, sharing[device]),
            {VISIBLE_DEVICES: device} if kind == "cuda" else {},
        )
        for number, device in enumerate(devices)
    ]


def visible_devices() -> list[str]:
    """The CUDA devices that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get(VISIBLE_DEVICES)
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    # Counting does not initialize a device, which would take its memory.
    import mlx.core as mx

    return [str(number) for number in range(mx.device_count(mx.gpu))]


def _devices(config: EngineConfig, kind: DeviceKind, visible: Sequence[str]) -> list[str]:
    """The device of each replica."""
    if kind != "cuda" and config.devices is not None:
        raise ModelError("--devices: MLX computes on no CUDA device here; leave it out")
    if kind == "metal" and config.replicas > 1:
        raise ModelError(
            f"--replicas {config.replicas}: this machine has one device (Metal), which one engine "
            "uses fully; replicas are for CUDA devices and CPUs"
        )
    if kind != "cuda":
        return [kind] * config.replicas
    if not visible:
        raise ModelError(f"--replicas {config.replicas}: {VISIBLE_DEVICES} is empty")
    if config.devices is None:
        return [visible[number % len(visible)] for number in range(config.replicas)]
    return [_device(name, visible) for name in config.devices]


def _device(name: str, visible: Sequence[str]) -> str:
    """A device by its number among the visible ones, or by its name there."""
    if name in visible and not name.isdigit():
        return name
    if name.isdigit() and int(name) < len(visible):
        return visible[int(name)]
    raise ModelError(
        f"--devices: there is no device {name!r}; this process sees {len(visible)} "
        f"({', '.join(visible)})"
    )


def _part(config: EngineConfig, number: int, sharing: int) -> EngineConfig:
    """The settings of one replica; ``sharing`` replicas are on its device."""
    folder = config.prefix_cache_dir
    return replace(
        config,
        memory_bytes=_divided(config.memory_bytes, sharing),
        kv_memory=_divided(config.kv_memory, sharing),
        prefix_cache_bytes=_divided(config.prefix_cache_bytes, sharing),
        prefix_cache_dir=None if folder is None else folder / f"replica-{number}",
        prefix_cache_dir_bytes=max(1, config.prefix_cache_dir_bytes // config.replicas),
        swap_memory=_divided(config.swap_memory, config.replicas),
        swap_dir_bytes=max(1, config.swap_dir_bytes // config.replicas),
        replicas=1,
        devices=None,
        host_engines=config.replicas,
        device_engines=sharing,
    )


def _divided(size: int | None, parts: int) -> int | None:
    return None if size is None else size // parts
