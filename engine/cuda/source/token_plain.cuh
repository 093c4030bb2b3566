// Scores and sums without tensor cores: any type, any head dimension.
  __shared__ float all_mixed[WARPS][HEADS][VALUE];
  constexpr int LANES = DIM <= 64 ? 8 : (DIM <= 128 ? 16 : 32);  // that share a column
  constexpr int SIDE = 32 / LANES;    // columns that a warp takes side by side
  constexpr int DEEP = 4;             // and one behind the other
  constexpr int STRIDE = WARPS * SIDE;
  const int side = lane / LANES, at = (lane % LANES) * 8;
  const bool busy = at < DIM, has_value = at < VALUE;
  float query[HEADS][8], mixed[HEADS][8], high[HEADS], sum[HEADS];
  #pragma unroll
  for (int h = 0; h < HEADS; ++h) {
    const T* from = queries + ((long)token * heads + head + h) * DIM + (busy ? at : 0);
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
      const int column = min(base + d * STRIDE + warp * SIDE + side, last - 1);
      const int piece = busy ? at / 8 : 0, own = has_value ? at / 8 : 0;
      if (column < begin) {
        const long where = pooled(table[column / PAGE], column);
        key[d] = piece_of<T, DIM, GROUP, BITS>(
            keys + where * row_size<T, DIM, GROUP, BITS>(), piece);
        value[d] = piece_of<T, VALUE, GROUP, BITS>(
            values + where * row_size<T, VALUE, GROUP, BITS>(), own);
      } else {
        const long where = fresh - (long)(stop - 1 - column) * key_heads;
        key[d] = reinterpret_cast<const Eight<T>*>(new_keys + where * DIM)[piece];
        value[d] = reinterpret_cast<const Eight<T>*>(new_values + where * VALUE)[own];
      }
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
        if (CAPPED) score[d][h] = capped(score[d][h], 1.f, cap[0]);
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
      if (has_value) {
        #pragma unroll
        for (int i = 0; i < 8; ++i) all_mixed[warp][h][at + i] = mixed[h][i];
      }
      if (lane == 0) { all_high[warp][h] = high[h]; all_sum[warp][h] = sum[h]; }
    }
  }
