"""Ports of servers that start later: no other socket gets one by itself."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from chairlift.loadtest.servers import ports

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")


@linux
def test_the_system_gives_these_ports_to_no_socket() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not any(first <= ports.free_port() <= last for _ in range(100))


def test_a_process_gets_a_port_once_and_no_taken_one() -> None:
    chosen = [ports.free_port() for _ in range(50)]
    assert len(set(chosen)) == 50
    following = chosen[-1] + 1 if chosen[-1] + 1 < ports._END else ports._FIRST
    with socket.socket() as server:
        try:
            server.bind(("127.0.0.1", following))
        except OSError:
            pass  # another process has it
        else:
            server.listen()
        assert ports.free_port() != following


def test_no_free_port_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    port = ports.free_port()
    monkeypatch.setattr(ports, "_FIRST", port)
    monkeypatch.setattr(ports, "_END", port + 1)
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))
        server.listen()
        with pytest.raises(OSError, match="no free port"):
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
