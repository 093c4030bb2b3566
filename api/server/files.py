"""Divides the process's open files between client connections and its other files."""

from __future__ import annotations

import resource
import sys

# Files reserved for restarting the engine process (a folder, its black box, the socket, pipes), for
# worker processes, and for reloading keys and certificates.
RESERVED = 32


def first_reserved_file() -> int:
    """The lowest file number that no client connection may use, by the current RLIMIT_NOFILE."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    return limit - min(RESERVED, limit // 4)
