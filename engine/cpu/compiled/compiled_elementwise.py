"""Functions of single tokens by ``llvm.elementwise``; each is None where it does not apply.

They compute at once, into new memory. With ``run``, they become part of a program and compute
``into`` memory that stays: so do the arrays that they read.
"""

from __future__ import annotations

import numpy as np

from chairlift.engine.cpu.compiled.jobs import MIN_SHARED, Run, run_shared
from chairlift.engine.cpu.compiled.llvm import kernel as llvm_kernel
from chairlift.engine.cpu.compiled.llvm.kernel import Kernel
from chairlift.engine.cpu.gemm import Floats


def gated(
    name: str,
    gates: Floats,
    others: Floats,
    into: Floats | None = None,
    run: Run = run_shared,
) -> Floats | None:
    """The function ``swiglu`` or ``geglu`` of ``[tokens, numbers]``; rows need not be adjacent.

    Args:
        into: contiguous.
    """
    kernel = _kernel(gates, others)
    if kernel is None or gates.strides != others.strides or gates.shape[1] % kernel.lanes:
        return None
    result = np.empty(gates.shape, np.float32) if into is None else into
    run(
        getattr(kernel, name),
        *(gates.ctypes.data, others.ctypes.data, result.ctypes.data),
        *(gates.shape[1], gates.strides[0] // gates.itemsize),
        parts=len(gates),
        is_shared=gates.size >= MIN_SHARED,
    )
    return result


def norm(
    x: Floats, weight: Floats, eps: Floats, into: Floats | None = None, run: Run = run_shared
) -> Floats | None:
    """The root mean square norm of the last axis.

    Args:
        x: ``[..., numbers]``; with ``into``, ``[tokens, numbers]`` or ``[tokens, heads, numbers]``,
            whose tokens need not be adjacent.
        eps: ``[1]``, added to the mean.
        into: as ``x``; may be ``x``.
    """
    numbers = x.shape[-1]
    if into is None:
        result = np.empty(x.shape, np.float32)
        read, written = np.ascontiguousarray(x).reshape(-1, numbers), result.reshape(-1, numbers)
    else:
        read, written, result = x, into, into
    kernel = _kernel(read, weight)
    if kernel is None or numbers % kernel.lanes or not (_adjacent(read) and _adjacent(written)):
        return None
    run(
        kernel.norm,
        *(each.ctypes.data for each in (read, weight, eps, written)),
        *(numbers, read[0].size // numbers),
        *(each.strides[0] // each.itemsize for each in (read, written)),
        parts=read.size // numbers,
        is_shared=read.size >= MIN_SHARED,
    )
    return result


def added(x: Floats, y: Floats, into: Floats, run: Run) -> Floats | None:
    """``x + y``.

    Args:
        x: ``[tokens, numbers]``, whose tokens need not be adjacent.
        y: as ``x``, or ``[numbers]``.
        into: as ``x``; may be ``x``.
    """
    others = np.broadcast_to(y, x.shape)
    kernel = _kernel(x, others)
    if kernel is None or x.shape[1] % kernel.lanes:
        return None
    run(
        kernel.add,
        *(x.ctypes.data, y.ctypes.data, into.ctypes.data, x.shape[1]),
        *(each.strides[0] // each.itemsize for each in (x, others, into)),
        parts=len(x),
        is_shared=x.size >= MIN_SHARED,
    )
    return into


def rotated(
    x: Floats,
    cosines: Floats,
    sines: Floats,
    into: Floats | None = None,
    run: Run = run_shared,
) -> Floats | None:
    """Rotary embedding of ``[tokens, heads, dim]``, whose tokens need not be adjacent.

    Args:
        cosines, sines: ``[tokens, dim / 2]``.
        into: contiguous.
    """
    kernel = _kernel(x, cosines, sines)
    tokens, heads, dim = x.shape
    if kernel is None or dim % (2 * kernel.lanes) or not _adjacent(x):
        return None
    if not (cosines.flags.c_contiguous and sines.flags.c_contiguous):
        return None
    result = np.empty(x.shape, np.float32) if into is None else into
    run(
        kernel.rotate,
        *(each.ctypes.data for each in (x, cosines, sines, result)),
        *(heads, dim // 2, x.strides[0] // x.itemsize),
        parts=tokens,
        is_shared=x.size >= MIN_SHARED,
    )
    return result


def _adjacent(x: Floats) -> bool:
    """Whether the heads of each token are adjacent, if it has any."""
    return x.ndim == 2 or x.strides[1] == x.shape[2] * x.itemsize


def _kernel(*arrays: Floats) -> Kernel | None:
    """The kernel, if there is one and it reads such arrays."""
    plain = all(
        each.dtype == np.float32 and each.strides[-1] == each.itemsize and each.size
        for each in arrays
    )
    return llvm_kernel.compiled() if plain else None
