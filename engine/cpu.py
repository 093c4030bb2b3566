"""What MLX's CPU backend computes slowly, computed with operations that it computes fast.

Measured with MLX 0.32.4 on x86-64 (docs/architecture.md has the figures): ``exp`` and all that is
built on it take 12 ns a number, ``power`` takes 4; the general attention does grouped-query heads
one by one. Both replacements are exact to float32 rounding.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import mlx.core as mx

from chairlift.cache.layer import LayerCache

LOG2_E = math.log2(math.e)
# Far below any score, and finite, so that a query that sees nothing gives no NaN.
MASKED = -1e30


def exp(x: mx.array) -> mx.array:
    """e to the power of x, elementwise."""
    return mx.power(math.e, x)


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """``silu(gate) * x``, elementwise."""
    return gate / (1.0 + exp(-gate)) * x


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | str | None,
) -> mx.array:
    """Grouped-query attention: one matrix product for all query heads that share a key head.

    Args:
        queries: ``[rows, heads, queries, dim]``.
        keys, values: ``[rows, key heads, keys, dim]``.
        mask: booleans that broadcast to ``[rows, heads, queries, keys]``, "causal" or None.

    Returns:
        ``[rows, heads, queries, value dim]``.
    """
    rows, heads, length, dim = queries.shape
    shared = keys.shape[1]
    group = heads // shared
    grouped = (queries * (scale * LOG2_E)).reshape(rows, shared, group * length, dim)
    scores = (grouped @ keys.swapaxes(-1, -2)).reshape(rows, shared, group, length, -1)
    if isinstance(mask, str):
        seen = keys.shape[2]
        mask = mx.arange(seen - length, seen)[:, None] >= mx.arange(seen)[None]
    if mask is not None:
        if mask.ndim == 4:
            mask = mask[:, :, None]
        scores = mx.where(mask, scores, MASKED)
    weights = mx.power(2.0, scores - scores.max(axis=-1, keepdims=True))
    mixed = weights.reshape(rows, shared, group * length, -1) @ values
    mixed = mixed.reshape(rows, shared, group, length, -1) / weights.sum(axis=-1, keepdims=True)
    return mixed.reshape(rows, heads, length, -1)


def install(model: Any) -> None:
    """Has a model's file use these functions, where mlx-lm's own helpers are what it calls.

    mlx-lm's model files import both helpers by name. Attention over any cache that is not ours
    stays mlx-lm's.
    """
    module = sys.modules[type(model).__module__]
    if hasattr(module, "swiglu"):
        module.swiglu = swiglu  # type: ignore[attr-defined]
    original = getattr(module, "scaled_dot_product_attention", None)
    if original is None or getattr(original, "serves", None) is LayerCache:
        return

    def scaled_dot_product_attention(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any,
        scale: float,
        mask: mx.array | str | None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        plain_mask = mask is None or isinstance(mask, str) or mask.dtype == mx.bool_
        if isinstance(cache, LayerCache) and sinks is None and plain_mask:
            return attention(queries, keys, values, scale, mask)
        result: mx.array = original(queries, keys, values, cache, scale, mask, sinks)
        return result

    scaled_dot_product_attention.serves = LayerCache  # type: ignore[attr-defined]
    module.scaled_dot_product_attention = scaled_dot_product_attention  # type: ignore[attr-defined]
