"""CUDA kernels that write rows of keys and values into buffers, and copy them within, in place."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from chairlift.engine.cuda.kernel import KeysValues

_THREADS = 256

# Grid: (numbers of a head's tokens, key head). ``place`` is the row, and its first token's column.
_PUT = """
  const int dim = new_keys_shape[3], tokens = new_keys_shape[2];
  const int heads = keys_shape[1], columns = keys_shape[2], head = blockIdx.y;
  const long i = (long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i == 0 && head == 0) done[0] = 1;
  if (i >= (long)tokens * dim) return;
  const int token = i / dim, at = i % dim;
  const int column = (place[1] + token) % columns;
  const long where = (((long)place[0] * heads + head) * columns + column) * dim + at;
  const_cast<T*>(keys)[where] = new_keys[
      head * new_keys_strides[1] + token * new_keys_strides[2] + at * new_keys_strides[3]];
  const_cast<T*>(values)[where] = new_values[
      head * new_values_strides[1] + token * new_values_strides[2] + at * new_values_strides[3]];
"""

# Grid: (numbers of a head's tokens, key head, move). ``moves`` are ``RowMove``'s four fields.
_MOVE = """
  const int dim = keys_shape[3], heads = keys_shape[1], columns = keys_shape[2];
  const int* move = moves + blockIdx.z * 4;
  const long i = (long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i == 0 && blockIdx.y == 0 && blockIdx.z == 0) done[0] = 1;
  if (i >= (long)move[3] * dim) return;
  const int column = (move[2] + i / dim) % columns;
  const long at = ((long)blockIdx.y * columns + column) * dim + i % dim;
  const long row = (long)heads * columns * dim;
  const_cast<T*>(keys)[move[1] * row + at] = keys[move[0] * row + at];
  const_cast<T*>(values)[move[1] * row + at] = values[move[0] * row + at];
"""


class RowMove(NamedTuple):
    """Copies ``tokens`` columns from ``column`` on, round the ring, from ``row`` to row ``to``."""

    row: int
    to: int
    column: int
    tokens: int


def put(buffers: KeysValues, new: KeysValues, row: int, column: int) -> mx.array:
    """Writes a row's tokens into its columns from ``column`` on, round the ring.

    Args:
        buffers: ``[rows, key heads, columns, dim]``, contiguous; they are written in place.
        new: ``[1, key heads, tokens, dim]``.

    Returns:
        ``[1]``, which is ready once the tokens are written.
    """
    _, heads, tokens, dim = new.keys.shape
    done: mx.array
    (done,) = _kernel("put", _PUT, ("new_keys", "new_values", "keys", "values", "place"))(
        inputs=[*new, *buffers, _numbers(row, column)],
        template=[("T", buffers.keys.dtype)],
        grid=(-(-tokens * dim // _THREADS) * _THREADS, heads, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.int32],
    )
    return done


def move(buffers: KeysValues, moves: Sequence[RowMove]) -> mx.array:
    """Copies rows over others within the buffers; no row may be in two moves. See ``put``."""
    _, heads, _, dim = buffers.keys.shape
    max_numbers = max(one.tokens for one in moves) * dim
    done: mx.array
    (done,) = _kernel("move", _MOVE, ("keys", "values", "moves"))(
        inputs=[*buffers, _numbers(*moves)],
        template=[("T", buffers.keys.dtype)],
        grid=(-(-max_numbers // _THREADS) * _THREADS, heads, len(moves)),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.int32],
    )
    return done


@functools.lru_cache(maxsize=64)
def _numbers(*numbers: int | RowMove) -> mx.array:
    """An int32 array for kernels, cached because all layers use the same one.

    Making it takes as long as launching a kernel: the host writes to memory that the device reads.
    """
    return mx.array(numbers, mx.int32)


@functools.cache
def _kernel(name: str, source: str, inputs: tuple[str, ...]) -> Any:
    return mx.fast.cuda_kernel(
        name=f"chairlift_{name}",
        input_names=list(inputs),
        output_names=["done"],
        source=source,
        ensure_row_contiguous=False,
    )
