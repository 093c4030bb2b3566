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
from mlx.nn.layers.base import Module
from mlx.nn.layers.positional_encoding import RoPE
from mlx.utils import tree_flatten, tree_unflatten

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


class SharedRope(Module):
    """Rotary embedding whose sines and cosines are computed once a step, not once a layer.

    Layers with the same settings share ``tables``, keyed by what they rotate for; a step rebinds
    its offsets, so that only the last step's tables can ever be asked for.
    """

    def __init__(self, rope: RoPE, tables: dict[str, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dims = rope.dims
        self._scale = rope.scale
        # As MLX computes them: at long positions other roundings would show.
        step = math.log(rope.base) / (rope.dims // 2)
        self._frequencies = mx.exp(mx.arange(0, -(rope.dims // 2), -1) * step)
        self._tables = tables

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """Rotates ``[rows, heads, length, dim]``, row r's positions starting at ``offset[r]``."""
        cos, sin = self._table(offset, x.shape[2])
        half = self._dims // 2
        first, second, rest = x[..., :half], x[..., half : self._dims], x[..., self._dims :]
        turned = [first * cos - second * sin, first * sin + second * cos]
        whole = mx.concatenate([*turned, rest] if rest.shape[-1] else turned, axis=-1)
        return whole.astype(x.dtype)

    def _table(self, offset: int | mx.array, length: int) -> tuple[mx.array, mx.array]:
        tables = self._tables
        if tables.get("offset") is not offset or tables.get("length") != length:
            start = offset if isinstance(offset, mx.array) else mx.array([offset])
            positions = (start[:, None] + mx.arange(length)) * self._scale
            angles = positions[:, None, :, None] * self._frequencies
            tables |= {"offset": offset, "length": length, "cos": mx.cos(angles)}
            tables["sin"] = mx.sin(angles)
        return tables["cos"], tables["sin"]


def install(model: Any) -> None:
    """Gives a float32 model the parts above where it has mlx-lm's: the same numbers, sooner.

    mlx-lm's model files import their attention and SwiGLU by name, so these are replaced in the
    model's own module; attention over any cache that is not ours stays mlx-lm's.
    """
    _share_ropes(model)
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


def _share_ropes(model: Any) -> None:
    tables: dict[tuple[float, ...], dict[str, Any]] = {}
    replaced: list[tuple[str, Module]] = []
    leaves: Any = tree_flatten(model.leaf_modules(), is_leaf=Module.is_module)
    for name, layer in leaves:
        if type(layer) is RoPE and not layer.traditional:
            settings = (layer.dims, layer.base, layer.scale)
            replaced.append((name, SharedRope(layer, tables.setdefault(settings, {}))))
    model.update_modules(tree_unflatten(replaced))
