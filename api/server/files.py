"""How many of the process's files clients' connections may take."""

from __future__ import annotations

import resource
import sys

# For an engine process that is started again (a folder, its black box, the socket, pipes), the
# process that tries grammars, and keys and certificates that are read again.
RESERVED = 32


def most_for_connections() -> int:
    """The first file number that is no client's, by the limit as it is now (RLIMIT_NOFILE)."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    return limit - min(RESERVED, limit // 4)
