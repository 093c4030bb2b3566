"""Attention in blocks of queries, which bounds the memory for scores."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import mlx.core as mx

from chairlift.cache.layer import Mask
from chairlift.engine.device.profile import SCORE_BYTES


class Block(NamedTuple):
    """Slices of the queries that are computed together; ``heads`` counts within each key head."""

    rows: slice
    key_heads: slice
    heads: slice
    tokens: slice


def blocks(
    shape: tuple[int, int, int, int], seen: int, score_bytes: int = SCORE_BYTES
) -> Iterator[Block]:
    """Divides queries into blocks that are contiguous, in memory order.

    A block has at most ``score_bytes`` of scores, unless a single query has more.

    Args:
        shape: rows, key heads, query heads of each key head, new tokens.
        seen: the number of columns for which each query has scores.
    """
    max_queries = max(1, score_bytes // (4 * max(1, seen)))
    inner = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    axis = next(axis for axis, size in enumerate(inner) if size <= max_queries)
    width = max_queries // inner[axis]
    ranges = [[slice(i, i + 1) for i in range(size)] for size in shape[:axis]]
    ranges.append([slice(i, min(i + width, shape[axis])) for i in range(0, shape[axis], width)])
    ranges += [[slice(0, size)] for size in shape[axis + 1 :]]
    return (Block(*slices) for slices in product(*ranges))


def fused_in_blocks(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    mask: Mask,
    scale: float,
    sinks: mx.array | None,
    score_bytes: int = SCORE_BYTES,
) -> mx.array:
    """``mx.fast.scaled_dot_product_attention``, block by block.

    On the CPU, MLX's function keeps the scores of all queries. Each block is evaluated before the
    next one is built, because MLX allocates memory for operations before it computes them.

    Args:
        queries: ``[rows, heads, step, dim]``.
        keys, values: ``[rows, key heads, columns, dim]``.
        mask: None, "causal", or an array that broadcasts to ``[rows, heads, step, columns]``, or
            has one more axis; see ``LayerCache.grouped_masks``.
        sinks: ``[heads]`` or None.

    Returns:
        ``[rows, heads, step, value dim]``.
    """
    rows, heads, step, dim = queries.shape
    key_heads, seen = keys.shape[1:3]
    shared = heads // key_heads
    split = queries.reshape(rows, key_heads, shared, step, dim)
    masks = None if mask is None or isinstance(mask, str) else by_head(mask, key_heads)
    sinks = None if sinks is None else sinks.reshape(key_heads, shared)
    mixed: list[mx.array] = []
    for block in blocks((rows, key_heads, shared, step), seen, score_bytes):
        part = split[block]
        # No query of a causal block sees later columns.
        columns = slice(seen - step + block.tokens.stop if mask == "causal" else seen)
        result = mx.fast.scaled_dot_product_attention(
            part.reshape(part.shape[0], -1, *part.shape[3:]),
            keys[block.rows, block.key_heads, columns],
            values[block.rows, block.key_heads, columns],
            scale=scale,
            mask=mask if masks is None else _flat(part_of(masks, block), part.shape),
            sinks=None if sinks is None else sinks[block.key_heads, block.heads].reshape(-1),
        )
        mixed.append(result.reshape(-1, values.shape[-1]))
        mx.eval(mixed[-1])
    return mx.concatenate(mixed).reshape(rows, heads, step, values.shape[-1])


def by_head(mask: Any, key_heads: int) -> Any:
    """Reshapes a mask to ``[rows, key heads, query heads of each, step, columns]``.

    The mask may be an MLX or a NumPy array, and any of its axes may be 1.
    """
    if mask.ndim >= 5:
        return mask
    mask = mask.reshape(*[1] * (4 - mask.ndim), *mask.shape)
    rows, heads, step, columns = mask.shape
    if heads == 1:
        return mask[:, :, None]
    return mask.reshape(rows, key_heads, heads // key_heads, step, columns)


def part_of(mask: Any, block: Block) -> Any:
    """A block's part of a mask that has the shape of ``by_head``."""
    sliced = zip(block, mask.shape, strict=False)
    return mask[tuple(part if size > 1 else slice(0, 1) for part, size in sliced)]


def _flat(mask: mx.array, queries: tuple[int, ...]) -> mx.array:
    """Reshapes a mask from five axes to four, for queries of the shape ``queries``."""
    rows, key_heads, shared, step, columns = mask.shape
    if key_heads == shared == 1:
        return mask[:, :, 0]
    full = mx.broadcast_to(mask, (rows, *queries[1:3], step, columns))
    return full.reshape(rows, -1, step, columns)
