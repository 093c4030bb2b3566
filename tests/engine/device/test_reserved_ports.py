"""Reserved ports: others cannot get them before whoever they are meant for listens there."""

from __future__ import annotations

import errno
import socket
import sys

import pytest

from chairlift.engine.device.ports import LOOPBACK, ReservedPorts

ANY = "0.0.0.0"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems only choose free ports")
@pytest.mark.parametrize("address", [LOOPBACK, ANY])
def test_nobody_else_gets_a_reserved_port(address: str) -> None:
    ports = ReservedPorts(3)
    assert len(set(ports.numbers)) == 3
    for number in ports.numbers:
        with socket.socket() as other, pytest.raises(OSError) as caught:
            other.bind((address, number))
        assert caught.value.errno == errno.EADDRINUSE
    ports.release()
    for number in ports.numbers:
        with socket.socket() as other:
            other.bind((address, number))


@pytest.mark.parametrize("address", [LOOPBACK, ANY])  # MLX's ring and its NCCL
@pytest.mark.parametrize(
    "options", [[socket.SO_REUSEADDR, socket.SO_REUSEPORT], [socket.SO_REUSEADDR]]
)
def test_whom_it_is_meant_for_may_listen(address: str, options: list[int]) -> None:
    ports = ReservedPorts(1)
    with socket.socket() as server:
        for option in options:
            server.setsockopt(socket.SOL_SOCKET, option, 1)
        server.bind((address, *ports.numbers))
        server.listen(1)
        with socket.create_connection((LOOPBACK, *ports.numbers)) as client:
            accepted, _ = server.accept()
            accepted.close()
            assert client.recv(1) == b""
    ports.release()


def test_no_free_port_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[socket.socket] = []

    class Socket(socket.socket):
        def bind(self, address: object) -> None:
            if len(closed) == 2:
                raise OSError("no port")
            closed.append(self)

    monkeypatch.setattr(socket, "socket", Socket)
    with pytest.raises(OSError, match="no port"):
        ReservedPorts(3)
    assert all(each.fileno() == -1 for each in closed)
