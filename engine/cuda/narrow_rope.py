"""Rotary embedding of few numbers of each head, which MLX's CUDA kernel cannot be launched for.

A thread of that kernel turns one pair of numbers at one position, in up to four heads. MLX makes
blocks of up to 1,024 threads. If there are fewer than 16 pairs times positions, it fills a block
with heads and sequences, of which CUDA allows 64. With 128 the launch fails:
"cudaGraphAddKernelNode(&node, graph_, NULL, 0, &params) failed: invalid argument".

The tokens of a step are sequences of one position. So the steps of models that turn fewer than 32
numbers of a head would fail from some size on. StableLM-3B turns 20 of 80 numbers in 32 heads, so
that 16 tokens are too many; Pythia turns 16 of 64.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx

# Binary logarithms: of the pairs times positions with which every block is valid, and of the groups
# of heads with which a block of fewer is not.
_ENOUGH = 4
_TOO_MANY = 7
# Heads of a group, which a thread turns.
_HEADS = 4

_rope = mx.fast.rope


def install() -> None:
    """Replaces ``mx.fast.rope``, which all rotary embeddings call, by ``rope``."""
    mx.fast.rope = rope  # type: ignore[assignment]


def rope(x: mx.array, dims: int, **settings: Any) -> mx.array:
    """Rotates ``x`` like ``mx.fast.rope``, with further positions where the launch needs them.

    Args:
        x: ``[sequences, ..., positions, numbers of a head]``.
        dims: the numbers of each head that are turned.
        settings: the other arguments of ``mx.fast.rope``.
    """
    length = x.shape[-2]
    missing = _positions(x.shape, dims) - length
    if missing <= 0:
        return _rope(x, dims, **settings)
    padding = [(0, 0)] * (x.ndim - 2) + [(0, missing), (0, 0)]
    return _rope(mx.pad(x, padding), dims, **settings)[..., :length, :]


def _positions(shape: tuple[int, ...], dims: int) -> int:
    """The least number of positions with which the kernel can be launched."""
    sequences, *heads, length, _ = shape
    groups = sequences * -(-math.prod(heads) // _HEADS)
    pairs = _log(dims // 2)
    if pairs + _log(length) >= _ENOUGH or _log(groups) < _TOO_MANY:
        return length
    return 1 << (_ENOUGH - pairs)


def _log(number: int) -> int:
    return max(1, number).bit_length() - 1
