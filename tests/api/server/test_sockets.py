"""Which addresses two servers may have at a port, and how soon the second one is told."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from support.api.server_process import CHAIRLIFT, PATIENCE, linux, server_process, until
from support.tiny import tiny_model_dir

from chairlift.api.server import sockets
from chairlift.api.server.sockets import bind, bind_all
from chairlift.api.settings import ServerSettings

V4, V6 = {"127.0.0.1", "0.0.0.0", "127.0.0.2"}, {"::1", "::"}
BOTH = {"", "both"}


def has_ipv6() -> bool:
    try:
        bind("::1", 0).close()
    except OSError:
        return False
    return True


ipv6 = pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "both" is a name of two addresses, as localhost is elsewhere."""
    ask = socket.getaddrinfo

    def resolve(host: str | None, port: int, **options: object) -> list[object]:
        hosts = ("127.0.0.1", "::1") if host == "both" else (host,)
        return [found for each in hosts for found in ask(each, port, **options)]  # type: ignore

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


def addresses(host: str) -> set[str]:
    return {"": {"0.0.0.0", "::"}, "both": {"127.0.0.1", "::1"}}.get(host, {host})


def overlap(first: str, second: str) -> bool:
    """As the module says it."""
    return any(
        {one, other} <= family and (one == other or {one, other} & {"0.0.0.0", "::"})
        for one in addresses(first)
        for other in addresses(second)
        for family in (V4, V6)
    )


@pytest.fixture(params=["this system", "another system"])
def elsewhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Elsewhere what overlaps is looked for before; here the system would refuse it anyway."""
    if request.param == "another system":
        monkeypatch.setattr(sys, "platform", "other")
    return bool(request.param == "another system")


@ipv6
@linux
@pytest.mark.parametrize("first", sorted(V4 | V6 | BOTH))
@pytest.mark.parametrize("second", sorted(V4 | V6 | BOTH))
def test_what_may_be_beside_what(
    first: str, second: str, elsewhere: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if elsewhere and "127.0.0.2" in (first, second):
        pytest.skip("on Linux, looking for a server on 0.0.0.0 finds one on 127.0.0.1")
    with closing(bind(first, 0)) as one:
        port = one.sockets[0].getsockname()[1]
        assert {each.getsockname()[1] for each in one.sockets} == {port}
        assert {each.getsockname()[0] for each in one.sockets} == addresses(first)
        for each in one.sockets:
            each.listen()
        assert not caplog.records
        if overlap(first, second):
            with pytest.raises(OSError, match="Address already in use by a server on") as refused:
                bind(second, port)
            assert str(refused.value).startswith("cannot listen on ")
        else:
            with closing(bind(second, port)) as other:
                assert {each.getsockname()[1] for each in other.sockets} == {port}
                for each in other.sockets:
                    each.listen()
            (line,) = caplog.records
            assert f"port {port} is also in use by another server" in line.getMessage()


@pytest.mark.skipif(sys.platform == "linux", reason="Linux refuses by itself")
@pytest.mark.parametrize(
    ("first", "second"), [("127.0.0.1", "0.0.0.0"), ("0.0.0.0", "127.0.0.1"), ("::", "::1")]
)
def test_what_overlaps_is_refused_elsewhere_too(first: str, second: str) -> None:
    with closing(bind(first, 0)) as one:
        one.sockets[0].listen()
        with pytest.raises(OSError, match="cannot listen on"):
            bind(second, one.sockets[0].getsockname()[1])


def test_a_family_that_is_not_there_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    make = socket.socket

    def without_ipv6(family: int, *rest: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(97, "Address family not supported by protocol")
        return make(family, *rest)

    monkeypatch.setattr(sockets.socket, "socket", without_ipv6)
    with closing(bind("both", 0)) as bound:
        assert [each.getsockname()[0] for each in bound.sockets] == ["127.0.0.1"]
    with pytest.raises(OSError, match=r"cannot listen on \[::1\]:0: Address family not"):
        bind("::1", 0)


def test_nothing_stays_bound_when_one_of_two_cannot_be() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        used = taken.getsockname()[1]
        with closing(bind("127.0.0.1", 0)) as free:
            port = free.sockets[0].getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{used}"):
            bind_all(ServerSettings(port=port, metrics_port=used))
        with socket.socket() as plain:  # without SO_REUSEADDR
            plain.bind(("127.0.0.1", port))


@pytest.mark.parametrize("host", ["nowhere.invalid", "192.0.2.1", "a" * 70, "\0", "1.2.3"])
def test_a_host_that_is_none_is_one_line(host: str) -> None:
    with pytest.raises(OSError, match=r"^cannot listen on .*: ") as refused:
        bind(host, 0)
    assert "\n" not in str(refused.value)


# The real command


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("models"), "llama")


@pytest.mark.parametrize("flag", ["--port", "--metrics-port"])
def test_a_used_port_is_told_before_anything_slow_begins(flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [CHAIRLIFT, "serve", "no/model", "--port", "0", flag, str(port)],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
            env={**os.environ, "PYTHONPROFILEIMPORTTIME": "1"},
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    imported = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines()]
    said = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert done.returncode == 1
    assert said == [
        f"chairlift: error: cannot listen on 127.0.0.1:{port}: Address already in use by a server "
        "on this address, or on one that overlaps it"
    ]
    assert not {"mlx", "mlx.core", "mlx_lm", "transformers", "aiohttp", "zmq"} & {*imported}
    # Of a processor, since others may be using it, too: 0.4 s of it on a machine of 2024.
    spent = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    assert spent < 1.0


@ipv6
async def test_two_servers_on_one_port(tiny: Path, tmp_path: Path) -> None:
    """On two addresses both serve, and the second says so; at one of them only one does."""
    with server_process(tmp_path, tiny) as first:
        await first.healthy()
        port = int(first.url.rpartition(":")[2])
        with server_process(tmp_path, tiny, host="::1", port=port) as second:
            await second.healthy()
            assert "also in use by another server, on another address (IPv4)" in second.said
            assert "also in use" not in first.said


async def test_of_two_that_start_at_once_one_serves(tiny: Path, tmp_path: Path) -> None:
    with server_process(tmp_path, tiny) as first:
        port = int(first.url.rpartition(":")[2])
        with server_process(tmp_path, tiny, port=port) as second:
            ends = {first.process: first, second.process: second}
            await until(lambda: any(process.poll() is not None for process in ends))
            (loser,) = (s for p, s in ends.items() if p.poll() is not None)
            (winner,) = (s for p, s in ends.items() if p.poll() is None)
            await winner.healthy()
            assert loser.process.returncode == 1
            assert f"error: cannot listen on 127.0.0.1:{port}: " in loser.said
            assert "loading" not in loser.said
