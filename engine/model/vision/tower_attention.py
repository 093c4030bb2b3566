"""Attention of vision towers on the CPU: in blocks of queries, and without MLX's slow ``exp``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from chairlift.engine.model.attention_blocks import blocks, by_head, part_of

# The scores of 1,024 patches and 12 heads are computed in six blocks of this size.
_SCORE_BYTES = 1 << 23


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
        parts: list[mx.array] = []
        plain = not more and types == {mx.float32} and queries.size and keys.size
        if plain and not isinstance(mask, str):
            parts = list(_parts(queries, keys, values, scale, mask))
        if len(parts) < 2:
            result: mx.array = original(queries, keys, values, scale=scale, mask=mask, **more)
            return result
        for part in parts:
            record(part)
        return mx.concatenate(parts).reshape(*queries.shape[:3], values.shape[-1])

    fast.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        fast.scaled_dot_product_attention = original


def _parts(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | None
) -> Iterator[mx.array]:
    """The outputs of blocks of queries, ``[queries, value dim]``, in memory order."""
    rows, heads, step, dim = queries.shape
    key_heads, seen = keys.shape[1:3]
    shape = (rows, key_heads, heads // key_heads, step)
    # Powers of 2 instead of e.
    scaled = queries.reshape(*shape, dim) * (scale / math.log(2))
    masks = None if mask is None else by_head(mask, key_heads)
    for block in blocks(shape, seen, _SCORE_BYTES):
        own = block.rows, block.key_heads, None
        scores = scaled[block] @ keys[own].swapaxes(-1, -2)
        if masks is not None:
            part = part_of(masks, block)
            if part.dtype == mx.bool_:
                scores = mx.where(part, scores, mx.finfo(mx.float32).min)
            else:
                scores = scores + part / math.log(2)
        weights = mx.power(2.0, scores - scores.max(axis=-1, keepdims=True))
        mixed = (weights @ values[own]) / weights.sum(axis=-1, keepdims=True)
        yield mixed.reshape(-1, values.shape[-1])
