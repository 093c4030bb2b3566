"""Attention on CUDA: for rows our kernel, without a mask; for prompts MLX's own, in few shapes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import mlx.core as mx

from chairlift.cache.packed import Part
from chairlift.engine.cuda.kernel import KeysValues, decode_attention
from chairlift.engine.cuda.layer import CudaLayer

# Prompts' chunks are padded to a multiple of this many tokens, and had better begin at one.
CHUNK_MULTIPLE = 128
# Plans are compiled beforehand for chunks of sequences up to this: 36 of them, a second or two.
PLANNED_TOKENS = 1024
# Scores of one head up to which plain products are sooner than a plan of cuDNN's.
FEW_SCORES = 1 << 21


def attend(
    parts: Sequence[Part], scale: float, sinks: mx.array | None
) -> Sequence[mx.array | None]:
    """See ``model.attention.Attend``: rows of a ``CudaLayer``, prompts' chunks without ``sinks``.

    Raises:
        ValueError: a mask of rows is not one of ours.
    """
    if any(isinstance(part.layer, CudaLayer) and not part.layer.shared.traced for part in parts):
        # One CUDA graph a layer, and the same for all of them: MLX keeps those that it has met, and
        # one that it has not takes milliseconds. Nothing here waits for the running step.
        mx.async_eval([array for part in parts for array in part[1:4]])
    return [_attended(part, scale, sinks) for part in parts]


def _attended(part: Part, scale: float, sinks: mx.array | None) -> mx.array | None:
    layer = part.layer
    if isinstance(layer, CudaLayer):
        lengths = layer.seen(part.mask)
        if lengths is None:
            raise ValueError("rows attend by a mask of the model's own")
        new = KeysValues(part.keys, part.values)
        return decode_attention(
            part.queries, new, layer.buffers, lengths, layer.newest, scale, sinks
        )
    causal = part.queries.shape[2] > 1 and isinstance(part.mask, str) and sinks is None
    return chunk_attention(part.queries, part.keys, part.values, scale) if causal else None


def chunk_attention(queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    """Each of the newest tokens attends to all up to itself.

    cuDNN, which MLX calls, compiles a plan for every shape and layout in memory that it has not
    seen: 34 ms on an H200. So both ends are padded alike to a multiple of ``CHUNK_MULTIPLE``
    (queries see none of the padding, which comes after them), and parts of wider buffers are copied
    out of them; a whole prompt's own come as the model made them, which is always alike. Where the
    tokens before the chunk are not such a multiple, and the scores are few, plain products are
    sooner.

    Args:
        queries: ``[rows, heads, new, dim]``.
        keys, values: ``[rows, key heads, old + new, dim]``.

    Returns:
        ``[rows, heads, new, value dim]``.
    """
    new, whole = queries.shape[2], keys.shape[2]
    if (whole - new) % CHUNK_MULTIPLE and new * whole <= FEW_SCORES:
        return _products(queries, keys, values, scale)
    rows, heads, _, dim = queries.shape
    if rows == 1:
        _plan(heads, keys.shape[1], dim, values.shape[3], queries.dtype)
    arrays = [queries, keys, values]
    if missing := -new % CHUNK_MULTIPLE:
        arrays = [mx.pad(array, [(0, 0), (0, 0), (0, missing), (0, 0)]) for array in arrays]
    elif new < whole:
        arrays = [mx.contiguous(array) for array in arrays]
    mixed = mx.fast.scaled_dot_product_attention(*arrays, scale=scale, mask="causal")
    return mixed[:, :, :new]


@functools.cache
def _plan(heads: int, key_heads: int, dim: int, value_dim: int, dtype: mx.Dtype) -> None:
    """Has cuDNN compile the shapes of chunks that are met most, when a model is first called."""
    sizes = range(CHUNK_MULTIPLE, PLANNED_TOKENS + 1, CHUNK_MULTIPLE)
    for new, whole in itertools.combinations_with_replacement(sizes, 2):
        shapes = [(new, heads, dim), (whole, key_heads, dim), (whole, key_heads, value_dim)]
        # As they lie in a packed step: token by token.
        arrays = [mx.zeros((1, *shape), dtype).swapaxes(1, 2) for shape in shapes]
        if new < whole:
            arrays = [mx.contiguous(array) for array in arrays]
        mx.eval(mx.fast.scaled_dot_product_attention(*arrays, scale=1.0, mask="causal"))


def _products(queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    rows, heads, new, dim = queries.shape
    key_heads, whole = keys.shape[1], keys.shape[2]
    grouped = (queries * scale).reshape(rows, key_heads, -1, dim)
    scores = (grouped @ keys.swapaxes(-1, -2)).reshape(rows, key_heads, -1, new, whole)
    visible = mx.arange(whole - new, whole)[:, None] >= mx.arange(whole)
    scores = mx.where(visible, scores, mx.array(mx.finfo(scores.dtype).min, scores.dtype))
    weights = mx.softmax(scores, axis=-1, precise=True).reshape(rows, key_heads, -1, whole)
    return (weights @ values).reshape(rows, heads, new, -1)
