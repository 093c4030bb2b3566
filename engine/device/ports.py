"""Ports for sockets that a library or another process opens later."""

from __future__ import annotations

import socket
import sys

LOOPBACK = "127.0.0.1"


class ReservedPorts:
    """Free ports of the loopback interface. The system gives them to nobody until ``release``.

    A process that listens on such a port meanwhile sets SO_REUSEADDR, as servers do. On Linux it
    may then listen beside a socket that is merely bound. Other systems forbid that, so a port there
    is just one that was free.

    Attributes:
        numbers: the ports.

    Raises:
        OSError: there are no free ports.
    """

    def __init__(self, count: int) -> None:
        self._sockets: list[socket.socket] = []
        try:
            for _ in range(count):
                self._sockets.append(holder := socket.socket())
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                holder.bind((LOOPBACK, 0))
            self.numbers: list[int] = [each.getsockname()[1] for each in self._sockets]
        except OSError:
            self.release()
            raise
        if sys.platform != "linux":
            self.release()

    def release(self) -> None:
        """Lets the system give the ports to others, unless something listens there by now."""
        for each in self._sockets:
            each.close()
        self._sockets.clear()
