"""A CUDA kernel that copies whole pages within a pool, in place."""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx

from chairlift.cache.pages.kernels import KeysValues

_THREADS = 256
# A thread copies so many bytes; every page is a multiple of them, because it has 64 tokens.
_WORD_BYTES = 16

# Grid: (words of a page, pairs of pages).
_SOURCE = """
  const long key_words = (long)keys_shape[1] * keys_shape[2] * keys_shape[3] * sizeof(T) / 16;
  const long value_words =
      (long)values_shape[1] * values_shape[2] * values_shape[3] * sizeof(T) / 16;
  const long word = (long)blockIdx.x * blockDim.x + threadIdx.x;
  const long from = pairs[2 * blockIdx.y], to = pairs[2 * blockIdx.y + 1];
  if (word == 0 && blockIdx.y == 0) done[0] = 1;
  uint4* key_pages = reinterpret_cast<uint4*>(const_cast<T*>(keys));
  uint4* value_pages = reinterpret_cast<uint4*>(const_cast<T*>(values));
  if (word < key_words) key_pages[to * key_words + word] = key_pages[from * key_words + word];
  if (word < value_words)
    value_pages[to * value_words + word] = value_pages[from * value_words + word];
"""


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
        source=_SOURCE,
        ensure_row_contiguous=False,
    )
