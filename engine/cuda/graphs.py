"""The size of the CUDA graphs in which MLX launches operations."""

from __future__ import annotations

import os
import sys

# More than any device's memory.
_NO_LIMIT = "1000000"
_LIMITS = {
    # MLX also ends a graph once its operations have read so many megabytes. It counts the whole
    # pool of pages for each layer's attention, so every layer would be a graph of its own.
    "MLX_MAX_MB_PER_BUFFER": _NO_LIMIT,
    # The device begins with a step when its first graph is complete: with 32 operations instead of
    # MLX's 100, which matters for steps with drafts. More graphs cost the host nothing measurable.
    "MLX_MAX_OPS_PER_BUFFER": "32",
}


def set_graph_limits() -> None:
    """Lets MLX's graphs end after some operations, unless the environment says more.

    Call it before MLX is imported. MLX for Metal has variables of the same names, which stay as
    they are.
    """
    if sys.platform == "linux":
        for variable, limit in _LIMITS.items():
            os.environ.setdefault(variable, limit)
