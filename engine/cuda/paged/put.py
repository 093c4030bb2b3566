"""A CUDA kernel that writes tokens into pages, in place."""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx

from chairlift.cache.pages.kernels import KeysValues

_THREADS = 256

# Grid: (numbers of a head's tokens, key head).
_SOURCE = """
  const int dim = new_keys_shape[3], tokens = new_keys_shape[2];
  const int heads = keys_shape[1], page_tokens = keys_shape[2], head = blockIdx.y;
  const long i = (long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i == 0 && head == 0) done[0] = 1;
  if (i >= (long)tokens * dim) return;
  const int token = i / dim, at = i % dim, slot = slots[token];
  const long row = ((long)(slot / page_tokens) * heads + head) * page_tokens + slot % page_tokens;
  const_cast<T*>(keys)[row * dim + at] = new_keys[
      head * new_keys_strides[1] + token * new_keys_strides[2] + at * new_keys_strides[3]];
  const_cast<T*>(values)[row * dim + at] = new_values[
      head * new_values_strides[1] + token * new_values_strides[2] + at * new_values_strides[3]];
"""


def put(pool: KeysValues, new: KeysValues, slots: mx.array) -> mx.array:
    """Writes a sequence's tokens into a pool.

    Args:
        pool: ``[pages, key heads, PAGE_TOKENS, dim]``, contiguous; it is written in place.
        new: ``[1, key heads, tokens, dim]``.
        slots: ``[tokens]`` int32, contiguous: page * PAGE_TOKENS + place in the page.

    Returns:
        ``[1]``, which is ready once the tokens are written.
    """
    _, heads, tokens, dim = new.keys.shape
    done: mx.array
    (done,) = _kernel()(
        inputs=[*new, *pool, slots],
        template=[("T", pool.keys.dtype)],
        grid=(-(-tokens * dim // _THREADS) * _THREADS, heads, 1),
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
        source=_SOURCE,
        ensure_row_contiguous=False,
    )
