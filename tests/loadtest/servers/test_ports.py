"""Ports of servers that start later: no other socket gets one by itself."""

from __future__ import annotations

import socket
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from chairlift.loadtest.servers import ports

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")


@linux
def test_the_system_gives_these_ports_to_no_socket() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    if first < 32_768:
        pytest.skip("this machine's range of such ports is wider than Linux's own")
    assert not any(first <= ports.free_port() <= last for _ in range(100))


def test_a_process_gets_a_port_once_and_no_taken_one() -> None:
    chosen = [ports.free_port() for _ in range(50)]
    assert len(set(chosen)) == 50
    following = chosen[-1] + 1 if chosen[-1] + 1 < ports._END else ports._FIRST
    with ExitStack() as stack:
        with suppress(OSError):  # another process has it
            stack.enter_context(socket.create_server(("127.0.0.1", following)))
        assert ports.free_port() != following


def test_no_free_port_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    port = ports.free_port()
    monkeypatch.setattr(ports, "_FIRST", port)
    monkeypatch.setattr(ports, "_END", port + 1)
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(OSError, match="no free port"),
    ):
        ports.free_port()


def test_a_port_that_a_server_left_is_free_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    port = ports.free_port()
    monkeypatch.setattr(ports, "_FIRST", port)
    monkeypatch.setattr(ports, "_END", port + 1)
    with (
        socket.create_server(("127.0.0.1", port)) as server,
        socket.create_connection(server.getsockname()),
    ):
        accepted, _ = server.accept()
        accepted.close()  # this side ends first, so its port waits for a minute
    assert ports.free_port() == port
