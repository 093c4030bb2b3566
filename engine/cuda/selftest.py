"""Tries the CUDA kernels against MLX's own operations, once, before a model uses them."""

from __future__ import annotations

import logging

import mlx.core as mx

from chairlift.engine.cuda import attention, rows
from chairlift.engine.cuda.kernel import KeysValues, decode_attention
from chairlift.engine.cuda.rows import RowMove
from chairlift.engine.model.trial import Trial, elementwise, identical

log = logging.getLogger(__name__)

# bfloat16 has eight bits, and the reference rounds at other places than the kernel.
TOLERANCE = 0.02
_ERROR = "no CUDA kernel for attention, MLX's own is used: %s"
_MISMATCH = "the CUDA kernel for attention is wrong on this device; MLX's own is used"
_ATTENTION_TRIAL = Trial(
    elementwise(TOLERANCE), log, error=_ERROR, level=logging.WARNING, mismatch=_MISMATCH
)
_ROWS_TRIAL = Trial(identical, log, error=_ERROR, level=logging.WARNING, mismatch=_MISMATCH)


def kernels_work() -> bool:
    """Whether the kernels compile here and compute the same as MLX's own operations."""
    if not hasattr(mx, "cuda") or not mx.cuda.is_available():
        return False
    return (
        all(decodes_right(count, sinks) for count in (1, 256) for sinks in (False, True))
        and all(_chunks_right(old) for old in (0, 50))
        and _rows_right()
    )


def decodes_right(count: int, with_sinks: bool) -> bool:
    """Tries decode attention of ``count`` rows, some of which lie across the ring's end.

    The kernel splits a row among several blocks only if there are few rows. It writes the newest
    column itself, so that column is cleared before.
    """
    heads, key_heads, columns, dim = 8, 2, 256, 128
    key = mx.random.key(count)
    queries = mx.random.normal((count, heads, 1, dim), mx.bfloat16, key=key)
    keys = mx.random.normal((count, key_heads, columns, dim), mx.bfloat16, key=key + 1)
    values = mx.random.normal((count, key_heads, columns, dim), mx.bfloat16, key=key + 2)
    lengths = 1 + mx.arange(count, dtype=mx.int32) * 37 % columns
    stops = 1 + (99 + mx.arange(count, dtype=mx.int32) * 11) % columns
    sinks = mx.random.normal((heads,), mx.bfloat16, key=key + 3) if with_sinks else None
    behind = (stops[:, None] - 1 - mx.arange(columns)) % columns
    mask = (behind < lengths[:, None])[:, None, None]
    scale = dim**-0.5
    is_new = (mx.arange(columns) == stops[:, None] - 1)[:, None, :, None]
    new = KeysValues(*(mx.where(is_new, array, 0).sum(2, True) for array in (keys, values)))
    buffers = KeysValues(*(mx.where(is_new, 0, array) for array in (keys, values)))
    mx.eval(new, buffers)

    def ours() -> mx.array:
        result = decode_attention(queries, new, buffers, lengths, stops, scale, sinks)
        mx.eval(result)
        return result

    def mlx() -> mx.array:
        return mx.fast.scaled_dot_product_attention(
            queries, *buffers, scale=scale, mask=mask, sinks=sinks
        )

    # NOTE: the kernel runs first: it writes the column that the reference reads.
    result = _ATTENTION_TRIAL.attempt(ours)
    return result is not None and _ATTENTION_TRIAL.passes(mlx, lambda: result)


def _chunks_right(old: int) -> bool:
    """Tries attention of a prompt chunk of 70 tokens that follows ``old`` tokens."""
    heads, key_heads, new, dim = 8, 2, 70, 128
    key = mx.random.key(old)
    queries = mx.random.normal((1, heads, new, dim), mx.bfloat16, key=key)
    keys = mx.random.normal((1, key_heads, old + new, dim), mx.bfloat16, key=key + 1)
    mask = mx.arange(old, old + new)[:, None] >= mx.arange(old + new)
    return _ATTENTION_TRIAL.passes(
        lambda: mx.fast.scaled_dot_product_attention(queries, keys, keys, scale=0.1, mask=mask),
        lambda: attention.chunk_attention(queries, keys, keys, 0.1),
    )


def _rows_right() -> bool:
    """Tries to write a row round the ring's end, and to copy it over another row."""
    buffers = KeysValues(*(mx.zeros((3, 2, 8, 64), mx.bfloat16) for _ in range(2)))
    new = KeysValues(*(mx.random.normal((1, 2, 9, 64), mx.bfloat16)[:, :, 4:] for _ in range(2)))
    columns = mx.array([6, 7, 0, 1, 2])

    def ours() -> mx.array:
        mx.eval(rows.put(buffers, new, 1, 6))
        mx.eval(rows.move(buffers, [RowMove(1, 2, 6, 5)]))
        return mx.stack([array[row][:, columns] for array in buffers for row in (1, 2)])

    return _ROWS_TRIAL.passes(lambda: mx.stack([part[0] for part in new for _ in (1, 2)]), ours)
