"""Functions of single tokens by ``llvm_elementwise``; each is None where it does not apply."""

from __future__ import annotations

import numpy as np

from chairlift.engine.cpu.compiled import llvm_kernel
from chairlift.engine.cpu.compiled.compiled_matmul import MIN_SHARED, run_shared
from chairlift.engine.cpu.compiled.llvm_kernel import Kernel
from chairlift.engine.cpu.gemm import Floats


def gated(name: str, gates: Floats, others: Floats) -> Floats | None:
    """The function ``swiglu`` or ``geglu`` of ``[tokens, numbers]``; rows need not be adjacent."""
    kernel = _kernel(gates, others)
    if kernel is None or gates.strides != others.strides or gates.shape[1] % kernel.lanes:
        return None
    result = np.empty(gates.shape, np.float32)
    run_shared(
        getattr(kernel, name),
        *(gates.ctypes.data, others.ctypes.data, result.ctypes.data),
        *(gates.shape[1], gates.strides[0] // gates.itemsize),
        parts=len(gates),
        is_shared=gates.size >= MIN_SHARED,
    )
    return result


def norm(x: Floats, weight: Floats, eps: Floats) -> Floats | None:
    """The root mean square norm of ``[..., numbers]``.

    Args:
        eps: ``[1]``, added to the mean.
    """
    x = np.ascontiguousarray(x)
    kernel = _kernel(x, weight)
    if kernel is None or x.shape[-1] % kernel.lanes:
        return None
    result = np.empty(x.shape, np.float32)
    addresses = (x.ctypes.data, weight.ctypes.data, eps.ctypes.data, result.ctypes.data)
    parts = x.size // x.shape[-1]
    run_shared(kernel.norm, *addresses, x.shape[-1], parts=parts, is_shared=x.size >= MIN_SHARED)
    return result


def rotated(x: Floats, cosines: Floats, sines: Floats) -> Floats | None:
    """Rotary embedding of ``[tokens, heads, dim]``, whose tokens need not be adjacent.

    Args:
        cosines, sines: ``[tokens, dim / 2]``.
    """
    kernel = _kernel(x, cosines, sines)
    tokens, heads, dim = x.shape
    if kernel is None or dim % (2 * kernel.lanes) or x.strides[1] != dim * x.itemsize:
        return None
    if not (cosines.flags.c_contiguous and sines.flags.c_contiguous):
        return None
    result = np.empty(x.shape, np.float32)
    run_shared(
        kernel.rotate,
        *(each.ctypes.data for each in (x, cosines, sines, result)),
        *(heads, dim // 2, x.strides[0] // x.itemsize),
        parts=tokens,
        is_shared=x.size >= MIN_SHARED,
    )
    return result


def _kernel(*arrays: Floats) -> Kernel | None:
    """The kernel, if there is one and it reads such arrays."""
    plain = all(
        each.dtype == np.float32 and each.strides[-1] == each.itemsize and each.size
        for each in arrays
    )
    return llvm_kernel.compiled() if plain else None
