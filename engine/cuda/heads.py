"""Two CUDA kernels for the operations between a transformer block's matrix products.

``split_heads`` splits the fused product of queries, keys and values, and applies biases, head norms
and rotary embedding. ``swiglu`` turns the fused product of gate and up into their SwiGLU.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx

from chairlift.engine.cuda.constants import constant

_WARPS = 4
_THREADS = 256
# Numbers that each thread of SwiGLU computes.
WIDE = 8

# Grid: (query, key and value heads, token); one warp for each head of a token. A lane computes
# pairs of numbers that the rotary embedding rotates together, then pairs of the remaining numbers.
_SPLIT = """
  constexpr int PAIRS = DIM / 2, HALF = TURNED / 2, EACH = (PAIRS + 31) / 32;
  const int head = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int length = product_shape[1], token = blockIdx.y;
  const int row = token / length, at = token % length;
  if (head >= HEADS + 2 * KEY_HEADS) return;
  const bool is_value = head >= HEADS + KEY_HEADS, is_key = head >= HEADS && !is_value;
  const long from = ((long)token * (HEADS + 2 * KEY_HEADS) + head) * DIM;
  int low[EACH], high[EACH];
  float lows[EACH], highs[EACH], sum = 0.f;
  #pragma unroll
  for (int e = 0; e < EACH; ++e) {
    const int pair = lane + 32 * e;
    if (pair >= PAIRS) break;
    low[e] = pair < HALF ? pair : TURNED + 2 * (pair - HALF);
    high[e] = pair < HALF ? pair + HALF : low[e] + 1;
    lows[e] = static_cast<float>(product[from + low[e]]);
    highs[e] = static_cast<float>(product[from + high[e]]);
    if (BIAS) {
      lows[e] = static_cast<float>(T(lows[e] + static_cast<float>(bias[head * DIM + low[e]])));
      highs[e] = static_cast<float>(T(highs[e] + static_cast<float>(bias[head * DIM + high[e]])));
    }
    sum += lows[e] * lows[e] + highs[e] * highs[e];
  }
  if (NORMS && !is_value) {
    #pragma unroll
    for (int apart = 16; apart; apart /= 2) sum += __shfl_xor_sync(0xffffffff, sum, apart);
    const float factor = rsqrtf(sum / DIM + eps[0]);
    const T* weight = is_key ? key_norm : query_norm;
    #pragma unroll
    for (int e = 0; e < EACH; ++e) {
      if (lane + 32 * e >= PAIRS) break;
      lows[e] = static_cast<float>(T(lows[e] * factor * static_cast<float>(weight[low[e]])));
      highs[e] = static_cast<float>(T(highs[e] * factor * static_cast<float>(weight[high[e]])));
    }
  }
  const int own = is_value ? head - HEADS - KEY_HEADS : is_key ? head - HEADS : head;
  T* const to = is_value ? values : is_key ? keys : queries;
  const long where = (((long)row * (is_value || is_key ? KEY_HEADS : HEADS) + own) * length + at)
      * DIM;
  const float position = positions[row] + at;
  #pragma unroll
  for (int e = 0; e < EACH; ++e) {
    const int pair = lane + 32 * e;
    if (pair >= PAIRS) break;
    float sine = 0.f, cosine = 1.f;
    if (pair < HALF && !is_value) sincosf(position * frequencies[pair], &sine, &cosine);
    to[where + low[e]] = T(lows[e] * cosine - highs[e] * sine);
    to[where + high[e]] = T(lows[e] * sine + highs[e] * cosine);
  }
"""

# One-dimensional grid: each thread computes eight numbers of a token's SwiGLU.
_SWIGLU = """
  struct alignas(8 * sizeof(T)) Eight { T v[8]; };
  const long i = (long)blockIdx.x * blockDim.x + threadIdx.x;
  const int wide = product_shape[2] / 16;
  if (i >= (long)product_shape[0] * product_shape[1] * wide) return;
  const Eight* from = reinterpret_cast<const Eight*>(product) + i / wide * 2 * wide + i % wide;
  const Eight gate = from[0], up = from[wide];
  Eight mixed;
  #pragma unroll
  for (int n = 0; n < 8; ++n) {
    const float g = static_cast<float>(gate.v[n]);
    mixed.v[n] = T(g / (1.f + expf(-g)) * static_cast<float>(up.v[n]));
  }
  reinterpret_cast<Eight*>(out)[i] = mixed;
"""


class HeadNorms(NamedTuple):
    """The RMS norms of query heads and of key heads: weights ``[dim]``."""

    query: mx.array
    key: mx.array
    eps: float


@dataclass(frozen=True, eq=False)
class Heads:
    """The form of an attention layer's heads.

    Attributes:
        heads: number of query heads.
        key_heads: number of key heads, and of value heads.
        dim: numbers of one head.
        frequencies: ``[pairs]`` float32, the angle by which one position rotates each pair. The
            first ``2 * pairs`` numbers of a head are rotated, number i together with i + pairs.
        norms: None if heads are not normalized.
        bias: ``[(heads + 2 * key_heads) * dim]``, or None.
    """

    heads: int
    key_heads: int
    dim: int
    frequencies: mx.array
    norms: HeadNorms | None
    bias: mx.array | None


class SplitHeads(NamedTuple):
    """Queries ``[rows, heads, length, dim]``; keys, values ``[rows, key heads, length, dim]``."""

    queries: mx.array
    keys: mx.array
    values: mx.array


def split_heads(product: mx.array, positions: mx.array, heads: Heads) -> SplitHeads:
    """Splits a product into queries, keys and values, with biases, norms and rotary embedding.

    Args:
        product: ``[rows, length, (heads + 2 * key_heads) * dim]``.
        positions: ``[rows]`` int32, the position of each row's first token.
    """
    rows, length, _ = product.shape
    nothing = constant(0.0, product.dtype)
    norms = heads.norms or HeadNorms(nothing, nothing, 0.0)
    counts = heads.heads, heads.key_heads, heads.key_heads
    outputs = _split()(
        inputs=[
            product,
            positions,
            heads.frequencies,
            norms.query,
            norms.key,
            constant(norms.eps, mx.float32),
            nothing if heads.bias is None else heads.bias,
        ],
        template=[
            ("T", product.dtype),
            ("HEADS", heads.heads),
            ("KEY_HEADS", heads.key_heads),
            ("DIM", heads.dim),
            ("TURNED", 2 * heads.frequencies.size),
            ("NORMS", heads.norms is not None),
            ("BIAS", heads.bias is not None),
            ("WARPS", _WARPS),
        ],
        grid=(-(-sum(counts) // _WARPS) * _WARPS * 32, rows * length, 1),
        threadgroup=(_WARPS * 32, 1, 1),
        output_shapes=[(rows, count, length, heads.dim) for count in counts],
        output_dtypes=[product.dtype] * 3,
    )
    return SplitHeads(*outputs)


def swiglu(product: mx.array) -> mx.array:
    """``silu(gate) * up`` of ``[rows, length, gate and up]``; both have a multiple of WIDE numbers.

    Returns:
        ``[rows, length, numbers of gate]``.
    """
    rows, length, both = product.shape
    width = both // 2
    out: mx.array
    (out,) = _swiglu()(
        inputs=[product],
        template=[("T", product.dtype)],
        grid=(-(-rows * length * width // WIDE // _THREADS) * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(rows, length, width)],
        output_dtypes=[product.dtype],
    )
    return out


@functools.cache
def _split() -> Any:
    return mx.fast.cuda_kernel(
        name="chairlift_split_heads",
        input_names=[
            "product",
            "positions",
            "frequencies",
            "query_norm",
            "key_norm",
            "eps",
            "bias",
        ],
        output_names=["queries", "keys", "values"],
        source=_SPLIT,
    )


@functools.cache
def _swiglu() -> Any:
    return mx.fast.cuda_kernel(
        name="chairlift_swiglu",
        input_names=["product"],
        output_names=["out"],
        source=_SWIGLU,
    )
