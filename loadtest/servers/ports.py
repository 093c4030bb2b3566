"""Ports for servers that start later than their port is chosen."""

from __future__ import annotations

import itertools
import os
import socket

# Below the ports that Linux (from 32,768) and macOS (from 49,152) give to sockets by themselves,
# which might take a port before its server listens; above those of Ray's workers (to 19,999).
_FIRST, _END = 20_000, 32_768
# Processes that choose ports at the same time start this far apart, by their process ids.
_STRIDE = 997

_tried = itertools.count()


def free_port() -> int:
    """A loopback port that is free now. This process does not choose it again soon.

    Raises:
        OSError: all ports are taken.
    """
    for _ in range(_END - _FIRST):
        port = _FIRST + (os.getpid() * _STRIDE + next(_tried)) % (_END - _FIRST)
        with socket.socket() as probe:
            # As a server does: connections that ended there lately do not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no free port on 127.0.0.1")
