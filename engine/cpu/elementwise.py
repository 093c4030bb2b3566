"""SwiGLU, GeGLU, rotary embedding and norms of few tokens on the CPU: compiled, or in NumPy."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np

from chairlift.engine.cpu.compiled import compiled_elementwise
from chairlift.engine.cpu.gemm import Floats
from chairlift.engine.cpu.program_builder import ProgramBuilder
from chairlift.engine.cpu.views import view

# Numbers that several passes process together, so that later passes find them in a core's L2.
BLOCK = 1 << 17


def swiglu(gates: Floats, others: Floats) -> Floats:
    """``silu(gates) * others``, for ``[tokens, numbers]``."""
    compiled = compiled_elementwise.gated("swiglu", gates, others)
    return _swiglu(gates, others) if compiled is None else compiled


def geglu(gates: Floats, others: Floats) -> Floats:
    """``gelu_approx(gates) * others``, for ``[tokens, numbers]``."""
    compiled = compiled_elementwise.gated("geglu", gates, others)
    return _geglu(gates, others) if compiled is None else compiled


def rotated(x: Floats, cosines: Floats, sines: Floats) -> Floats:
    """Rotary embedding of ``[tokens, heads, dim]``; ``cosines`` and ``sines`` of half of them."""
    compiled = compiled_elementwise.rotated(x, cosines, sines)
    if compiled is not None:
        return compiled
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    cosines, sines = cosines[:, None], sines[:, None]
    result = np.empty(x.shape, np.float32)
    np.multiply(first, cosines, out=result[..., :half])
    result[..., :half] -= second * sines
    np.multiply(first, sines, out=result[..., half:])
    result[..., half:] += second * cosines
    return result


def _swiglu(gates: Floats, others: Floats) -> Floats:
    result = np.empty(gates.shape, np.float32)
    tokens = max(1, BLOCK // gates.shape[1])
    for start in range(0, len(gates), tokens):
        block = slice(start, start + tokens)
        part = result[block]
        np.negative(gates[block], out=part)
        with np.errstate(over="ignore"):  # a gate of -1e3 gives 0, by way of infinity
            np.exp(part, out=part)
        part += 1
        np.divide(gates[block], part, out=part)
        part *= others[block]
    return result


def _geglu(gates: Floats, others: Floats) -> Floats:
    result = np.empty(gates.shape, np.float32)
    tokens = max(1, BLOCK // gates.shape[1])
    for start in range(0, len(gates), tokens):
        block = slice(start, start + tokens)
        gate, part = gates[block], result[block]
        with np.errstate(over="ignore"):  # the tangent of infinity is 1
            np.multiply(gate, gate, out=part)
            part *= np.float32(0.044715)
            part += 1
            part *= gate
            part *= np.float32(math.sqrt(2 / math.pi))
            np.tanh(part, out=part)
        part += 1
        part *= gate
        part *= others[block]
        part *= np.float32(0.5)
    return result


class HostNorm:
    """The root mean square norm of a layer, of few tokens.

    Args:
        layer: has an ``eps``. Its weights are measured, because some files add 1 to them.
        dims: the numbers of a token.
    """

    def __init__(self, layer: Any, dims: int) -> None:
        ones = view(layer(mx.ones((1, dims)))).reshape(dims)
        self._eps = np.array([layer.eps], np.float32)
        self._weight: Floats = ones * np.sqrt(1 + self._eps)

    def __call__(self, x: Floats) -> Floats:
        """``[..., dims]``, in new memory."""
        compiled = compiled_elementwise.norm(x, self._weight, self._eps)
        if compiled is not None:
            return compiled
        scale = np.einsum("...i,...i->...", x, x)[..., None]
        scale /= np.float32(x.shape[-1])
        scale += self._eps
        np.sqrt(scale, out=scale)
        result: Floats = x / scale
        result *= self._weight
        return result

    def build(self, build: ProgramBuilder, x: Floats, into: Floats) -> Floats:
        """See ``compiled_elementwise.norm``.

        Raises:
            NoProgramError: see ``ProgramBuilder``.
        """
        return build.norm(x, self._weight, self._eps, into)
