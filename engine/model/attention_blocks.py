"""Attention in blocks of queries, so that their scores take bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import mlx.core as mx

from chairlift.cache.layer import Mask

# Bytes of float32 scores that a block has at once. Whole, 32 heads of a chunk of 512 tokens behind
# 131,072 others have 8.6 GB of them. Blocks of this size take no longer than larger ones: their
# products still are hundreds of rows high, and they lie in a large L3 cache.
SCORE_BYTES = 32 << 20


class Block(NamedTuple):
    """Queries that are computed together: slices of rows, key heads, query heads of each key head
    and new tokens.
    """

    rows: slice
    key_heads: slice
    heads: slice
    tokens: slice


def blocks(
    shape: tuple[int, int, int, int], seen: int, score_bytes: int = SCORE_BYTES
) -> Iterator[Block]:
    """Blocks of queries that have ``seen`` scores each, in the order in which queries lie.

    Each block is one run of the queries, and none has more than ``score_bytes`` of scores, unless
    a single query has.

    Args:
        shape: rows, key heads, query heads of each key head, new tokens.
    """
    most = max(1, score_bytes // (4 * max(1, seen)))
    inner = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    axis = next(axis for axis, size in enumerate(inner) if size <= most)
    width = most // inner[axis]
    ranges = [[slice(i, i + 1) for i in range(size)] for size in shape[:axis]]
    ranges.append([slice(i, min(i + width, shape[axis])) for i in range(0, shape[axis], width)])
    ranges += [[slice(0, size)] for size in shape[axis + 1 :]]
    return (Block(*own) for own in product(*ranges))


def fused_in_blocks(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    mask: Mask,
    scale: float,
    sinks: mx.array | None,
    score_bytes: int = SCORE_BYTES,
) -> mx.array:
    """``mx.fast.scaled_dot_product_attention``, whose CPU form keeps all scores, block by block.

    Evaluates each block before the next is built: MLX allocates ahead of what it computes.

    Args:
        queries: ``[rows, heads, step, dim]``.
        keys, values: ``[rows, key heads, columns, dim]``.
        mask: None, "causal", or an array that broadcasts to ``[rows, heads, step, columns]``; or
            that with an axis more, see ``LayerCache.grouped_masks``.
        sinks: ``[heads]`` or None.
    """
    rows, heads, step, dim = queries.shape
    key_heads, seen = keys.shape[1:3]
    shared = heads // key_heads
    apart = queries.reshape(rows, key_heads, shared, step, dim)
    masks = None if mask is None or isinstance(mask, str) else by_head(mask, key_heads)
    sinks = None if sinks is None else sinks.reshape(key_heads, shared)
    mixed: list[mx.array] = []
    for block in blocks((rows, key_heads, shared, step), seen, score_bytes):
        own = apart[block]
        # Later columns are hidden from all of the block.
        columns = slice(seen - step + block.tokens.stop if mask == "causal" else seen)
        part = mx.fast.scaled_dot_product_attention(
            own.reshape(own.shape[0], -1, *own.shape[3:]),
            keys[block.rows, block.key_heads, columns],
            values[block.rows, block.key_heads, columns],
            scale=scale,
            mask=mask if masks is None else _flat(part_of(masks, block), own.shape),
            sinks=None if sinks is None else sinks[block.key_heads, block.heads].reshape(-1),
        )
        mixed.append(part.reshape(-1, values.shape[-1]))
        mx.eval(mixed[-1])
    return mx.concatenate(mixed).reshape(rows, heads, step, values.shape[-1])


def by_head(mask: Any, key_heads: int) -> Any:
    """A mask, MLX's or NumPy's, as ``[rows, key heads, query heads of each, step, columns]``.

    Any of its axes may be 1.
    """
    if mask.ndim >= 5:
        return mask
    mask = mask.reshape(*[1] * (4 - mask.ndim), *mask.shape)
    rows, heads, step, columns = mask.shape
    if heads == 1:
        return mask[:, :, None]
    return mask.reshape(rows, key_heads, heads // key_heads, step, columns)


def part_of(mask: Any, block: Block) -> Any:
    """A block's part of a mask that ``by_head`` gave."""
    sliced = zip(block, mask.shape, strict=False)
    return mask[tuple(own if size > 1 else slice(0, 1) for own, size in sliced)]


def _flat(mask: mx.array, queries: tuple[int, ...]) -> mx.array:
    """A mask of five axes as one of four, for ``queries`` of that shape."""
    rows, key_heads, shared, step, columns = mask.shape
    if key_heads == shared == 1:
        return mask[:, :, 0]
    whole = mx.broadcast_to(mask, (rows, *queries[1:3], step, columns))
    return whole.reshape(rows, -1, step, columns)
