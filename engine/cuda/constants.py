"""Numbers that kernels read in the device's own memory."""

from __future__ import annotations

import functools

import mlx.core as mx

# MLX keeps smaller arrays in memory that it shares with the CPU.
_PLACES = 16


@functools.cache
def constant(value: float, dtype: mx.Dtype) -> mx.array:
    """``[_PLACES]``, each of them ``value``, computed by the device.

    An array that the CPU has written lies in memory that both share. While the CPU writes other
    arrays beside it, each read by a GPU crosses the bus, which takes longer than most kernels.
    """
    numbers = mx.full((_PLACES,), value, dtype)
    mx.eval(numbers)
    return numbers
