"""A CUDA kernel that copies whole pages within a pool, in place."""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx

from chairlift.cache.pages.kernels import KeysValues
from chairlift.engine.cuda.source import included

_THREADS = 256
# A thread copies this many bytes; every page is a multiple of them, because it has 64 tokens.
_WORD_BYTES = 16


def copy_pages(pool: KeysValues, pairs: mx.array) -> mx.array:
    """Copies pages.

    Args:
        pool: ``[pages, key heads, PAGE_TOKENS, dim]``, contiguous; it is written in place.
        pairs: ``[copies, 2]`` int32, contiguous: the page to read and the page to write. No page is
            both.

    Returns:
        ``[1]``, which is ready once the pages are written.
    """
    words = max(array[0].nbytes // _WORD_BYTES for array in pool)
    done: mx.array
    (done,) = _kernel()(
        inputs=[*pool, pairs],
        template=[("T", pool.keys.dtype)],
        grid=(-(-words // _THREADS) * _THREADS, len(pairs), 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.int32],
    )
    return done


@functools.cache
def _kernel() -> Any:
    return mx.fast.cuda_kernel(
        name="chairlift_pages_copy",
        input_names=["keys", "values", "pairs"],
        output_names=["done"],
        source=included("copy_pages"),
        ensure_row_contiguous=False,
    )
