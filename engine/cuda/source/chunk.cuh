// Grid: (key head and part of its group, split of a tile of query tokens). Each of the four warps
// has TALL times 16 of the tile's ROWS rows, pairs of a token and a head; of each 16 a thread has
// two, ``lane / 4`` and eight more. With TALL 2 a warp uses what it loads of keys and values twice.
// Queries stay in shared memory, or if HELD, with TALL 1 only, in registers. If a tile's columns are
// split, the last of its blocks merges the results. Keys and values pass through shared memory, whose
// rows are eight numbers longer than needed: so the eight rows of a matrix lie in different banks.
// Keys arrive while the former tile's values are in use, and values while the keys are. Scores are
// exponents of two: log2(e) is part of ``scale``.
  constexpr float LEAST = -1e30f, NEVER = -3e38f;
  constexpr int THREADS = 128, TALL = ROWS / 64, STRIDE = DIM + 8;  // a value has at most DIM numbers
  const int key_heads = keys_shape[1], parts = gridDim.x / key_heads;
  const int key_head = blockIdx.x / parts;
  const int head = blockIdx.x * HEADS;  // the first of the part
  const int heads = gridDim.x * HEADS;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const int* tile = tiles + (gridDim.y - 1 - blockIdx.y) * tiles_shape[1];
  const int begin = tile[1], first = tile[4], split = tile[5], splits = tile[6];
  if (splits == 0) {  // single tokens, which are computed
    constexpr int OWN = HEADS * VALUE / 8;  // of a token, this block's pieces of 16 bytes
    for (int i = threadIdx.x; i < tile[2] * OWN; i += THREADS) {
      if (lengths[tile[0] + i / OWN] == 0) continue;
      const long at = ((long)(tile[0] + i / OWN) * heads + head) * VALUE + i % OWN * 8;
      *(Eight<T>*)(out + at) = *reinterpret_cast<const Eight<T>*>(decoded + at);
    }
    return;
  }
  const int* table = pages + pages[tile[3]];
  const int tokens = min(ROWS / HEADS, tile[2] - first);
  const int position = begin + first, stop = position + tokens;
  const int start = max(0, position - window[0] + 1);  // of the columns that any row sees
  // The place of the chunk's first token among the step's keys, of DIM numbers, or values, of
  // VALUE.
  const int fresh = tile[0] * key_heads + key_head;
  // The place of a column among those of the pool.
  const auto pooled = [&](int page, int column) {
    return ((long)page * key_heads + key_head) * PAGE + column % PAGE;
  };
  // Writes the tile's tokens, of WIDTH numbers, to the pool.
  const auto write = [&](auto width, const T* pool, const T* step) {
    constexpr int WIDTH = decltype(width)::value, PIECES = WIDTH / 8;
    for (int i = threadIdx.x; i < tokens * PIECES; i += THREADS) {
      const int token = i / PIECES, at = i % PIECES * 8, column = position + token;
      // Nobody reads this column of the pool in this step.
      const long where = pooled(table[column / PAGE], column);
      const long from = fresh + (first + token) * key_heads;
      *(Eight<T>*)(pool + where * WIDTH + at) =
          *reinterpret_cast<const Eight<T>*>(step + from * WIDTH + at);
    }
  };
  if (BITS == 0 && split == 0 && blockIdx.x % parts == 0) {
    write(Constant<DIM>(), (const T*)keys, new_keys);
    write(Constant<VALUE>(), (const T*)values, new_values);
  }
  constexpr int QUERIES = HELD ? 0 : ROWS;  // in shared memory
  DYNAMIC_SHARED(shared, (QUERIES + 2 * COLUMNS) * STRIDE * 2)
  Eight<T>* all_queries = reinterpret_cast<Eight<T>*>(shared);
  Eight<T>* all_keys = all_queries + QUERIES * STRIDE / 8;
  Eight<T>* all_values = all_keys + COLUMNS * STRIDE / 8;

  // Begins to copy the columns from ``base`` on, of WIDTH numbers each; those that no row sees
  // become zeros. Packed ones are there afterwards.
  const auto load = [&](auto width, Eight<T>* to, const auto* pool, const T* packed, int page,
                        int base) {
    constexpr int WIDTH = decltype(width)::value;
    constexpr int POOLED = row_size<T, WIDTH, GROUP, BITS>();  // numbers of a column in the pool
    constexpr int PIECES = WIDTH / 8;        // of 16 bytes in a row
    constexpr int LANES = PIECES & -PIECES;  // that copy a row
    const int own_row = threadIdx.x / LANES, own_piece = threadIdx.x % LANES;
    if (THREADS / LANES > COLUMNS && own_row >= COLUMNS) return;
    const int each = key_heads * WIDTH;  // of the step's arrays, numbers of a token
    packed += (long)fresh * WIDTH;
    const bool old = base < begin;
    const bool whole = base >= start && base + COLUMNS <= (old ? begin : stop);
    to += own_row * (STRIDE / 8) + own_piece;
    if (BITS && old) {
      const auto* rows = pool + pooled(page, base) * POOLED;
      #pragma unroll 4
      for (int row = 0; row < COLUMNS; row += THREADS / LANES) {
        const int column = base + own_row + row;
        #pragma unroll
        for (int piece = 0; piece < PIECES; piece += LANES) {
          Eight<T>* place = to + row * (STRIDE / 8) + piece;
          if (column >= start && column < begin) {
            *place = piece_of<T, WIDTH, GROUP, BITS>(
                rows + (own_row + row) * POOLED, own_piece + piece);
          } else {
            copy_later(place, packed + (long)(column - begin) * each +
                (own_piece + piece) * 8, column >= start && column < stop);
          }
        }
      }
    } else if (whole) {
      const int stride = old ? WIDTH : each;
      const T* from = old ? (const T*)(pool + pooled(page, base) * POOLED)
                          : packed + (long)(base - begin) * each;
      from += own_row * stride + own_piece * 8;
      #pragma unroll
      for (int row = 0; row < COLUMNS; row += THREADS / LANES) {
        #pragma unroll
        for (int piece = 0; piece < PIECES; piece += LANES)
          copy_later(to + row * (STRIDE / 8) + piece, from + piece * 8, true);
        from += THREADS / LANES * stride;
      }
    } else {
      #pragma unroll 1  // saves registers
      for (int row = 0; row < COLUMNS; row += THREADS / LANES) {
        const int column = base + own_row + row;
        const bool real = column >= start && column < stop;
        const T* from = column < begin ? (const T*)(pool + pooled(page, column) * POOLED)
                                       : packed + (long)(column - begin) * each;
        from += own_piece * 8;
        #pragma unroll
        for (int piece = 0; piece < PIECES; piece += LANES)
          copy_later(to + row * (STRIDE / 8) + piece, from + piece * 8, real);
      }
    }
  };

  const int unit = start / COLUMNS, units = (stop + COLUMNS - 1) / COLUMNS - unit;
  const int end = min(stop, (unit + units * (split + 1) / splits) * COLUMNS);
  int base = (unit + units * split / splits) * COLUMNS;
  int page = table[base / PAGE];
  load(Constant<DIM>(), all_keys, keys, new_keys, page, base);

  const int own_rows = warp * 16 * TALL;  // the first of the warp's
  const bool idle = own_rows >= tokens * HEADS;
  // The query of a row; rows after the tile's have the last token's.
  const auto query_of = [&](int row) {
    const int token = tile[0] + first + min(row / HEADS, tokens - 1);
    return queries + ((long)token * heads + head + row % HEADS) * DIM;
  };
  unsigned held[HELD ? DIM / 16 : 1][4];
  float mixed[TALL][VALUE / 8][4] = {}, high[TALL][2], sum[TALL][2];
  for (int i = threadIdx.x; i < QUERIES * DIM / 8; i += THREADS) {
    const int row = i / (DIM / 8), piece = i % (DIM / 8);
    copy_later(all_queries + row * (STRIDE / 8) + piece, query_of(row) + piece * 8, true);
  }
  #pragma unroll
  for (int t = 0; t < TALL; ++t) {
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = own_rows + t * 16 + r * 8 + g;
      if constexpr (HELD) {
        const T* from = query_of(row) + 2 * c;
        #pragma unroll
        for (int k = 0; k < DIM / 16; ++k) {
          held[k][r] = *reinterpret_cast<const unsigned*>(from + 16 * k);
          held[k][r + 2] = *reinterpret_cast<const unsigned*>(from + 16 * k + 8);
        }
      }
      const bool sunk = SINKS && split == 0;
      high[t][r] = sunk ? sinks[head + row % HEADS] * 1.4426950408889634f : LEAST;
      sum[t][r] = sunk && c == 0 ? 1.f : 0.f;
    }
  }
  const int matrix = lane / 8;
  const T* query = reinterpret_cast<const T*>(all_queries) +
      (own_rows + matrix % 2 * 8 + lane % 8) * STRIDE + matrix / 2 * 8;
  const T* key = reinterpret_cast<const T*>(all_keys) +
      (matrix / 2 * 8 + lane % 8) * STRIDE + matrix % 2 * 8;
  const T* value = reinterpret_cast<const T*>(all_values) +
      (matrix % 2 * 8 + lane % 8) * STRIDE + matrix / 2 * 8;

  for (; base < end; base += COLUMNS) {
    const int next = base + COLUMNS;
    wait_for_copies();
    __syncthreads();  // the keys are here, and nobody needs the former values
    load(Constant<VALUE>(), all_values, values, new_values, page, base);
    if (next < end) page = table[next / PAGE];
    float score[TALL][COLUMNS / 8][4] = {};
    if (!idle) {
      #pragma unroll
      for (int k = 0; k < DIM / 16; ++k) {
        unsigned own[TALL][4];
        #pragma unroll
        for (int t = 0; t < TALL; ++t) {
          if constexpr (HELD) {
            #pragma unroll
            for (int i = 0; i < 4; ++i) own[t][i] = held[k][i];
          } else {
            load_matrices(own[t], query + 16 * t * STRIDE + 16 * k);
          }
        }
        #pragma unroll
        for (int n = 0; n < COLUMNS / 16; ++n) {
          unsigned loaded[4];
          load_matrices(loaded, key + 16 * n * STRIDE + 16 * k);
          #pragma unroll
          for (int t = 0; t < TALL; ++t) {
            multiply<BFLOAT>(score[t][2 * n], own[t], loaded[0], loaded[1]);
            multiply<BFLOAT>(score[t][2 * n + 1], own[t], loaded[2], loaded[3]);
          }
        }
      }
    }
    wait_for_copies();
    __syncthreads();  // the values are here, and nobody needs these keys
    if (next < end) load(Constant<DIM>(), all_keys, keys, new_keys, page, next);
    if (idle) continue;
    unsigned weight[TALL][COLUMNS / 16][4];
    #pragma unroll
    for (int t = 0; t < TALL; ++t) {
      float (&own)[COLUMNS / 8][4] = score[t];
      if (CAPPED) {
        #pragma unroll
        for (int n = 0; n < COLUMNS / 8; ++n) {
          #pragma unroll
          for (int i = 0; i < 4; ++i) own[n][i] = capped(own[n][i], scale[0], cap[0]);
        }
      }
      if (next > position + 1 || base < stop - window[0]) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = own_rows + t * 16 + i / 2 * 8 + g;
          const int until = position + min(row / HEADS, tokens - 1) - base - 2 * c - i % 2;
          #pragma unroll
          for (int n = 0; n < COLUMNS / 8; ++n) {
            const int behind = until - 8 * n;
            if (behind < 0 || behind >= window[0]) own[n][i] = NEVER;
          }
        }
      }
      const float factor = CAPPED ? 1.f : scale[0];
      float faded[2];
      #pragma unroll
      for (int r = 0; r < 2; ++r) {
        float highest = NEVER;
        #pragma unroll
        for (int n = 0; n < COLUMNS / 8; ++n)
          highest = fmaxf(highest, fmaxf(own[n][2 * r], own[n][2 * r + 1]));
        highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 1));
        highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 2));
        highest = fmaxf(high[t][r], highest * factor);
        faded[r] = power(high[t][r] - highest);
        high[t][r] = highest;
        sum[t][r] *= faded[r];
        #pragma unroll
        for (int n = 0; n < COLUMNS / 8; ++n) {
          #pragma unroll
          for (int i = 2 * r; i < 2 * r + 2; ++i) {
            own[n][i] = power(own[n][i] * factor - highest);
            sum[t][r] += own[n][i];
          }
        }
      }
      #pragma unroll
      for (int k = 0; k < COLUMNS / 16; ++k) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* pair_of = own[2 * k + i / 2] + i % 2 * 2;
          weight[t][k][i] = rounded<BFLOAT>(pair_of[0], pair_of[1]);
        }
      }
      // The maximum of a row seldom changes after its first columns. To know it takes registers,
      // which held queries need.
      if (HELD || __ballot_sync(0xffffffffu, faded[0] != 1.f || faded[1] != 1.f)) {
        #pragma unroll
        for (int n = 0; n < VALUE / 8; ++n) {
          #pragma unroll
          for (int i = 0; i < 4; ++i) mixed[t][n][i] *= faded[i / 2];
        }
      }
    }
    #pragma unroll
    for (int k = 0; k < COLUMNS / 16; ++k) {
      #pragma unroll
      for (int n = 0; n < VALUE / 16; ++n) {
        unsigned loaded[4];
        load_transposed(loaded, value + 16 * k * STRIDE + 16 * n);
        #pragma unroll
        for (int t = 0; t < TALL; ++t) {
          multiply<BFLOAT>(mixed[t][2 * n], weight[t][k], loaded[0], loaded[1]);
          multiply<BFLOAT>(mixed[t][2 * n + 1], weight[t][k], loaded[2], loaded[3]);
        }
      }
    }
  }
  const long rows = (long)(tile[0] + first) * heads + head;  // of the first token, in ``out``
  const long place = (long)tile[7] * gridDim.x + blockIdx.x * splits;  // of the first split
  #pragma unroll
  for (int e = 0; e < 2 * TALL; ++e) {
    const int t = e / 2, r = e % 2;
    float total = sum[t][r];
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    const float share = 1.f / total;
    const int row = own_rows + t * 16 + r * 8 + g, token = row / HEADS;
    if (token >= tokens) continue;
    if (splits > 1) {
      float* to = partials + ((place + split) * ROWS + row) * VALUE + 2 * c;
      #pragma unroll
      for (int n = 0; n < VALUE / 8; ++n) {
        to[8 * n] = mixed[t][n][2 * r];
        to[8 * n + 1] = mixed[t][n][2 * r + 1];
      }
      if (c == 0) {
        float* weight = weights + ((place + split) * ROWS + row) * 2;
        weight[0] = high[t][r];
        weight[1] = total;
      }
    } else {
      T* to = out + (rows + (long)token * heads + row % HEADS) * VALUE + 2 * c;
      #pragma unroll
      for (int n = 0; n < VALUE / 8; ++n)
        *reinterpret_cast<unsigned*>(to + 8 * n) =
            rounded<BFLOAT>(mixed[t][n][2 * r] * share, mixed[t][n][2 * r + 1] * share);
    }
  }
  if (splits == 1) return;
  __shared__ int ended;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    int* counter = const_cast<int*>(counters) + place;
    ended = atomicAdd(counter, 1) + 1;
    if (ended == splits) *counter = 0;  // for the next launch
  }
  __syncthreads();
  if (ended < splits) return;
  __threadfence();
  constexpr int SIDE = 4;  // groups of four numbers that a thread merges at once
  for (int i = threadIdx.x; i < tokens * HEADS * VALUE / 4; i += SIDE * THREADS) {
    float highest[SIDE], total[SIDE] = {}, result[SIDE][4] = {};
    #pragma unroll
    for (int e = 0; e < SIDE; ++e) highest[e] = LEAST;
    #pragma unroll 2
    for (int s = 0; s < splits; ++s) {
      #pragma unroll
      for (int e = 0; e < SIDE; ++e) {
        const int at = min(i + e * THREADS, tokens * HEADS * VALUE / 4 - 1);
        const long row = (place + s) * ROWS + at / (VALUE / 4);
        const float theirs = __ldcg(weights + row * 2), part = __ldcg(weights + row * 2 + 1);
        const float4 numbers = __ldcg(
            reinterpret_cast<const float4*>(partials + row * VALUE) + at % (VALUE / 4));
        const float higher = fmaxf(highest[e], theirs);
        const float mine = power(highest[e] - higher), their = power(theirs - higher);
        highest[e] = higher;
        total[e] = total[e] * mine + part * their;
        result[e][0] = result[e][0] * mine + numbers.x * their;
        result[e][1] = result[e][1] * mine + numbers.y * their;
        result[e][2] = result[e][2] * mine + numbers.z * their;
        result[e][3] = result[e][3] * mine + numbers.w * their;
      }
    }
    #pragma unroll
    for (int e = 0; e < SIDE; ++e) {
      const int at = i + e * THREADS, row = at / (VALUE / 4);
      if (row >= tokens * HEADS) continue;
      const float share = 1.f / total[e];
      unsigned* to = reinterpret_cast<unsigned*>(
          out + (rows + (long)(row / HEADS) * heads + row % HEADS) * VALUE + at % (VALUE / 4) * 4);
      to[0] = rounded<BFLOAT>(result[e][0] * share, result[e][1] * share);
      to[1] = rounded<BFLOAT>(result[e][2] * share, result[e][3] * share);
    }
  }
