"""Attention of float32 models on the CPU: NumPy between products of the BLAS, block by block.

Exact to float32 rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from chairlift.cache.layer import Mask
from chairlift.cache.packed.step import Part
from chairlift.engine.cpu.compiled import compiled_matmul
from chairlift.engine.cpu.elementwise import BLOCK
from chairlift.engine.cpu.gemm import Floats, products
from chairlift.engine.cpu.views import view
from chairlift.engine.device.profile import SCORE_BYTES
from chairlift.engine.model.attention_blocks import (
    Block,
    blocks,
    by_head,
    fused_in_blocks,
    part_of,
)

# Far below any score, and finite, so that a query that sees nothing gives no NaN.
MASKED = np.float32(-1e30)
# If all scores are within this of 0, softmax need not subtract the highest one: e to the power of
# 60, a sum of a billion of those and their inverse are all within the range of float32.
MAX_UNSHIFTED_SCORE = 60
# Up to this many scores for each row and head the products go to the BLAS in one batch.
MAX_BATCHED_SCORES = 1 << 18


def attend(
    parts: Sequence[Part], scale: float, sinks: mx.array | None
) -> Sequence[mx.array | None]:
    """Grouped-query attention; see ``engine.model.attention.Attend``.

    In float32 it evaluates its inputs, and one matrix product serves all query heads that share a
    key head. Other types are left to mlx-lm, unless their scores would take too much memory at
    once.
    """
    if not all(map(_plain, parts)):
        return [_in_blocks(part, scale, sinks) for part in parts]
    own = None if sinks is None else view(sinks.astype(mx.float32))
    return _attended(parts, scale, own)


def attend_capped(part: Part, scale: float, softcap: float) -> mx.array:
    """As ``attend``, of float32 arrays and with capped scores; see ``attended``."""
    return _attended([part], scale, softcap=softcap)[0]


def _plain(part: Part) -> bool:
    arrays = (part.queries, part.keys, part.values)
    mask = part.mask
    return all(array.dtype == mx.float32 for array in arrays) and (
        not isinstance(mask, mx.array) or mask.dtype in (mx.bool_, mx.float32)
    )


def _in_blocks(part: Part, scale: float, sinks: mx.array | None) -> mx.array | None:
    rows, heads, step, _ = part.queries.shape
    if 4 * rows * heads * step * part.keys.shape[2] <= SCORE_BYTES:
        return None
    return fused_in_blocks(
        part.queries, part.keys, part.values, part.mask, scale, sinks, SCORE_BYTES
    )


def _grouped(part: Part) -> mx.array:
    """Queries as ``[rows, key heads, query heads of each * step, dim]``."""
    rows, heads, step, dim = part.queries.shape
    shared = part.keys.shape[1]
    return part.queries.reshape(rows, shared, heads // shared * step, dim)


def _attended(
    parts: Sequence[Part], scale: float, sinks: Floats | None = None, softcap: float | None = None
) -> list[mx.array]:
    grouped = [_grouped(part) for part in parts]
    masks = [part.mask for part in parts if isinstance(part.mask, mx.array)]
    mx.eval(grouped, masks, [(part.keys, part.values) for part in parts])
    mixed = []
    for part, queries in zip(parts, grouped, strict=True):
        rows, heads, step, _ = part.queries.shape
        stored = part.keys, part.values, part.mask, step, scale
        result = attended(view(queries), *stored, sinks=sinks, softcap=softcap)
        mixed.append(mx.array(result.reshape(rows, heads, step, -1)))
    return mixed


def attended(
    grouped: Floats,
    keys: mx.array,
    values: mx.array,
    mask: Mask,
    step: int,
    scale: float,
    score_bytes: int = SCORE_BYTES,
    sinks: Floats | None = None,
    softcap: float | None = None,
) -> Floats:
    """Computes attention of grouped queries in NumPy.

    Args:
        grouped: queries ``[rows, key heads, query heads of each * step, dim]``.
        keys, values: ``[rows, key heads, columns, dim]``.
        mask: None, "causal", ``[rows, heads or 1, step, columns]``, or the form of
            ``LayerCache.grouped_masks``, which has one more axis. Booleans hide columns, numbers
            are added to the scores.
        score_bytes: see ``engine.model.attention_blocks``.
        sinks: ``[heads]``, a score of each head that takes weight but adds no value.
        softcap: bounds the scores: ``softcap * tanh(score / softcap)``; None: nothing does.

    Returns:
        ``[rows, key heads, query heads of each * step, value dim]``, in new memory.
    """
    rows, key_heads, queries, dim = grouped.shape
    seen, width = keys.shape[2], values.shape[3]
    shape = (rows, key_heads, queries // step, step)
    shown = by_head(view(mask), key_heads) if isinstance(mask, mx.array) else mask
    # As the scores: [rows, key heads, query heads of each, step, columns].
    added = None if sinks is None else sinks.reshape(1, key_heads, queries // step, 1, 1)
    if 4 * rows * key_heads * queries * seen <= score_bytes:
        masked = _masked(shown, None, step, seen)
        return _block(grouped, keys, values, masked, shape, scale, added, softcap)
    split = grouped.reshape(*shape, dim)
    mixed = np.empty((rows * key_heads * queries, width), np.float32)
    done = 0
    for block in blocks(shape, seen, score_bytes):
        part = split[block]
        masked = _masked(shown, block, step, seen)
        columns = slice(masked.first + masked.columns if isinstance(masked, _Hidden) else seen)
        heads = (block.rows, block.key_heads, columns)
        flat = part.reshape(*part.shape[:2], -1, dim)
        own = None if added is None else added[:, block.key_heads, block.heads]
        seen_by = keys[heads], values[heads], masked
        result = _block(flat, *seen_by, part.shape[:4], scale, own, softcap)
        count = result.size // width
        mixed[done : done + count] = result.reshape(count, width)
        done += count
    return mixed.reshape(rows, key_heads, queries, width)


class _Hidden(NamedTuple):
    """The columns that each query does not see.

    Attributes:
        first: all columns before this one are visible.
        where: true where a column is hidden; broadcasts to ``[rows, key heads, query heads, step,
            columns from first]``.
    """

    first: int
    where: NDArray[np.bool_]

    @property
    def columns(self) -> int:
        """The columns from ``first``."""
        return int(self.where.shape[-1])


def _block(
    grouped: Floats,
    keys: mx.array,
    values: mx.array,
    masked: _Hidden | Floats | None,
    shape: tuple[int, ...],
    scale: float,
    sinks: Floats | None,
    softcap: float | None,
) -> Floats:
    """Computes attention of one block, whose axes have the sizes in ``shape``.

    Args:
        masked: the columns that queries do not see, or numbers that are added to the scores,
            ``[*shape, columns]``.
        sinks: broadcasts to the scores, and has one column.
        softcap: see ``attended``.
    """
    rows, key_heads, _, step = shape
    seen = keys.shape[2]
    if rows > 1 or step * seen <= MAX_BATCHED_SCORES:
        weights = _products(grouped, view(keys).swapaxes(-1, -2), scale)
        if softcap is not None:
            weights = softcap * np.tanh(weights / np.float32(softcap))
        sums = _weighted(weights.reshape(*shape, seen), masked, sinks)
        mixed = _products(weights, view(values))
    else:  # few large products: MLX computes one after the other on all cores
        scores = (mx.array(grouped) * scale) @ keys.swapaxes(-1, -2)
        if softcap is not None:
            scores = mx.tanh(scores / softcap) * softcap
        sums = _weighted(view(scores).reshape(*shape, seen), masked, sinks)
        mixed = view(scores @ values)
    mixed /= sums.reshape(rows, key_heads, -1, 1)
    return mixed


def _products(a: Floats, b: Floats, scale: float = 1.0) -> Floats:
    compiled = compiled_matmul.attention_products(a, b, scale)
    return products(a, b, scale) if compiled is None else compiled


def _masked(
    shown: NDArray[Any] | str | None, block: Block | None, step: int, seen: int
) -> _Hidden | Floats | None:
    """The columns that a block's queries do not see, or what is added to their scores.

    Without a block, those of all queries.
    """
    if shown is None:
        return None
    if isinstance(shown, str):
        # All queries see the columns before the first of the new tokens.
        first, tokens = seen - step, slice(0, step) if block is None else block.tokens
        columns, queries = np.arange(tokens.stop), np.arange(tokens.start, tokens.stop)
        return _Hidden(first, columns > queries[:, None])
    own = shown if block is None else part_of(shown, block)
    return _Hidden(0, ~own) if own.dtype == np.bool_ else own


def _weighted(scores: Floats, masked: _Hidden | Floats | None, sinks: Floats | None) -> Floats:
    """As ``_exponentials``, after ``masked`` is applied to the scores; see ``_block``."""
    if masked is None or isinstance(masked, _Hidden):
        return _exponentials(scores, masked, sinks)
    scores += masked
    return _exponentials(scores, None, sinks)


def _exponentials(scores: Floats, hidden: _Hidden | None, sinks: Floats | None = None) -> Floats:
    """Turns scores into unnormalized weights, in place; hidden columns get 0.

    Args:
        sinks: see ``_block``.

    Returns:
        The sums over the last axis, ``[..., 1]``. The caller divides the weights by them.
    """
    axis = int(np.argmax(scores.shape[:-1]))
    if scores.size > BLOCK and scores.shape[axis] > 1:
        middle = scores.shape[axis] // 2
        before = (slice(None),) * axis
        halves = [(*before, slice(None, middle)), (*before, slice(middle, None))]
        shape = scores.shape[:-1]
        where = None if hidden is None else np.broadcast_to(hidden.where, (*shape, hidden.columns))
        added = None if sinks is None else np.broadcast_to(sinks, (*shape, 1))
        parts = [
            _exponentials(
                scores[half],
                None if hidden is None or where is None else _Hidden(hidden.first, where[half]),
                None if added is None else added[half],
            )
            for half in halves
        ]
        return np.concatenate(parts, axis=axis)
    bounds = [scores.min(), scores.max()]
    if sinks is not None:
        bounds += [sinks.min(), sinks.max()]
    largest: Floats | None = None
    if min(bounds) > -MAX_UNSHIFTED_SCORE and max(bounds) < MAX_UNSHIFTED_SCORE:
        np.exp(scores, out=scores)
        _fill(scores, 0, hidden)
    else:
        _fill(scores, MASKED, hidden)
        # A mask of numbers may be negative infinity.
        largest = scores.max(axis=-1, keepdims=True, initial=MASKED)
        if sinks is not None:
            largest = np.maximum(largest, sinks)
        scores -= largest
        np.exp(scores, out=scores)
    sums: Floats = np.einsum("...k->...", scores)[..., None]
    if sinks is not None:
        sums = sums + np.exp(sinks if largest is None else sinks - largest)
    return np.maximum(sums, np.finfo(np.float32).tiny)


def _fill(scores: Floats, value: float | np.float32, hidden: _Hidden | None) -> None:
    if hidden is not None:
        np.copyto(scores[..., hidden.first :], np.float32(value), where=hidden.where)
