"""CUDA's kernels over pages, behind ``cache.pages``' interface."""

from __future__ import annotations

import mlx.core as mx

from chairlift.cache.pages.kernels import KeysValues
from chairlift.cache.pages.step import KindStep
from chairlift.cache.quantized import Quantization
from chairlift.engine.cuda.paged import put as paged_put
from chairlift.engine.cuda.paged.arrays import TokenStep
from chairlift.engine.cuda.paged.chunk_attention import chunk_attention
from chairlift.engine.cuda.paged.copy_pages import copy_pages
from chairlift.engine.cuda.paged.packing import pack
from chairlift.engine.cuda.paged.tiles import chunk_step
from chairlift.engine.cuda.paged.token_attention import DTYPES, HEAD_DIMS, token_attention


class CudaPages:
    """See ``cache.pages.kernels.PageKernels``."""

    def attend(
        self,
        queries: mx.array,
        new: KeysValues,
        buffers: KeysValues,
        step: KindStep,
        scale: float,
        window: int | None,
        sinks: mx.array | None,
        quantization: Quantization | None,
    ) -> mx.array:
        check(*new)
        tokens, rows = step.tokens, step.tokens.rows
        if quantization is not None:
            places = step.tables, tokens.owners, tokens.stops
            new = pack(new, buffers, *places, quantization)
        more = scale, window, sinks, quantization
        if not tokens.chunks or queries.dtype == mx.float32:
            return _token_by_token(queries, new, buffers, step, *more)
        first = KeysValues(new.keys[:rows], new.values[:rows])
        rest = KeysValues(new.keys[rows:], new.values[rows:])
        _, key_heads, _, dim = new.keys.shape
        group = queries.shape[1] // key_heads
        chunks = chunk_step(step.tables, tokens, key_heads, group, dim, window)
        mixed = chunk_attention(queries[rows:], rest, buffers, chunks, *more)
        if not rows:
            return mixed
        decoded = _token_by_token(queries[:rows], first, buffers, step, *more)
        return mx.concatenate([decoded, mixed])

    def put(self, buffers: KeysValues, new: KeysValues, slots: mx.array) -> mx.array:
        check_alike(*new)
        return paged_put.put(buffers, new, slots)

    def copy(self, buffers: KeysValues, pairs: mx.array) -> mx.array:
        return copy_pages(buffers, pairs)


def _token_by_token(
    queries: mx.array,
    new: KeysValues,
    buffers: KeysValues,
    step: KindStep,
    scale: float,
    window: int | None,
    sinks: mx.array | None,
    quantization: Quantization | None,
) -> mx.array:
    """Attention of the first tokens of a step, each by itself."""
    count, tokens = len(queries), step.tokens
    arrays = (tokens.owners, tokens.begins, step.lengths(window), tokens.stops)
    seen = TokenStep(step.tables, *(array[:count] for array in arrays))
    return token_attention(queries, new, buffers, seen, scale, sinks, window, quantization)


def check(keys: mx.array, values: mx.array) -> None:
    """Raises ValueError if there is no kernel for the shape or type of keys and values."""
    check_alike(keys, values)
    if keys.dtype not in DTYPES or keys.shape[3] not in HEAD_DIMS:
        raise ValueError(f"no kernel for heads of {keys.shape[3]} numbers, {keys.dtype}")


def check_alike(keys: mx.array, values: mx.array) -> None:
    """Raises ValueError if keys and values have another shape or type."""
    if keys.shape != values.shape or keys.dtype != values.dtype:
        raise ValueError(f"no kernel for keys {keys.shape} and values {values.shape}")
