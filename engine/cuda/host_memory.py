"""Memory that the host writes and the device reads.

MLX allocates it by ``cudaMallocManaged``, whose pages move to whichever side touches them. So the
first kernel of each step waited for page faults, and so did the host when it wrote the numbers of
the next step.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger(__name__)

# From CUDA's driver API: ``CUmem_advise``, and the number of the host among devices.
_PREFERRED_LOCATION, _ACCESSED_BY = 3, 5
_HOST = -1
# MLX's default device.
_DEVICE = 0


def keep_on_host(numbers: NDArray[np.int32]) -> None:
    """Keeps the memory of an array of MLX's on the host, where the device reads it over the bus.

    If the driver refuses, the memory moves as before.
    """
    advise = _advise()
    if advise is None:
        return
    for advice, where in ((_PREFERRED_LOCATION, _HOST), (_ACCESSED_BY, _DEVICE)):
        if error := advise(numbers.ctypes.data, numbers.nbytes, advice, where):
            log.debug("CUDA does not keep memory on the host: error %d", error)
            return


@functools.cache
def _advise() -> Callable[[int, int, int, int], int] | None:
    """CUDA's ``cuMemAdvise``; None without a driver."""
    try:
        function = ctypes.CDLL("libcuda.so.1").cuMemAdvise
    except (OSError, AttributeError) as error:
        log.debug("CUDA does not keep memory on the host: %s", error)
        return None
    function.argtypes = [ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int, ctypes.c_int]
    function.restype = ctypes.c_int
    call: Callable[[int, int, int, int], int] = function
    return call
