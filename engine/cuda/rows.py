"""Rows of keys and values put into, and moved within, buffers on CUDA, where they are."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from chairlift.engine.cuda.kernel import KeysValues

_THREADS = 256

# Grid: (numbers of a head's tokens, key head). ``place`` is a row and the column of the first.
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

# Grid: (numbers of a head's tokens, key head, move). ``moves`` are rows from and to, the column of
# the first token, and tokens.
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
    """``tokens`` columns from ``column`` on, round the ring, of one row to another one's."""

    row: int
    to: int
    column: int
    tokens: int


def put(held: KeysValues, new: KeysValues, row: int, column: int) -> mx.array:
    """Writes a row's tokens into its columns from ``column`` on, round the ring.

    Args:
        held: ``[rows, key heads, columns, dim]``, contiguous buffers; they are written to.
        new: ``[1, key heads, tokens, dim]``.

    Returns:
        ``[1]``: once it is there, so are they.
    """
    _, heads, tokens, dim = new.keys.shape
    done: mx.array
    (done,) = _kernel("put", _PUT, ("new_keys", "new_values", "keys", "values", "place"))(
        inputs=[*new, *held, _numbers(row, column)],
        template=[("T", held.keys.dtype)],
        grid=(-(-tokens * dim // _THREADS) * _THREADS, heads, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.int32],
    )
    return done


def move(held: KeysValues, moves: Sequence[RowMove]) -> mx.array:
    """Copies rows over others within the buffers; no row is in two of the moves. See ``put``."""
    _, heads, _, dim = held.keys.shape
    most = max(one.tokens for one in moves) * dim
    done: mx.array
    (done,) = _kernel("move", _MOVE, ("keys", "values", "moves"))(
        inputs=[*held, _numbers(*moves)],
        template=[("T", held.keys.dtype)],
        grid=(-(-most // _THREADS) * _THREADS, heads, len(moves)),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.int32],
    )
    return done


@functools.lru_cache(maxsize=64)
def _numbers(*numbers: int | RowMove) -> mx.array:
    """The same array for all layers: the host writes to memory that the device reads, which takes
    as long as launching a kernel.
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
