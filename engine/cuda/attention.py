"""Attention on CUDA where ``engine.cuda.paged`` does not compute it: MLX's own, in few shapes.

This is the attention of models whose caches are columns, and of those whose layers read copies of
what is in the pages; see ``cache.pages.dense``.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from chairlift.cache.packed.step import Part

# Prompt chunks are padded to a multiple of this many tokens; they are fastest if they also begin
# at such a multiple.
CHUNK_MULTIPLE = 128
# MLX has a kernel for single tokens and heads of up to this many numbers. Wider ones, as those of
# latent attention, read the keys once for each query head.
FUSED_DIM = 256
# Up to this many scores a head, plain products are faster than compiling a plan of cuDNN's.
FEW_SCORES = 1 << 21


def attend(
    parts: Sequence[Part], scale: float, sinks: mx.array | None
) -> Sequence[mx.array | None]:
    """See ``model.attention.Attend``: prompt chunks and wide heads, without ``sinks``."""
    return [_attended(part, scale, sinks) for part in parts]


def _attended(part: Part, scale: float, sinks: mx.array | None) -> mx.array | None:
    arrays = part.queries, part.keys, part.values
    rows, _, new, dim = part.queries.shape
    if sinks is not None or (new == 1 and dim <= FUSED_DIM):
        return None
    if isinstance(part.mask, str):
        return chunk_attention(*arrays, scale) if new > 1 else None
    if part.mask is None or part.mask.ndim > 4 or rows * new * part.keys.shape[2] > FEW_SCORES:
        return None
    return _products(*arrays, scale, part.mask)


def chunk_attention(queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    """Causal attention of a prompt chunk's tokens to the prompt up to each of them.

    cuDNN, which MLX calls, compiles a plan for every new shape and memory layout: 34 ms on an H200.
    To keep shapes few, queries and keys are padded at the end to a multiple of ``CHUNK_MULTIPLE``;
    causality hides this padding from the queries. To keep layouts few, parts of wider buffers are
    copied; the keys of a complete prompt come from the model, always in the same layout. If the
    chunk does not begin at such a multiple and there are few scores, plain products are faster.

    Args:
        queries: ``[rows, heads, new, dim]``.
        keys, values: ``[rows, key heads, old + new, dim]``.

    Returns:
        ``[rows, heads, new, value dim]``.
    """
    new, total = queries.shape[2], keys.shape[2]
    if (total - new) % CHUNK_MULTIPLE and new * total <= FEW_SCORES:
        visible = mx.arange(total - new, total)[:, None] >= mx.arange(total)
        return _products(queries, keys, values, scale, visible)
    arrays = [queries, keys, values]
    if missing := -new % CHUNK_MULTIPLE:
        arrays = [mx.pad(array, [(0, 0), (0, 0), (0, missing), (0, 0)]) for array in arrays]
    elif new < total:
        arrays = [mx.contiguous(array) for array in arrays]
    mixed = mx.fast.scaled_dot_product_attention(*arrays, scale=scale, mask="causal")
    return mixed[:, :, :new]


def _products(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array
) -> mx.array:
    """Attention by plain products; ``mask`` broadcasts to ``[rows, heads, new, columns]``.

    It has booleans, or is added to the scores.
    """
    rows, heads, new, dim = queries.shape
    key_heads, total = keys.shape[1], keys.shape[2]
    grouped = (queries * scale).reshape(rows, key_heads, -1, dim)
    scores = (grouped @ keys.swapaxes(-1, -2)).reshape(rows, heads, new, total)
    if mask.dtype == mx.bool_:
        scores = mx.where(mask, scores, mx.array(mx.finfo(scores.dtype).min, scores.dtype))
    else:
        scores = scores + mask
    weights = mx.softmax(scores, axis=-1, precise=True).reshape(rows, key_heads, -1, total)
    return (weights @ values).reshape(rows, heads, new, -1)
