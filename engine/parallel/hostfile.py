"""Reads a host file in mlx.launch's JSON format: the hosts of the ranks, in their order."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, cast

import msgspec

from chairlift.engine.errors import ModelError

_NAMES = ("ring", "nccl", "jaccl", "jaccl-ring")


class Host(msgspec.Struct, frozen=True):
    """The host of one rank; a host with several ranks is listed once for each.

    Attributes:
        ssh: its name for ssh.
        ips: its addresses for the other ranks.
        rdma: for JACCL: its RDMA device to each rank; null for itself.
    """

    ssh: str
    ips: tuple[str, ...] = ()
    rdma: tuple[str | list[str] | None, ...] = ()


class Hostfile(msgspec.Struct, frozen=True):
    """A host file.

    Attributes:
        envs: environment variables of all ranks, each as ``NAME=value``.
        backend: of MLX's distributed layer; None: chosen by the device.
    """

    hosts: tuple[Host, ...]
    envs: tuple[str, ...] = ()
    backend: Literal["ring", "nccl", "jaccl", "jaccl-ring"] | None = None

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables by name."""
        return dict(cast("tuple[str, str]", tuple(each.split("=", 1))) for each in self.envs)


class _Raw(msgspec.Struct):
    hosts: tuple[Host, ...]
    envs: tuple[str, ...] = ()
    backend: str = ""


def read_hostfile(path: Path, size: int) -> Hostfile:
    """Reads the host file of ``size`` ranks: a list of hosts, or an object with ``hosts``.

    Raises:
        ModelError: it cannot be read, or does not list ``size`` usable hosts.
    """
    try:
        read: _Raw | list[Host] = msgspec.json.decode(path.read_bytes(), type=_Raw | list[Host])
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(f"--hostfile {path}: {error}") from error
    raw = read if isinstance(read, _Raw) else _Raw(tuple(read))
    if len(raw.hosts) != size:
        raise ModelError(
            f"--hostfile {path} lists {len(raw.hosts)} hosts, and --tensor-parallel-size is {size}"
        )
    if raw.backend not in ("", *_NAMES):
        raise ModelError(f"--hostfile {path}: backend {raw.backend!r} is none of {_NAMES}")
    for host in raw.hosts:
        # ssh would take a name that begins with "-" as an option.
        if not host.ssh or host.ssh.startswith("-"):
            raise ModelError(f"--hostfile {path}: {host.ssh!r} is not the name of a host")
        if raw.backend.startswith("jaccl") and len(host.rdma) != size:
            raise ModelError(f"--hostfile {path}: {host.ssh} has not an RDMA device for each rank")
    if bad := next((each for each in raw.envs if "=" not in each), None):
        raise ModelError(f"--hostfile {path}: {bad!r} is not NAME=value")
    backend = raw.backend or None
    return Hostfile(raw.hosts, raw.envs, cast("Literal['ring', 'nccl'] | None", backend))
