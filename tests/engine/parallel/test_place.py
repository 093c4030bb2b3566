"""Places of ranks: ports, devices, host files, and the commands that start them."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest

from chairlift.engine.config import EngineConfig
from chairlift.engine.errors import ModelError
from chairlift.engine.messages.speculative_config import SpeculativeConfig
from chairlift.engine.parallel.followers import command
from chairlift.engine.parallel.hostfile import read_hostfile
from chairlift.engine.parallel.place import (
    choose_device,
    environment,
    local_places,
    places_of,
    reserve_ports,
)

DRAFT_MODEL = SpeculativeConfig("draft_model", "x")


def written(path: Path, value: Any) -> Path:
    (path / "hosts.json").write_text(value if isinstance(value, str) else json.dumps(value))
    return path / "hosts.json"


@pytest.mark.parametrize("size", [2, 5])
def test_ranks_on_this_machine_have_ports_of_their_own(size: int) -> None:
    reserved = reserve_ports(size)
    reserved.release()
    places = local_places(size, reserved.numbers)
    assert [(p.rank, p.local_rank, p.local_size, p.size) for p in places] == [
        (rank, rank, size, size) for rank in range(size)
    ]
    assert len({place.ring for place in places}) == len({p.coordinator for p in places}) == 1
    addresses = [address for node in places[0].ring for address in node]
    ports = {int(a.removeprefix("127.0.0.1:")) for a in addresses} | {places[0].coordinator[1]}
    assert len(ports) == size + 1


def test_a_machine_without_free_ports_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def bind(holder: socket.socket, address: object) -> None:
        raise OSError("Address already in use")

    monkeypatch.setattr(socket, "socket", type("Socket", (socket.socket,), {"bind": bind}))
    with pytest.raises(ModelError, match="no free ports for 2 ranks: Address already in use"):
        reserve_ports(2)


@pytest.mark.parametrize(
    ("visible", "chosen"),
    [(None, ["0", "1", "2"]), ("5,3,GPU-7", ["5", "3", "GPU-7"]), ("4,6", ["4", "6", "-1"])],
)
def test_each_rank_sees_one_device(
    visible: str | None, chosen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    for place in local_places(3, range(4)):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        choose_device(place)
        seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
    assert seen == chosen


def test_a_host_file_places_ranks_by_host(tmp_path: Path) -> None:
    hosts = [{"ssh": name, "ips": [ip]} for name, ip in (("a", "10.0.0.1"), ("b", "10.0.0.2"))]
    path = written(tmp_path, {"hosts": [hosts[0]] * 2 + [hosts[1]] * 2, "envs": ["A=b=c"]})
    places = places_of(read_hostfile(path, 4))
    assert [(p.host, p.local_rank, p.local_size) for p in places] == [
        *((None, 0, 2), (None, 1, 2)),
        *(("b", 0, 2), ("b", 1, 2)),
    ]
    assert [node[0].partition(":")[0] for node in places[0].ring] == ["10.0.0.1"] * 2 + [
        "10.0.0.2"
    ] * 2
    assert {place.coordinator[0] for place in places} == {"10.0.0.1"}
    assert places[3].variables == {"A": "b=c"}
    assert command(places[1])[-1] == str(os.getpid())
    assert command(places[2])[:4] == ["ssh", "-o", "BatchMode=yes", "b"]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("no JSON", "malformed"),
        ([{"ssh": "a"}], "lists 1 hosts"),
        ([{"ssh": "a"}, {"ips": []}], "ssh"),
        ([{"ssh": "a"}, {"ssh": "-oProxyCommand=x"}], "not the name of a host"),
        ({"hosts": [{"ssh": "a"}] * 2, "backend": "mpi"}, "'mpi' is none of"),
        ({"hosts": [{"ssh": "a"}] * 2, "backend": "jaccl"}, "RDMA"),
        ({"hosts": [{"ssh": "a"}] * 2, "envs": ["A"]}, "NAME=value"),
    ],
)
def test_a_bad_host_file_is_refused(tmp_path: Path, content: Any, why: str) -> None:
    with pytest.raises(ModelError, match=why) as error:
        read_hostfile(written(tmp_path, content), 2)
    assert "\n" not in str(error.value)


def test_the_environment_of_each_backend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rdma = [[None, "rdma1"], ["rdma0", None]]
    hosts = [{"ssh": str(i), "ips": [f"10.0.0.{i}"], "rdma": rdma[i]} for i in range(2)]
    place = places_of(read_hostfile(written(tmp_path, hosts), 2))[1]
    monkeypatch.setattr(os, "environ", {"NCCL_P2P_DISABLE": "1"})
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    address, port = place.coordinator
    with environment(place, "ring"):
        ring = json.loads(Path(os.environ["MLX_HOSTFILE"]).read_text())
        assert ring == [list(node) for node in place.ring]
        # A rank that is killed while it joins leaves no file.
        assert not list(temporary.iterdir())
    assert not Path(os.environ["MLX_HOSTFILE"]).exists()
    with environment(place, "nccl"):
        assert os.environ["NCCL_HOST_IP"] == address
        assert os.environ["NCCL_PORT"] == str(port)
        assert os.environ["NCCL_P2P_DISABLE"] == "1"
        assert (os.environ["MLX_RANK"], os.environ["MLX_WORLD_SIZE"]) == ("1", "2")
    with environment(place, "jaccl-ring"):
        assert json.loads(Path(os.environ["MLX_IBV_DEVICES"]).read_text()) == rdma
        assert os.environ["MLX_JACCL_COORDINATOR"] == f"{address}:{port}"


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"tensor_parallel_size": 0}, "1 to"),
        ({"hostfile": Path("x")}, "hostfile needs"),
        ({"tensor_parallel_size": 2, "prefix_cache_dir": Path("x")}, "prefix-cache-dir"),
        ({"tensor_parallel_size": 2, "swap_dir": Path("x")}, "swap-dir"),
        ({"tensor_parallel_size": 2, "speculative": DRAFT_MODEL}, "draft model"),
    ],
)
def test_settings_that_cannot_be_combined(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        EngineConfig(**settings)
