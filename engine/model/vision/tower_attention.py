"""Attention of vision towers on the CPU: in blocks of queries, and without MLX's slow ``exp``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

# Scores of a block: 15 ms on two cores. All scores of 1,024 patches and 12 heads are six blocks.
_SCORES = 1 << 21


@contextmanager
def divided_attention(record: Callable[[mx.array], None]) -> Iterator[None]:
    """A context in which ``mx.fast``'s attention of float32 is computed in blocks.

    It is for code that builds a tower's graph: nothing is evaluated. MLX's softmax takes 12 ns for
    a score, the powers of 2 here 4.

    Args:
        record: called with the output of each block, in the order of the graph.
    """
    fast: Any = mx.fast
    original = fast.scaled_dot_product_attention

    def attention(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        mask: mx.array | str | None = None,
        **more: Any,
    ) -> mx.array:
        types = {each.dtype for each in (queries, keys, values)}
        rows, heads, step = queries.shape[:3]
        queries_at_once = _SCORES // max(1, rows * heads * keys.shape[2])
        is_small = step <= max(1, queries_at_once)
        if more or isinstance(mask, str) or types != {mx.float32} or is_small:
            result: mx.array = original(queries, keys, values, scale=scale, mask=mask, **more)
            return result
        outputs = []
        for output in _blocks(queries, keys, values, scale, mask, max(1, queries_at_once)):
            record(output)
            outputs.append(output)
        return mx.concatenate(outputs, axis=2)

    fast.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        fast.scaled_dot_product_attention = original


def _blocks(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | None,
    block: int,
) -> Iterator[mx.array]:
    """The outputs of ``block`` queries each, ``[rows, heads, queries, value dim]``."""
    rows, heads, step, dim = queries.shape
    key_heads = keys.shape[1]
    shared = heads // key_heads
    # Powers of 2 instead of e.
    scaled = queries.reshape(rows, key_heads, shared, step, dim) * (scale / math.log(2))
    columns, values = keys[:, :, None].swapaxes(-1, -2), values[:, :, None]
    for start in range(0, step, block):
        scores = scaled[..., start : start + block, :] @ columns
        if mask is not None:
            part = mask[..., start : start + block, :] if mask.shape[-2] > 1 else mask
            if part.ndim == 4:
                part = (
                    part[:, :, None]
                    if part.shape[1] == 1
                    else part.reshape(part.shape[0], key_heads, shared, *part.shape[2:])
                )
            if part.dtype == mx.bool_:
                scores = mx.where(part, scores, mx.finfo(mx.float32).min)
            else:
                scores = scores + part / math.log(2)
        weights = mx.power(2.0, scores - scores.max(axis=-1, keepdims=True))
        mixed = (weights @ values) / weights.sum(axis=-1, keepdims=True)
        yield mixed.reshape(rows, heads, -1, values.shape[-1])
