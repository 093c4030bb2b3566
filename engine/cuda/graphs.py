"""Whether MLX launches operations in CUDA graphs, of which size, and how many it keeps."""

from __future__ import annotations

import os
import sys

# More than any device's memory.
_NO_LIMIT = "1000000"
_LIMITS = {
    # MLX also ends a graph once its operations have read this many megabytes. It counts the whole
    # pool of pages for each layer's attention, so every layer would be a graph of its own.
    "MLX_MAX_MB_PER_BUFFER": _NO_LIMIT,
    # The host builds up to ten graphs ahead of the device, and their arrays are freed when a graph
    # has run. With 32 operations these were a whole step: 8.7 GB with 1,280 tokens of an 8B model,
    # more than MLX may keep, so that steps waited 60 ms for memory. With 12 it is 3.7 GB; with 6
    # and 8 throughput falls. The device also begins with a step when its first graph is complete.
    "MLX_MAX_OPS_PER_BUFFER": "12",
    # MLX keeps graphs that it has built, by their operations, because a new one takes milliseconds.
    # Its default is 400; these have fewer operations each, and steps of each size have their own.
    "MLX_CUDA_GRAPH_CACHE_SIZE": "2048",
    # By default MLX raises an error once it has built twice as many graphs, or plans of
    # convolutions or attention, as a cache holds, in all its life. A server builds new ones for as
    # long as it meets new shapes, so it would end after hours.
    "MLX_ENABLE_CACHE_THRASHING_CHECK": "0",
}
# MLX cannot use a graph again that contains a sum over devices: it builds one for each sum of each
# step, 57 microseconds on the host, and such a model has two sums a layer. Without graphs a step of
# an 8B model on two H100s took 7.7 ms instead of 11.2.
_DIVIDED = {"MLX_USE_CUDA_GRAPHS": "0"}


def set_graph_limits(ranks: int = 1) -> None:
    """Sets MLX's variables to these limits, except for variables that are set already.

    Call it before MLX is imported. MLX for Metal has variables of the same names, which stay as
    they are.

    Args:
        ranks: the number of processes that compute a model together; with several, operations are
            launched without graphs.
    """
    if sys.platform == "linux":
        for variable, limit in (_LIMITS | (_DIVIDED if ranks > 1 else {})).items():
            os.environ.setdefault(variable, limit)
