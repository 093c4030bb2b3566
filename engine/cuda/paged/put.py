"""A CUDA kernel that writes tokens into pages, in place."""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx

from chairlift.cache.pages.kernels import KeysValues
from chairlift.engine.cuda.source import included

_THREADS = 256


def put(pool: KeysValues, new: KeysValues, slots: mx.array) -> mx.array:
    """Writes a sequence's tokens into a pool.

    Args:
        pool: ``[pages, heads, PAGE_TOKENS, dim]``, contiguous; it is written in place. Keys and
            values may have different heads and dims.
        new: ``[1, heads, tokens, dim]``.
        slots: ``[tokens]`` int32, contiguous: page * PAGE_TOKENS + place in the page.

    Returns:
        ``[1]``, which is ready once the tokens are written.
    """
    tokens = new.keys.shape[2]
    heads, width = (max(array.shape[axis] for array in new) for axis in (1, 3))
    done: mx.array
    (done,) = _kernel()(
        inputs=[*new, *pool, slots],
        template=[("T", pool.keys.dtype)],
        grid=(-(-tokens * width // _THREADS) * _THREADS, heads, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.int32],
    )
    return done


@functools.cache
def _kernel() -> Any:
    return mx.fast.cuda_kernel(
        name="chairlift_pages_put",
        input_names=["new_keys", "new_values", "keys", "values", "slots"],
        output_names=["done"],
        source=included("put"),
        ensure_row_contiguous=False,
    )
