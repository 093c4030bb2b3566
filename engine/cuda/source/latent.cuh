// Grid: (split, part of the query heads, token). All heads of a token see one sequence of keys, of
// LATENT numbers that are also the values, and of ROTARY more. A token uses as many splits as it
// needs for ``span`` columns each at most, or all of them; they begin at multiples of COLUMNS.
//
// A tile of COLUMNS columns, which lies in one page, passes through shared memory. SIDES warps
// share 16 heads: each of them computes the scores of its part of the columns, and then, with the
// scores of all, its part of the values. Rows in shared memory are eight numbers longer than
// needed, so that the eight rows of a matrix lie in different banks. While one block waits for its
// columns, another one on the same processor computes. Scores are exponents of two.
  constexpr float LEAST = -1e30f, NEVER = -3e38f, LOG2_E = 1.4426950408889634f;
  constexpr int THREADS = WARPS * 32, SIDES = WARPS / GROUPS, ROWS = GROUPS * 16;
  constexpr int OWN = COLUMNS / SIDES;  // columns whose scores a warp computes
  constexpr int DIMS = LATENT / SIDES;  // numbers of a value that a warp computes
  constexpr int PIECES = (LATENT + ROTARY) / 8, LATENTS = LATENT / 8, STRIDE = PIECES + 1;
  constexpr int SCORES = COLUMNS + 8;  // of a row
  static_assert(OWN == 8 && DIMS % 16 == 0 && LATENT % 32 == 0 && ROTARY % 32 == 0);
  const int heads = queries_shape[1];
  const int splits = gridDim.x, split = blockIdx.x, token = blockIdx.z;
  const int head = blockIdx.y * ROWS;  // the first of the part
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const int group = warp / SIDES, side = warp % SIDES;
  if (lengths[token] == 0) return;
  const int* table = pages + pages[owners[token]];
  const int begin = begins[token], stop = stops[token], start = stop - lengths[token];
  const int unit = start / COLUMNS, units = (stop + COLUMNS - 1) / COLUMNS - unit;
  const int used = MANY ? min(splits, (units * COLUMNS + span[0] - 1) / span[0]) : 1;
  if (split >= used) return;
  const int first = max(start, (unit + units * split / used) * COLUMNS);
  const int last = min(stop, (unit + units * (split + 1) / used) * COLUMNS);
  if (split == 0 && blockIdx.y == 0 && threadIdx.x < PIECES) {
    const int piece = threadIdx.x;
    // Nobody reads this column of the pool in this step.
    const long where = (long)table[(stop - 1) / PAGE] * PAGE + (stop - 1) % PAGE;
    if (piece < LATENTS) {
      *(Eight<T>*)(keys + where * LATENT + piece * 8) =
          reinterpret_cast<const Eight<T>*>(new_keys + (long)token * LATENT)[piece];
    } else {
      *(Eight<T>*)(values + where * ROTARY + (piece - LATENTS) * 8) =
          reinterpret_cast<const Eight<T>*>(new_values + (long)token * ROTARY)[piece - LATENTS];
    }
  }
  DYNAMIC_SHARED(shared, (ROWS + COLUMNS) * STRIDE * 16 + ROWS * SCORES * 4)
  Eight<T>* all_queries = (Eight<T>*)shared;
  Eight<T>* tile = all_queries + ROWS * STRIDE;
  float* all_scores = reinterpret_cast<float*>(tile + COLUMNS * STRIDE);

  // Begins to copy a row of LATENT and ROTARY numbers; with zeros, if it is not ``real``.
  const auto load_row = [&](Eight<T>* to, const T* latent, const T* own, bool real) {
    #pragma unroll
    for (int at = 0; at < PIECES; at += 32) {
      const int piece = at + lane;
      if (piece < PIECES)
        copy_later(to + piece,
            piece < LATENTS ? latent + piece * 8 : own + (piece - LATENTS) * 8, real);
    }
  };
  // The same for the columns from ``base`` on.
  const auto load = [&](int base) {
    const long page = (long)table[base / PAGE] * PAGE + base % PAGE;
    #pragma unroll 2
    for (int row = warp; row < COLUMNS; row += WARPS) {
      const int column = base + row;
      const bool old = column < begin;
      const long at = old ? page + row : token + (column - stop + 1);
      const bool real = column >= first && column < last;
      // Where nothing is read, any address within the arrays serves.
      const long from = real ? at : 0;
      load_row(tile + row * STRIDE, (old ? keys : new_keys) + from * LATENT,
          (old ? values : new_values) + from * ROTARY, real);
    }
  };
  for (int row = warp; row < ROWS; row += WARPS) {
    const bool real = head + row < heads;
    const long at = (long)token * heads + (real ? head + row : 0);
    load_row(all_queries + row * STRIDE, queries + at * LATENT, rotary + at * ROTARY, real);
  }
  int base = first / COLUMNS * COLUMNS;
  load(base);

  float mixed[DIMS / 8][4] = {}, high[2] = {LEAST, LEAST}, sum[2] = {0.f, 0.f};
  const float factor = scale[0];
  const Eight<T>* query = all_queries + (group * 16 + lane % 16) * STRIDE + lane / 16;
  const Eight<T>* key = tile + (side * OWN + lane % 8) * STRIDE + lane / 8;
  const Eight<T>* value =
      tile + (lane / 8 % 2 * 8 + lane % 8) * STRIDE + side * (DIMS / 8) + lane / 16;
  float* scores = all_scores + (group * 16 + g) * SCORES + 2 * c;
  for (; base < last; base += COLUMNS) {
    wait_for_copies();
    __syncthreads();  // the tile is here
    float score[4] = {};
    const auto add = [&](int k) {  // products of 32 numbers
      unsigned own[4], theirs[4];
      load_matrices(theirs, key + 4 * k);
      load_matrices(own, query + 4 * k);
      multiply<BFLOAT>(score, own, theirs[0], theirs[1]);
      load_matrices(own, query + 4 * k + 2);
      multiply<BFLOAT>(score, own, theirs[2], theirs[3]);
    };
    #pragma unroll 4
    for (int k = 0; k < LATENT / 32; ++k) add(k);
    #pragma unroll
    for (int i = 0; i < 4; ++i) score[i] *= factor;  // that of the rotary part is in its queries
    #pragma unroll
    for (int k = LATENT / 32; k < (LATENT + ROTARY) / 32; ++k) add(k);
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = base + side * OWN + 2 * c + i % 2;
      scores[i / 2 * 8 * SCORES + side * OWN + i % 2] =
          column >= first && column < last ? score[i] * LOG2_E : NEVER;
    }
    __syncthreads();  // all scores are here
    float weight[COLUMNS / 8][4];
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
      float highest = high[r];
      #pragma unroll
      for (int n = 0; n < COLUMNS / 8; ++n) {
        #pragma unroll
        for (int i = 0; i < 2; ++i) {
          weight[n][2 * r + i] = scores[r * 8 * SCORES + 8 * n + i];
          highest = fmaxf(highest, weight[n][2 * r + i]);
        }
      }
      highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 2));
      const float faded = power(high[r] - highest);
      high[r] = highest;
      sum[r] *= faded;
      #pragma unroll
      for (int n = 0; n < COLUMNS / 8; ++n) {
        #pragma unroll
        for (int i = 2 * r; i < 2 * r + 2; ++i) {
          weight[n][i] = power(weight[n][i] - highest);
          sum[r] += weight[n][i];
        }
      }
      #pragma unroll
      for (int n = 0; n < DIMS / 8; ++n) { mixed[n][2 * r] *= faded; mixed[n][2 * r + 1] *= faded; }
    }
    #pragma unroll
    for (int k = 0; k < COLUMNS / 16; ++k) {
      unsigned own[4];
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* both = weight[2 * k + i / 2] + i % 2 * 2;
        own[i] = rounded<BFLOAT>(both[0], both[1]);
      }
      #pragma unroll
      for (int n = 0; n < DIMS / 16; ++n) {
        unsigned loaded[4];
        load_transposed(loaded, value + 16 * k * STRIDE + 2 * n);
        multiply<BFLOAT>(mixed[2 * n], own, loaded[0], loaded[1]);
        multiply<BFLOAT>(mixed[2 * n + 1], own, loaded[2], loaded[3]);
      }
    }
    __syncthreads();  // nobody needs the tile or the scores
    if (base + COLUMNS < last) load(base + COLUMNS);
  }
  const int count = min(ROWS, heads - head);
  #pragma unroll
  for (int r = 0; r < 2; ++r) {
    sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 1);
    sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 2);
    const int row = group * 16 + r * 8 + g;
    if (row >= count) continue;
    const long whole = (long)token * heads + head + row;
    if (used > 1) {
      float* to = partials + (whole * splits + split) * LATENT + side * DIMS + 2 * c;
      #pragma unroll
      for (int n = 0; n < DIMS / 8; ++n) {
        to[8 * n] = mixed[n][2 * r];
        to[8 * n + 1] = mixed[n][2 * r + 1];
      }
      if (side == 0 && c == 0) {
        weights[(whole * splits + split) * 2] = high[r];
        weights[(whole * splits + split) * 2 + 1] = sum[r];
      }
    } else {
      const float share = 1.f / sum[r];
      T* to = out + whole * LATENT + side * DIMS + 2 * c;
      #pragma unroll
      for (int n = 0; n < DIMS / 8; ++n)
        *reinterpret_cast<unsigned*>(to + 8 * n) =
            rounded<BFLOAT>(mixed[n][2 * r] * share, mixed[n][2 * r + 1] * share);
    }
  }
  if (used == 1) return;
  // The last of the token's blocks merges the results of all.
  __shared__ int ended;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    int* counter = const_cast<int*>(counters) + token * gridDim.y + blockIdx.y;
    ended = atomicAdd(counter, 1) + 1;
    if (ended == used) *counter = 0;  // for the next launch
  }
  __syncthreads();
  if (ended < used) return;
  __threadfence();
  for (int i = threadIdx.x; i < count * LATENT / 4; i += THREADS) {
    const long whole = (long)token * heads + head + i / (LATENT / 4);
    float highest = LEAST, total = 0.f, result[4] = {};
    #pragma unroll 2
    for (int s = 0; s < used; ++s) {
      const long at = whole * splits + s;
      const float theirs = __ldcg(weights + at * 2), part = __ldcg(weights + at * 2 + 1);
      const float4 numbers =
          __ldcg(reinterpret_cast<const float4*>(partials + at * LATENT) + i % (LATENT / 4));
      const float higher = fmaxf(highest, theirs);
      const float mine = power(highest - higher), their = power(theirs - higher);
      highest = higher;
      total = total * mine + part * their;
      result[0] = result[0] * mine + numbers.x * their;
      result[1] = result[1] * mine + numbers.y * their;
      result[2] = result[2] * mine + numbers.z * their;
      result[3] = result[3] * mine + numbers.w * their;
    }
    const float share = 1.f / total;
    unsigned* to = reinterpret_cast<unsigned*>(out + whole * LATENT + i % (LATENT / 4) * 4);
    to[0] = rounded<BFLOAT>(result[0] * share, result[1] * share);
    to[1] = rounded<BFLOAT>(result[2] * share, result[3] * share);
  }
