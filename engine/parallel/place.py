"""The place of each rank, and the environment in which MLX's distributed layer finds the others."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Literal

import msgspec

from chairlift.engine.device.ports import LOOPBACK, ReservedPorts
from chairlift.engine.errors import ModelError
from chairlift.engine.parallel.hostfile import Host, Hostfile

Backend = Literal["ring", "nccl", "jaccl", "jaccl-ring"]
# The first port of ranks on several hosts, where a free one cannot be looked up: as mlx.launch.
_FIRST_PORT = 32323


class RankPlace(msgspec.Struct, frozen=True):
    """One rank's place: its host, and the addresses of all ranks.

    Attributes:
        rank, size: this rank, and the number of ranks.
        local_rank, local_size: the same among the ranks on this host.
        host: the name for ssh; None: this machine.
        backend: of MLX's distributed layer; None: NCCL on CUDA, a ring elsewhere.
        ring: the addresses ``host:port`` at which each rank listens.
        coordinator: the address at which rank 0 listens, for NCCL and JACCL.
        rdma: JACCL's devices, from each rank to each.
        variables: further environment variables.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str | None = None
    backend: Backend | None = None
    ring: tuple[tuple[str, ...], ...] = ()
    coordinator: tuple[str, int] = (LOOPBACK, 0)
    rdma: tuple[tuple[str | list[str] | None, ...], ...] = ()
    variables: dict[str, str] = {}


def reserve_ports(size: int) -> ReservedPorts:
    """The ports for ``local_places``. Rank 0 keeps them for as long as it runs.

    Raises:
        ModelError: there are no free ports.
    """
    try:
        return ReservedPorts(size + 1)
    except OSError as error:
        raise ModelError(f"no free ports for {size} ranks: {error}") from error


def local_places(size: int, ports: Sequence[int]) -> list[RankPlace]:
    """The places of ``size`` ranks on this machine.

    Args:
        ports: one for each rank in a ring, and one for rank 0 with NCCL; see ``reserve_ports``.
    """
    *ring_ports, coordinator = ports
    ring = tuple((f"{LOOPBACK}:{port}",) for port in ring_ports)
    return [
        RankPlace(rank, size, rank, size, ring=ring, coordinator=(LOOPBACK, coordinator))
        for rank in range(size)
    ]


def places_of(hostfile: Hostfile) -> list[RankPlace]:
    """The places of the ranks of a host file, whose first host is this machine."""
    hosts = hostfile.hosts
    first = hosts[0].ips[0] if hosts[0].ips else hosts[0].ssh
    backend = hostfile.backend
    ports = iter(range(_FIRST_PORT, 65536))
    ring = tuple(tuple(f"{ip}:{next(ports)}" for ip in (host.ips or (host.ssh,))) for host in hosts)
    coordinator = (first, next(ports))
    return [
        RankPlace(
            rank,
            len(hosts),
            local_rank=_count(hosts[:rank], host),
            local_size=_count(hosts, host),
            host=None if host.ssh == hosts[0].ssh else host.ssh,
            backend=backend,
            ring=ring,
            coordinator=coordinator,
            rdma=tuple(each.rdma for each in hosts),
            variables=hostfile.variables,
        )
        for rank, host in enumerate(hosts)
    ]


def choose_device(place: RankPlace) -> None:
    """Shows this process only its own CUDA device. Call it before MLX is imported.

    The devices are those that ``CUDA_VISIBLE_DEVICES`` lists, else all, in their order.
    """
    os.environ |= place.variables
    if place.size > 1:
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        known = place.local_rank < len(visible)
        os.environ["CUDA_VISIBLE_DEVICES"] = (
            visible[place.local_rank] if known else str(place.local_rank if not visible else -1)
        )


@contextmanager
def environment(place: RankPlace, backend: Backend) -> Iterator[None]:
    """A context with the variables by which MLX finds the other ranks while they join.

    Variables of NCCL beside the address of rank 0 stay as they are.
    """
    address, port = place.coordinator
    os.environ |= {"MLX_RANK": str(place.rank), "MLX_WORLD_SIZE": str(place.size)}
    # A file without a name: nothing is left if this process is killed meanwhile.
    with tempfile.TemporaryFile("w+", encoding="utf-8") as file:
        match backend:
            case "nccl":
                os.environ |= {"NCCL_HOST_IP": address, "NCCL_PORT": str(port)}
            case "ring":
                os.environ["MLX_HOSTFILE"] = _written(file, place.ring)
            case _:
                os.environ |= {
                    "MLX_JACCL_COORDINATOR": f"{address}:{port}",
                    "MLX_IBV_DEVICES": _written(file, place.rdma),
                }
                if backend == "jaccl-ring":
                    os.environ["MLX_JACCL_RING"] = "1"
        yield


def _written(file: IO[str], value: object) -> str:
    """The path by which this process may read the file once."""
    json.dump(value, file)
    file.seek(0)
    return f"/dev/fd/{file.fileno()}"


def _count(hosts: tuple[Host, ...], host: Host) -> int:
    return sum(other.ssh == host.ssh for other in hosts)
