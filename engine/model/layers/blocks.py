"""Cuts the tokens of a recurrent layer into blocks, which are computed with matrix products.

Arrays of blocks are ``[blocks, rows, groups, heads of a group, tokens of a block, ...]``, in
float32. The heads of a group share their keys. A token behind the last one is all zeros.
"""

from __future__ import annotations

import mlx.core as mx

# The logarithm of the smallest decay of one token: less than float32 can add to what follows. A sum
# over a block stays exact enough for the differences that are needed.
MIN_LOG = -20.0


def block_size(tokens: int, least: int, most: int) -> int:
    """The smallest power of 2 that holds all tokens, between two others."""
    return min(max(least, 1 << (tokens - 1).bit_length()), most)


def cut(x: mx.array, block: int, groups: int) -> mx.array:
    """``[rows, tokens, heads, ...]`` → blocks of this many tokens."""
    rows, tokens, heads = x.shape[:3]
    x = x.astype(mx.float32)
    if fill := -tokens % block:
        x = mx.pad(x, [(0, 0), (0, fill), *[(0, 0)] * (x.ndim - 2)])
    x = x.reshape(rows, -1, block, groups, heads // groups, *x.shape[3:])
    return x.transpose(1, 0, 3, 4, 2, *range(5, x.ndim))


def joined(blocks: list[mx.array], tokens: int) -> mx.array:
    """Blocks ``[rows, groups, heads of a group, tokens of a block, dim]`` → all tokens.

    Returns:
        ``[rows, tokens, heads, dim]``.
    """
    x = mx.stack(blocks).transpose(1, 0, 4, 2, 3, 5)
    rows, _, _, groups, heads, dim = x.shape
    return x.reshape(rows, -1, groups * heads, dim)[:, :tokens]


def sums(logs: mx.array, block: int, groups: int) -> mx.array:
    """Sums of the logarithms of decays from each block's begin up to each token.

    Args:
        logs: ``[rows, tokens, heads]``, or for each key dimension ``[rows, tokens, heads, dim]``.
    """
    return mx.cumsum(cut(mx.maximum(logs, MIN_LOG), block, groups), axis=4)


def decays(sums: mx.array) -> mx.array:
    """The product of decays from each token to each later one, from ``sums`` of one for each head.

    Returns:
        ``[..., tokens, tokens]``: from the token of a column to that of a row. Columns of later
        tokens have 1.
    """
    return mx.exp(mx.minimum(sums[..., :, None] - sums[..., None, :], 0))
