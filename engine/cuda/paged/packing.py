"""A CUDA kernel that quantizes a step's keys and values: into pages, and rounded for the step.

A row of a page, one token of one key head, is that of ``Quantization.pack``: codes of 8 or 4 bits,
then the scales, then the biases of its groups. A number is ``scale * code + bias``.
"""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx

from chairlift.cache.pages.kernels import KeysValues
from chairlift.cache.pages.page import PAGE_TOKENS
from chairlift.cache.quantized import Quantization
from chairlift.engine.cuda.paged.ptx import HEADER

# Functions of packed rows, which all kernels over pages share. GROUP and BITS are 0 if the pages
# have the type of the keys; T is that type.
PACKED_ROWS = """
// The numbers, of the pool's type, that a column of one key head has.
template <typename T, int DIM, int GROUP, int BITS> __device__ constexpr int row_size() {
  if constexpr (BITS == 0) return DIM;
  else return DIM * BITS / 32 + 2 * DIM / GROUP * (int)sizeof(T) / 4;
}

// The numbers 8 * piece to 8 * piece + 7 of a column.
template <typename T, int DIM, int GROUP, int BITS, typename Pool>
__device__ inline Eight<T> piece_of(const Pool* row, int piece) {
  if constexpr (BITS == 0) {
    return reinterpret_cast<const Eight<T>*>(row)[piece];
  } else {
    unsigned codes[2];
    codes[0] = row[piece * BITS / 4];
    if constexpr (BITS == 8) codes[1] = row[piece * 2 + 1];
    const T* scales = reinterpret_cast<const T*>(row + DIM * BITS / 32) + piece * 8 / GROUP;
    const float scale = static_cast<float>(scales[0]);
    const float bias = static_cast<float>(scales[DIM / GROUP]);
    Eight<T> numbers;
    #pragma unroll
    for (int i = 0; i < 8; ++i) {
      const unsigned code = codes[i * BITS / 32] >> (i * BITS % 32) & ((1u << BITS) - 1);
      numbers.v[i] = static_cast<T>(scale * static_cast<float>(code) + bias);
    }
    return numbers;
  }
}
"""

# Grid: (one block, key head, token). The first of the two warps has the key, the second the value;
# each lane eight numbers.
_SOURCE = """
  constexpr int PIECES = DIM / 8, TOGETHER = GROUP / 8;  // lanes of a group
  constexpr int MOST = (1 << BITS) - 1, ROW = row_size<T, DIM, GROUP, BITS>();
  const int lane = threadIdx.x % 32, key_head = blockIdx.y, key_heads = gridDim.y;
  const int token = blockIdx.z;
  const bool second = threadIdx.x >= 32, busy = lane < PIECES;
  const long place = ((long)token * key_heads + key_head) * PIECES + lane;
  Eight<T> numbers = {};
  if (busy) numbers = reinterpret_cast<const Eight<T>*>(second ? new_values : new_keys)[place];
  float low = static_cast<float>(numbers.v[0]), high = low;
  #pragma unroll
  for (int i = 1; i < 8; ++i) {
    low = fminf(low, static_cast<float>(numbers.v[i]));
    high = fmaxf(high, static_cast<float>(numbers.v[i]));
  }
  #pragma unroll
  for (int other = 1; other < TOGETHER; other *= 2) {
    low = fminf(low, __shfl_xor_sync(0xffffffffu, low, other));
    high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, other));
  }
  if (!busy) return;
  const T own_bias = static_cast<T>(low);
  const float bias = static_cast<float>(own_bias);
  const T own_scale = static_cast<T>((high - bias) / MOST);
  const float scale = static_cast<float>(own_scale), steps = scale > 0.f ? 1.f / scale : 0.f;
  unsigned codes[2] = {};
  #pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float nearest = rintf((static_cast<float>(numbers.v[i]) - bias) * steps);
    const unsigned code = static_cast<unsigned>(fminf(fmaxf(nearest, 0.f), MOST));
    codes[i * BITS / 32] |= code << (i * BITS % 32);
    numbers.v[i] = static_cast<T>(scale * static_cast<float>(code) + bias);
  }
  reinterpret_cast<Eight<T>*>(second ? rounded_values : rounded_keys)[place] = numbers;
  const int column = stops[token] - 1;
  const int page = tables[(long)owners[token] * tables_shape[1] + column / PAGE];
  unsigned* row = const_cast<unsigned*>(second ? values : keys) +
      (((long)page * key_heads + key_head) * PAGE + column % PAGE) * ROW;
  row[lane * BITS / 4] = codes[0];
  if (BITS == 8) row[lane * BITS / 4 + 1] = codes[1];
  if (lane % TOGETHER == 0) {
    T* scales = reinterpret_cast<T*>(row + DIM * BITS / 32) + lane / TOGETHER;
    scales[0] = own_scale;
    scales[DIM / GROUP] = own_bias;
  }
"""


def pack(
    new: KeysValues,
    pool: KeysValues,
    tables: mx.array,
    owners: mx.array,
    stops: mx.array,
    quantization: Quantization,
) -> KeysValues:
    """Quantizes tokens into the pool.

    Args:
        new: ``[tokens, key heads, 1, dim]``; the quantization's group divides ``dim``.
        pool: ``[pages, key heads, PAGE_TOKENS, packed]`` uint32, contiguous.
        tables: ``[sequences, width]`` int32, each sequence's pages.
        owners: ``[tokens]`` int32, each token's row of ``tables``.
        stops: ``[tokens]`` int32, each token's position plus one.

    Returns:
        The tokens as attention reads them from the pool, in the shape and type of ``new``.
    """
    tokens, key_heads, _, dim = new.keys.shape
    results = _kernel()(
        inputs=[*new, *pool, tables, owners, stops],
        template=[
            ("T", new.keys.dtype),
            ("DIM", dim),
            ("PAGE", PAGE_TOKENS),
            *template_of(quantization),
        ],
        grid=(64, key_heads, tokens),
        threadgroup=(64, 1, 1),
        output_shapes=[new.keys.shape] * 2,
        output_dtypes=[new.keys.dtype] * 2,
    )
    return KeysValues(*results)


def template_of(quantization: Quantization | None) -> list[tuple[str, int]]:
    """The template arguments GROUP and BITS of a kernel over pages."""
    if quantization is None:
        return [("GROUP", 0), ("BITS", 0)]
    return [("GROUP", quantization.group), ("BITS", quantization.bits)]


@functools.cache
def _kernel() -> Any:
    return mx.fast.cuda_kernel(
        name="chairlift_pages_pack",
        input_names=["new_keys", "new_values", "keys", "values", "tables", "owners", "stops"],
        output_names=["rounded_keys", "rounded_values"],
        header=HEADER + PACKED_ROWS,
        source=_SOURCE,
    )
