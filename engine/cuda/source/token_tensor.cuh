// Scores and sums with tensor cores. A product has 16 rows, columns of the cache or numbers of a
// value, and eight columns: the query heads, at most eight, and zeros. Each warp takes UNIT columns
// of the cache at a time, which lie in one page. Their keys and values pass through the warp's own
// part of shared memory: the next keys arrive while these values are in use, and the next values
// while those keys are. Rows there are eight numbers longer than needed, so that the eight rows of
// a matrix lie in different banks. A weight is split into two numbers of the key's type, whose sum
// has 16 bits, to lose little precision.
  constexpr int STRIDE = DIM / 8 + 1;  // 16 bytes each; a value has at most as many as a key
  constexpr int STEP = WARPS * UNIT;
  __shared__ Eight<T> tiles[WARPS][2][UNIT * STRIDE];
  static_assert(sizeof(tiles) >= WARPS * HEADS * VALUE * sizeof(float), "all_mixed is in tiles");
  const int g = lane / 4, c = lane % 4;
  // Begins to copy the columns from ``base`` on, of WIDTH numbers each; those that are not seen
  // become zeros. Packed ones are there afterwards.
  const auto load = [&](auto width, Eight<T>* to, const auto* pool, const T* step, int page,
                        int base) {
    constexpr int WIDTH = decltype(width)::value, PIECES = WIDTH / 8;
    constexpr int ROW = row_size<T, WIDTH, GROUP, BITS>();
    const long each = (long)key_heads * WIDTH;
    const auto* rows = pool + pooled(page, base) * ROW;
    step += fresh * WIDTH;
    if (BITS) {
      #pragma unroll 4
      for (int i = lane; i < UNIT * PIECES; i += 32) {
        const int column = base + i / PIECES, piece = i % PIECES;
        Eight<T>* place = to + i / PIECES * STRIDE + piece;
        const bool seen = column >= first && column < last;
        if (seen && column < begin) {
          *place = piece_of<T, WIDTH, GROUP, BITS>(rows + i / PIECES * ROW, piece);
        } else {
          copy_later(place, step + (column - stop + 1) * each + piece * 8, seen);
        }
      }
    } else if (32 % PIECES == 0 && base >= first && base + UNIT <= min(last, begin)) {
      rows += lane * 8;
      to += lane / PIECES * STRIDE + lane % PIECES;
      #pragma unroll
      for (int n = 0; n < UNIT * PIECES / 32; ++n)
        copy_later(to + n * (32 / PIECES) * STRIDE, rows + n * 32 * 8, true);
    } else {
      #pragma unroll 1
      for (int i = lane; i < UNIT * PIECES; i += 32) {
        const int column = base + i / PIECES;
        const T* from = column < begin
            ? (const T*)(rows + i * 8) : step + (column - stop + 1) * each + i % PIECES * 8;
        copy_later(
            to + i / PIECES * STRIDE + i % PIECES, from, column >= first && column < last);
      }
    }
  };
  int base = (first / UNIT + warp) * UNIT;
  if (base < last) {
    const int page = table[base / PAGE];
    load(Constant<DIM>(), tiles[warp][0], keys, new_keys, page, base);
    end_copies();
    load(Constant<VALUE>(), tiles[warp][1], values, new_values, page, base);
    end_copies();
  }
  int next_page = base + STEP < last ? table[(base + STEP) / PAGE] : 0;

  unsigned query[DIM / 16][2];
  #pragma unroll
  for (int k = 0; k < DIM / 16; ++k) {
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
      const T* from = queries + ((long)token * heads + head + g) * DIM + 2 * c + 16 * k + 8 * i;
      query[k][i] = g < HEADS ? *reinterpret_cast<const unsigned*>(from) : 0;
    }
  }
  // Of the heads 2 * c and the next.
  float mixed[VALUE / 16][4] = {}, high[2], sum[2];
  #pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool sunk = SINKS && split == 0 && warp == 0 && 2 * c + i < HEADS;
    high[i] = sunk ? sinks[head + 2 * c + i] * 1.4426950408889634f : LEAST;
    sum[i] = sunk && g == 0 ? 1.f : 0.f;
  }
  const float factor = scale[0];
  const Eight<T>* key = tiles[warp][0] + lane % 16 * STRIDE + lane / 16;
  const Eight<T>* value = tiles[warp][1] + (lane / 16 * 8 + lane % 8) * STRIDE + lane / 8 % 2;

  for (; base < last; base += STEP) {
    const int next = base + STEP;
    wait_for_copies<1>();
    __syncwarp();  // the keys are here
    float score[4] = {};  // of the columns g and g + 8, each with two heads
    #pragma unroll
    for (int k = 0; k < DIM / 16; ++k) {
      unsigned loaded[4];
      load_matrices(loaded, key + 2 * k);
      multiply<BFLOAT>(score, loaded, query[k][0], query[k][1]);
    }
    __syncwarp();  // no lane needs these keys
    if (next < last) load(Constant<DIM>(), tiles[warp][0], keys, new_keys, next_page, next);
    end_copies();
    unsigned weight[2], rest[2];
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = base + g + i / 2 * 8;
      const float own = CAPPED ? capped(score[i], factor, cap[0]) : score[i] * factor;
      score[i] = column >= first && column < last ? own : NEVER;
    }
    float higher[2];
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
      higher[i] = fmaxf(score[i], score[i + 2]);
      #pragma unroll
      for (int other = 4; other < 32; other *= 2)
        higher[i] = fmaxf(higher[i], __shfl_xor_sync(0xffffffffu, higher[i], other));
      higher[i] = fmaxf(higher[i], high[i]);
    }
    if (higher[0] > high[0] || higher[1] > high[1]) {
      #pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float faded = power(high[i] - higher[i]);
        high[i] = higher[i];
        sum[i] *= faded;
        #pragma unroll
        for (int n = 0; n < VALUE / 16; ++n) { mixed[n][i] *= faded; mixed[n][i + 2] *= faded; }
      }
    }
    #pragma unroll
    for (int k = 0; k < 2; ++k) {
      const float one = power(score[2 * k] - high[0]), two = power(score[2 * k + 1] - high[1]);
      sum[0] += one;
      sum[1] += two;
      const T one_high = static_cast<T>(one), two_high = static_cast<T>(two);
      weight[k] = transposed(pair(one_high, two_high));
      rest[k] = transposed(rounded<BFLOAT>(
          one - static_cast<float>(one_high), two - static_cast<float>(two_high)));
    }
    wait_for_copies<1>();
    __syncwarp();  // the values are here
    #pragma unroll
    for (int n = 0; n < VALUE / 16; ++n) {
      unsigned loaded[4];
      load_transposed(loaded, value + 2 * n);
      multiply<BFLOAT>(mixed[n], loaded, weight[0], weight[1]);
      multiply<BFLOAT>(mixed[n], loaded, rest[0], rest[1]);
    }
    __syncwarp();  // no lane needs these values
    if (next < last) load(Constant<VALUE>(), tiles[warp][1], values, new_values, next_page, next);
    end_copies();
    if (next + STEP < last) next_page = table[(next + STEP) / PAGE];
  }
  __syncthreads();  // no warp needs its tiles
  auto& all_mixed = *reinterpret_cast<float(*)[WARPS][HEADS][VALUE]>(&tiles);
  #pragma unroll
  for (int i = 0; i < 2; ++i) {
    #pragma unroll
    for (int other = 4; other < 32; other *= 2)
      sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], other);
    const int h = 2 * c + i;
    if (h >= HEADS) continue;
    #pragma unroll
    for (int n = 0; n < VALUE / 16; ++n) {
      all_mixed[warp][h][16 * n + g] = mixed[n][i];
      all_mixed[warp][h][16 * n + g + 8] = mixed[n][i + 2];
    }
    if (g == 0) { all_high[warp][h] = high[i]; all_sum[warp][h] = sum[i]; }
  }
