"""CUDA source of decode attention, in fragments that ``engine.cuda.kernel`` joins.

The first kernel is ``BEGIN``, then ``PLAIN`` or ``TENSOR``, then ``END``, with ``HEADER`` before
it; ``MERGE`` is the second kernel. MLX generates their signatures from the names of inputs, outputs
and template arguments that ``kernel`` gives it.
"""

from __future__ import annotations

HEADER = """
template <typename T> struct alignas(16) Eight { T v[8]; };
struct alignas(16) Four { unsigned v[4]; };

template <typename T> __device__ inline unsigned pair(T low, T high) {
  return reinterpret_cast<unsigned short&>(low) |
      (static_cast<unsigned>(reinterpret_cast<unsigned short&>(high)) << 16);
}

// Adds eight rows of 16 numbers, times 16 columns of eight: of a thread's row the columns c, c + 1.
template <bool BFLOAT>
__device__ inline void multiply(
    float (&sum)[2], unsigned row0, unsigned row1, unsigned column0, unsigned column1) {
  float unused0, unused1;
  if constexpr (BFLOAT) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %5}, {%7, %8}, {%0, %1, %9, %9};"
        : "+f"(sum[0]), "+f"(sum[1]), "=f"(unused0), "=f"(unused1)
        : "r"(row0), "r"(0), "r"(row1), "r"(column0), "r"(column1), "f"(0.f));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %5}, {%7, %8}, {%0, %1, %9, %9};"
        : "+f"(sum[0]), "+f"(sum[1]), "=f"(unused0), "=f"(unused1)
        : "r"(row0), "r"(0), "r"(row1), "r"(column0), "r"(column1), "f"(0.f));
  }
}
"""

# Grid: (split, key head and group, row). Scores are exponents of two: log2(e) is part of ``scale``.
BEGIN = """
  constexpr float LEAST = -1e30f, NEVER = -3e38f;
  const int columns = keys_shape[2], key_heads = keys_shape[1];
  const int splits = gridDim.x, split = blockIdx.x, row = blockIdx.z;
  const int parts = gridDim.y / key_heads, key_head = blockIdx.y / parts;
  const int head = blockIdx.y * HEADS;  // the first of the group
  const int heads = gridDim.y * HEADS;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int held = lengths[row];
  const int first = (long)held * split / splits, last = (long)held * (split + 1) / splits;
  int start = stops[row] - held;
  if (start < 0) start += columns;
  const int newest = stops[row] - 1;
  const long own = ((long)row * key_heads + key_head) * columns;
  const long fresh = ((long)row * key_heads + key_head) * DIM;
  if (split == 0 && blockIdx.y % parts == 0 && threadIdx.x < DIM / 8) {
    const int at = threadIdx.x * 8;
    const long where = (own + newest) * DIM + at;  // that nobody reads in this step
    *reinterpret_cast<Eight<T>*>(const_cast<T*>(keys) + where) =
        *reinterpret_cast<const Eight<T>*>(new_keys + fresh + at);
    *reinterpret_cast<Eight<T>*>(const_cast<T*>(values) + where) =
        *reinterpret_cast<const Eight<T>*>(new_values + fresh + at);
  }
  __shared__ float all_mixed[WARPS][HEADS][DIM];
  __shared__ float all_high[WARPS][HEADS], all_sum[WARPS][HEADS];
"""

# Scores and sums without tensor cores: any type, any head dimension.
PLAIN = """  constexpr int LANES = DIM <= 64 ? 8 : (DIM <= 128 ? 16 : 32);  // that share a column
  constexpr int SIDE = 32 / LANES;    // columns that a warp takes side by side
  constexpr int DEEP = 4;             // and one behind the other
  constexpr int STRIDE = WARPS * SIDE;
  const int side = lane / LANES, at = (lane % LANES) * 8;
  const bool busy = at < DIM;
  float query[HEADS][8], mixed[HEADS][8], high[HEADS], sum[HEADS];
  #pragma unroll
  for (int h = 0; h < HEADS; ++h) {
    const T* from = queries + ((long)row * heads + head + h) * DIM + (busy ? at : 0);
    #pragma unroll
    for (int i = 0; i < 8; ++i) {
      query[h][i] = busy ? static_cast<float>(from[i]) * scale[0] : 0.f;
      mixed[h][i] = 0.f;
    }
    high[h] = LEAST;
    sum[h] = 0.f;
    if (SINKS && split == 0 && warp == 0 && side == 0) {
      high[h] = sinks[head + h] * 1.4426950408889634f;
      sum[h] = 1.f;
    }
  }
  for (int base = first; base < last; base += STRIDE * DEEP) {
    float score[DEEP][HEADS];
    Eight<T> key[DEEP], value[DEEP];
    #pragma unroll
    for (int d = 0; d < DEEP; ++d) {  // all of it on its way before any of it is needed
      int column = start + min(base + d * STRIDE + warp * SIDE + side, last - 1);
      if (column >= columns) column -= columns;
      const bool is_new = column == newest;
      const long where = (is_new ? fresh : (own + column) * DIM) + (busy ? at : 0);
      key[d] = *reinterpret_cast<const Eight<T>*>((is_new ? new_keys : keys) + where);
      value[d] = *reinterpret_cast<const Eight<T>*>((is_new ? new_values : values) + where);
    }
    #pragma unroll
    for (int d = 0; d < DEEP; ++d) {
      #pragma unroll
      for (int h = 0; h < HEADS; ++h) score[d][h] = 0.f;
      #pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float number = static_cast<float>(key[d].v[i]);
        #pragma unroll
        for (int h = 0; h < HEADS; ++h) score[d][h] += query[h][i] * number;
      }
    }
    #pragma unroll
    for (int d = 0; d < DEEP; ++d) {
      const bool real = base + d * STRIDE + warp * SIDE + side < last;
      #pragma unroll
      for (int h = 0; h < HEADS; ++h) {
        #pragma unroll
        for (int other = LANES / 2; other > 0; other /= 2)
          score[d][h] += __shfl_xor_sync(0xffffffffu, score[d][h], other);
        if (!real) score[d][h] = NEVER;
      }
    }
    #pragma unroll
    for (int h = 0; h < HEADS; ++h) {
      float higher = high[h];
      #pragma unroll
      for (int d = 0; d < DEEP; ++d) higher = fmaxf(higher, score[d][h]);
      const float faded = exp2f(high[h] - higher);
      high[h] = higher;
      sum[h] *= faded;
      #pragma unroll
      for (int i = 0; i < 8; ++i) mixed[h][i] *= faded;
      #pragma unroll
      for (int d = 0; d < DEEP; ++d) {
        const float weight = exp2f(score[d][h] - higher);
        sum[h] += weight;
        #pragma unroll
        for (int i = 0; i < 8; ++i) mixed[h][i] += weight * static_cast<float>(value[d].v[i]);
      }
    }
  }
  #pragma unroll
  for (int h = 0; h < HEADS; ++h) {
    #pragma unroll
    for (int other = LANES; other < 32; other *= 2) {
      const float theirs = __shfl_xor_sync(0xffffffffu, high[h], other);
      const float higher = fmaxf(high[h], theirs);
      const float mine = exp2f(high[h] - higher), their = exp2f(theirs - higher);
      sum[h] = sum[h] * mine + __shfl_xor_sync(0xffffffffu, sum[h], other) * their;
      #pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float part = __shfl_xor_sync(0xffffffffu, mixed[h][i], other);
        mixed[h][i] = mixed[h][i] * mine + part * their;
      }
      high[h] = higher;
    }
  }
  if (side == 0) {
    #pragma unroll
    for (int h = 0; h < HEADS; ++h) {
      if (busy) {
        #pragma unroll
        for (int i = 0; i < 8; ++i) all_mixed[warp][h][at + i] = mixed[h][i];
      }
      if (lane == 0) { all_high[warp][h] = high[h]; all_sum[warp][h] = sum[h]; }
    }
  }
"""

# Scores and sums with tensor cores. A product has 16 rows: the query heads, at most eight, and
# zeros. A thread has two neighbouring numbers in each of two columns of a key. Queries and keys
# assign dimensions to threads alike, so that a thread reads 16 bytes at a time. A thread has four
# columns of values, and pairs neighbouring ones. A weight is split into two numbers of the key's
# type, whose sum has 16 bits, to lose little precision.
TENSOR = """
  const int g = lane / 4, c = lane % 4;
  const bool busy = g < HEADS;
  Four query[DIM / 32];
  float mixed[DIM / 8][2], high = LEAST, sum = 0.f;
  #pragma unroll
  for (int j = 0; j < DIM / 32; ++j) {
    const T* from = queries + ((long)row * heads + head + (busy ? g : 0)) * DIM + 32 * j + 8 * c;
    query[j] = *reinterpret_cast<const Four*>(from);
    #pragma unroll
    for (int i = 0; i < 4; ++i) query[j].v[i] = busy ? query[j].v[i] : 0;
  }
  #pragma unroll
  for (int i = 0; i < DIM / 8; ++i) mixed[i][0] = mixed[i][1] = 0.f;
  if (SINKS && split == 0 && warp == 0 && busy) {
    high = sinks[head + g] * 1.4426950408889634f;
    sum = c == 0 ? 1.f : 0.f;
  }
  for (int base = first + warp * 16; base < last; base += WARPS * 16) {
    Four key[2][DIM / 32], value[4][DIM / 64];
    #pragma unroll
    for (int k = 0; k < 2; ++k) {
      int column = start + min(base + g + 8 * k, last - 1);
      if (column >= columns) column -= columns;
      const T* from = column == newest ? new_keys + fresh : keys + (own + column) * DIM;
      #pragma unroll
      for (int j = 0; j < DIM / 32; ++j)
        key[k][j] = *reinterpret_cast<const Four*>(from + 32 * j + 8 * c);
    }
    #pragma unroll
    for (int k = 0; k < 4; ++k) {
      int column = start + min(base + 2 * c + k % 2 + k / 2 * 8, last - 1);
      if (column >= columns) column -= columns;
      const T* from = column == newest ? new_values + fresh : values + (own + column) * DIM;
      #pragma unroll
      for (int j = 0; j < DIM / 64; ++j)
        value[k][j] = *reinterpret_cast<const Four*>(from + 64 * j + 8 * g);
    }
    float score[2][2] = {};
    #pragma unroll
    for (int k = 0; k < 2; ++k) {
      #pragma unroll
      for (int j = 0; j < DIM / 32; ++j) {
        const unsigned *q = query[j].v, *from = key[k][j].v;
        multiply<BFLOAT>(score[k], q[0], q[1], from[0], from[1]);
        multiply<BFLOAT>(score[k], q[2], q[3], from[2], from[3]);
      }
    }
    float higher = high;
    #pragma unroll
    for (int k = 0; k < 4; ++k) {
      const bool real = base + 2 * c + k % 2 + k / 2 * 8 < last;
      float& own_score = score[k / 2][k % 2];
      own_score = real ? own_score * scale[0] : NEVER;
      higher = fmaxf(higher, own_score);
    }
    higher = fmaxf(higher, __shfl_xor_sync(0xffffffffu, higher, 1));
    higher = fmaxf(higher, __shfl_xor_sync(0xffffffffu, higher, 2));
    const float faded = exp2f(high - higher);
    high = higher;
    sum *= faded;
    #pragma unroll
    for (int i = 0; i < DIM / 8; ++i) { mixed[i][0] *= faded; mixed[i][1] *= faded; }
    unsigned weight[2], rest[2];
    #pragma unroll
    for (int k = 0; k < 2; ++k) {
      const float one = exp2f(score[k][0] - higher), two = exp2f(score[k][1] - higher);
      sum += one + two;
      const T one_high = static_cast<T>(one), two_high = static_cast<T>(two);
      weight[k] = pair(one_high, two_high);
      rest[k] = pair(
          static_cast<T>(one - static_cast<float>(one_high)),
          static_cast<T>(two - static_cast<float>(two_high)));
    }
    #pragma unroll
    for (int j = 0; j < DIM / 64; ++j) {
      #pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int half = i % 2 ? 0x7632 : 0x5410;
        const unsigned near = __byte_perm(value[0][j].v[i / 2], value[1][j].v[i / 2], half);
        const unsigned far = __byte_perm(value[2][j].v[i / 2], value[3][j].v[i / 2], half);
        multiply<BFLOAT>(mixed[8 * j + i], weight[0], weight[1], near, far);
        multiply<BFLOAT>(mixed[8 * j + i], rest[0], rest[1], near, far);
      }
    }
  }
  sum += __shfl_xor_sync(0xffffffffu, sum, 1);
  sum += __shfl_xor_sync(0xffffffffu, sum, 2);
  if (busy) {
    #pragma unroll
    for (int i = 0; i < DIM / 8; ++i) {
      const int dim = i / 8 * 64 + 16 * c + i % 8;
      all_mixed[warp][g][dim] = mixed[i][0];
      all_mixed[warp][g][dim + 8] = mixed[i][1];
    }
    if (c == 0) { all_high[warp][g] = high; all_sum[warp][g] = sum; }
  }
"""

END = """
  __syncthreads();
  for (int i = threadIdx.x; i < HEADS * DIM; i += WARPS * 32) {
    const int h = i / DIM, dim = i % DIM;
    float higher = LEAST;
    #pragma unroll
    for (int w = 0; w < WARPS; ++w) higher = fmaxf(higher, all_high[w][h]);
    float total = 0.f, result = 0.f;
    #pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const float faded = exp2f(all_high[w][h] - higher);
      total += all_sum[w][h] * faded;
      result += all_mixed[w][h][dim] * faded;
    }
    const long whole = (long)row * heads + head + h;
    if (PARTIAL) {
      out[(whole * splits + split) * DIM + dim] = result;
      if (dim == 0) {
        weights[(whole * splits + split) * 2] = higher;
        weights[(whole * splits + split) * 2 + 1] = total;
      }
    } else {
      out[whole * DIM + dim] = static_cast<T>(total > 0.f ? result / total : 0.f);
    }
  }
"""

# Grid: one block of DIM threads for each row and head.
MERGE = """
  const int splits = weights_shape[2];
  const long whole = blockIdx.x;
  float higher = -1e30f, total = 0.f, result = 0.f;
  for (int s = 0; s < splits; ++s) higher = fmaxf(higher, weights[(whole * splits + s) * 2]);
  for (int s = 0; s < splits; ++s) {
    const float faded = exp2f(weights[(whole * splits + s) * 2] - higher);
    total += weights[(whole * splits + s) * 2 + 1] * faded;
    result += parts[(whole * splits + s) * DIM + threadIdx.x] * faded;
  }
  out[whole * DIM + threadIdx.x] = static_cast<T>(total > 0.f ? result / total : 0.f);
"""
