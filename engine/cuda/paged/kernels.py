"""CUDA's kernels over pages, behind ``cache.pages``' interface."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import mlx.core as mx

from chairlift.cache.pages.kernels import KeysValues, Scoring
from chairlift.cache.pages.page import PAGE_TOKENS
from chairlift.cache.pages.step import ChunkPlace, KindStep, StepSizes, TileTable
from chairlift.cache.pages.upload import Numbers
from chairlift.cache.quantized import Quantization
from chairlift.engine.cuda.host_memory import keep_on_host
from chairlift.engine.cuda.paged import put as paged_put
from chairlift.engine.cuda.paged.arrays import ChunkStep, TokenStep
from chairlift.engine.cuda.paged.chunk_attention import chunk_attention
from chairlift.engine.cuda.paged.copy_pages import copy_pages
from chairlift.engine.cuda.paged.latent_attention import latent_attention
from chairlift.engine.cuda.paged.latent_selftest import latents_right
from chairlift.engine.cuda.paged.packing import pack, packed_words
from chairlift.engine.cuda.paged.tiles import Form, tile_table, tiling_of
from chairlift.engine.cuda.paged.token_attention import (
    DIM_MULTIPLE,
    DTYPES,
    MAX_DIM,
    token_attention,
)


class CudaPages:
    """See ``cache.pages.kernels.PageKernels``."""

    def attend(
        self,
        queries: mx.array,
        new: KeysValues,
        buffers: KeysValues,
        step: KindStep,
        scoring: Scoring,
        quantization: Quantization | None,
    ) -> mx.array:
        check(queries, new, buffers, scoring, quantization)
        window = scoring.window
        tokens, arrays = step.tokens, step.tokens.arrays
        if quantization is not None:
            places = step.pages, arrays.owners, arrays.stops
            new = pack(new, buffers, *places, quantization)
        by_chunk = bool(tokens.chunks) and queries.dtype != mx.float32
        seen = TokenStep(
            *(step.pages, arrays.owners, arrays.begins),
            *(step.lengths(window, rows_only=by_chunk), arrays.stops),
        )
        count = tokens.sizes.row_limit if by_chunk else None
        limit = tokens.sizes.column_limit
        single = token_attention(
            *(queries, new, buffers, seen, min(limit, window or limit)),
            *(scoring.scale, scoring.sinks, quantization, count),
            softcap=scoring.softcap,
        )
        if not by_chunk:
            return single
        _, key_heads, _, dim = new.keys.shape
        form = Form(key_heads, queries.shape[1] // key_heads, dim, window)
        tiles = tokens.tiles_of(form, self.tile_table)
        rows = tiling_of(form, tokens.sizes).rows
        chunks = ChunkStep(step.pages, tiles.array, rows, tiles.slots, seen.lengths, single)
        return chunk_attention(
            *(queries, new, buffers, chunks, scoring.scale, window, scoring.sinks, quantization),
            softcap=scoring.softcap,
        )

    def attend_latent(
        self,
        queries: mx.array,
        rotary: mx.array,
        new: KeysValues,
        buffers: KeysValues,
        step: KindStep,
        scale: float,
    ) -> mx.array:
        if not latents_right():
            raise ValueError("the kernel for latent attention does not work here")
        check_pages(new, buffers, None)
        arrays = step.tokens.arrays
        seen = TokenStep(
            *(step.pages, arrays.owners, arrays.begins), *(step.lengths(None), arrays.stops)
        )
        limit = step.tokens.sizes.column_limit
        return latent_attention(queries, rotary, new, buffers, seen, limit, scale)

    def tile_table(
        self, chunks: Sequence[ChunkPlace], sizes: StepSizes, form: Hashable
    ) -> TileTable:
        assert isinstance(form, Form)
        return tile_table(chunks, sizes, form)

    def place(self, numbers: Numbers) -> None:
        keep_on_host(numbers)

    def put(self, buffers: KeysValues, new: KeysValues, slots: mx.array) -> mx.array:
        if new.keys.dtype != new.values.dtype:
            raise ValueError(f"no kernel for keys {new.keys.dtype} and values {new.values.dtype}")
        return paged_put.put(buffers, new, slots)

    def copy(self, buffers: KeysValues, pairs: mx.array) -> mx.array:
        return copy_pages(buffers, pairs)


def check(
    queries: mx.array,
    new: KeysValues,
    buffers: KeysValues,
    scoring: Scoring,
    quantization: Quantization | None,
) -> None:
    """Raises ValueError if there is no kernel for these shapes, types or numbers.

    The kernels rely on it: they would read and write behind the end of an array of another type.
    """
    keys, values = new
    _, key_heads, _, dim = keys.shape
    tokens, heads, _, query_dim = queries.shape
    value_dim = values.shape[3]
    differ = dim < value_dim or (dim != value_dim and quantization is not None)
    if keys.shape[:3] != values.shape[:3] or keys.dtype != values.dtype or differ:
        raise ValueError(f"no kernel for keys {keys.shape} and values {values.shape}")
    fits = all(each % DIM_MULTIPLE == 0 and 0 < each <= MAX_DIM for each in (dim, value_dim))
    if keys.dtype not in DTYPES or not fits:
        raise ValueError(f"no kernel for heads of {dim} and {value_dim} numbers, {keys.dtype}")
    alike = (tokens, query_dim, queries.dtype) == (len(keys), dim, keys.dtype)
    if not alike or heads % key_heads:
        raise ValueError(
            f"no kernel for queries {queries.shape} {queries.dtype} "
            f"and keys {keys.shape} {keys.dtype}"
        )
    check_pages(new, buffers, quantization)
    check_scoring(scoring, heads)


def check_pages(new: KeysValues, buffers: KeysValues, quantization: Quantization | None) -> None:
    """Raises ValueError if keys and values are of another form than those in the pages."""
    for array, buffer in zip(new, buffers, strict=True):
        dim, dtype = array.shape[3], array.dtype
        if quantization is not None:
            dim, dtype = packed_words(dim, dtype, quantization), mx.uint32
        if buffer.shape[1:] != (array.shape[1], PAGE_TOKENS, dim) or buffer.dtype != dtype:
            raise ValueError(
                f"no kernel for keys or values {array.shape} {array.dtype} "
                f"over pages {buffer.shape} {buffer.dtype}"
            )


def check_scoring(scoring: Scoring, heads: int) -> None:
    """Raises ValueError if there is no kernel for these parameters."""
    scale, window, sinks, softcap = scoring
    # A negative factor would make masked scores the largest.
    if not (0 < scale < math.inf and (softcap is None or 0 < softcap < math.inf)):
        raise ValueError(f"no kernel for scores times {scale}, with a cap of {softcap}")
    if window is not None and window < 1:
        raise ValueError(f"no kernel for a window of {window} tokens")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"no kernel for sinks {sinks.shape} of {heads} heads")
