"""The size of the CUDA graphs in which MLX launches operations."""

from __future__ import annotations

import os
import sys

_VARIABLE = "MLX_MAX_MB_PER_BUFFER"
# More than any device's memory.
_NO_LIMIT = "1000000"


def lift_graph_limit() -> None:
    """Lets MLX's graphs end by their number of operations alone, unless the environment says more.

    MLX also ends a graph once its operations have read so many megabytes. It counts the whole pool
    of pages for each layer's attention, so every layer would be a graph of its own. Call it before
    MLX is imported. MLX for Metal has a variable of the same name, which stays as it is.
    """
    if sys.platform == "linux":
        os.environ.setdefault(_VARIABLE, _NO_LIMIT)
