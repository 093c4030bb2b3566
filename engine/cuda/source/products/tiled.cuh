// Grid: (OUTPUTS rows of the weight, place of a tile of tokens); see ``tile_at``. A block multiplies
// a tile of an expert's tokens with rows of its weights. Both pass through shared memory, DEPTH
// inputs at a time, of which STAGES arrive while former ones are in use. The four warps divide the
// tile: each has TALL times 16 tokens and WIDE times 16 outputs. Rows in shared memory are eight
// numbers longer than needed: so the eight rows of a matrix lie in different banks.
  typedef typename Scale<MODE, T>::Type S;
  typedef Piece<MODE, BITS, GROUP, 1, T, S> Own;  // 16 bytes of a row and of the eighth row after it
  constexpr int THREADS = 128, STRIDE = DEPTH + 8, SLOT = (TOKENS + OUTPUTS) * STRIDE;
  constexpr int TALL = TOKENS / 32, WIDE = OUTPUTS / 32;
  constexpr int LANES = DEPTH / 8;  // that copy a row
  constexpr int OF_ROW = DEPTH / Own::EACH, PIECES = OUTPUTS / 2 * OF_ROW / THREADS;
  static_assert(PIECES * THREADS == OUTPUTS / 2 * OF_ROW, "each thread has as many pieces");
  const int inputs = x_shape[1], outputs = weight_shape[1];
  const int column = blockIdx.x * OUTPUTS;
  const TokenTile tile = ONE
      ? TokenTile{0, int(blockIdx.y) * TOKENS, min(TOKENS, (int)x_shape[0] - int(blockIdx.y) * TOKENS)}
      : tile_at<TOKENS>(experts, experts_shape[0], weight_shape[0], blockIdx.y);
  if (tile.count <= 0) return;
  // An array of one number names no rows.
  const Sorted sorted{read_shape[0] > 1 ? read : nullptr, written_shape[0] > 1 ? written : nullptr};
  DYNAMIC_SHARED(shared, STAGES * SLOT * 2)
  T* slots = reinterpret_cast<T*>(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  __shared__ int from[TOKENS];  // the tokens' rows
  for (int n = threadIdx.x; n < tile.count; n += THREADS)
    from[n] = sorted.read(tile.start + n);
  __syncthreads();

  // Begins to copy the tokens' inputs from ``k`` on, and the weights' if they are not quantized.
  const int own_row = threadIdx.x / LANES, own_input = threadIdx.x % LANES * 8;
  const T* row = reinterpret_cast<const T*>(weight) +
      ((long)tile.expert * outputs + column + own_row) * inputs + own_input;
  const auto load = [&](T* slot, int k) {
    T* to = slot + own_row * STRIDE + own_input;
    const bool real = k + own_input < inputs;
    #pragma unroll
    for (int r = 0; r < TOKENS; r += THREADS / LANES) {
      const bool is_token = own_row + r < tile.count;
      const T* token = x + (long)(is_token ? from[own_row + r] : 0) * inputs + own_input;
      copy_later(to + r * STRIDE, token + k, real && is_token);
    }
    if constexpr (BITS == 0) {
      #pragma unroll
      for (int r = 0; r < OUTPUTS; r += THREADS / LANES)
        copy_later(to + (TOKENS + r) * STRIDE, row + (long)r * inputs + k,
            real && column + own_row + r < outputs);
    }
  };
  // Reads quantized weights from input ``k`` on; beyond the last input or output, those of another.
  Own held[BITS ? PIECES : 1];
  const int pieces = inputs / Own::EACH;
  const auto piece_of = [&](int p) { return (threadIdx.x + p * THREADS) % OF_ROW; };
  const auto row_of = [&](int p) { return (threadIdx.x + p * THREADS) / OF_ROW; };
  const auto fetch = [&](int k) {
    #pragma unroll
    for (int p = 0; p < (BITS ? PIECES : 0); ++p) {
      const int pair = row_of(p), piece = min(k / Own::EACH + piece_of(p), pieces - 1);
      const long at = (long)tile.expert * outputs + min(column + pair / 8 * 16, outputs - 16) + pair % 8;
      const long group = at * (inputs / GROUP);
      held[p].load(reinterpret_cast<const uint4*>(weight) + at * pieces, scales + group,
          biases + group, inputs, piece);
    }
  };
  // Dequantizes them into shared memory.
  const auto unpack = [&](T* slot, int k) {
    #pragma unroll
    for (int p = 0; p < (BITS ? PIECES : 0); ++p) {
      const int at = TOKENS + row_of(p) / 8 * 16 + row_of(p) % 8, piece = piece_of(p);
      const bool real = k / Own::EACH + piece < pieces;
      #pragma unroll
      for (int half = 0; half < 2; ++half) {
        #pragma unroll
        for (int n = 0; n < Own::EACH; n += 8) {
          unsigned made[4];
          held[p].template make_eight<BFLOAT>(made, 0, half, n, real);
          *reinterpret_cast<uint4*>(slot + (at + half * 8) * STRIDE + piece * Own::EACH + n) =
              ascending<BITS>(made);
        }
      }
    }
  };

  const int steps = (inputs + DEPTH - 1) / DEPTH;
  if (BITS) fetch(0);
  #pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) {
    if (s < steps) {
      load(slots + s * SLOT, s * DEPTH);
      if (BITS) {
        unpack(slots + s * SLOT, s * DEPTH);
        if (s + 1 < steps) fetch((s + 1) * DEPTH);
      }
    }
    end_copies();
  }
  const int first = warp / 2 * TALL * 16, first_output = warp % 2 * WIDE * 16;
  const int matrix = lane / 8;
  const int own_token = (first + matrix % 2 * 8 + lane % 8) * STRIDE + matrix / 2 * 8;
  const int own_weight = (TOKENS + first_output + matrix / 2 * 8 + lane % 8) * STRIDE + matrix % 2 * 8;
  float sum[TALL][2 * WIDE][4] = {};
  T *used = slots, *next = slots + (STAGES - 1) * SLOT, *const end = slots + STAGES * SLOT;
  for (int step = 0; step < steps; ++step) {
    wait_for_copies<STAGES - 2>();
    __syncthreads();  // this stage is here, and no warp needs the one before
    const int later = step + STAGES - 1;
    if (later < steps) {
      load(next, later * DEPTH);
      if (BITS) {
        unpack(next, later * DEPTH);
        if (later + 1 < steps) fetch((later + 1) * DEPTH);
      }
    }
    end_copies();
    // Tokens and weights of the next products are loaded before the current ones are computed.
    unsigned own[2][TALL][4], loaded[2][4];
    const auto load_tokens = [&](int k) {
      #pragma unroll
      for (int t = 0; t < TALL; ++t)
        if (first + 16 * t < tile.count)
          load_matrices(own[k % 2][t], used + own_token + 16 * t * STRIDE + 16 * k);
    };
    const auto load_weights = [&](int n) {
      load_matrices(loaded[n % 2], used + own_weight + 16 * (n % WIDE) * STRIDE + n / WIDE * 16);
    };
    load_tokens(0);
    load_weights(0);
    #pragma unroll
    for (int n = 0; n < DEPTH / 16 * WIDE; ++n) {
      const int k = n / WIDE, w = n % WIDE;
      if (n + 1 < DEPTH / 16 * WIDE) load_weights(n + 1);
      if (w == 0 && k + 1 < DEPTH / 16) load_tokens(k + 1);
      #pragma unroll
      for (int t = 0; t < TALL; ++t) {
        if (first + 16 * t >= tile.count) continue;
        multiply<BFLOAT>(sum[t][2 * w], own[k % 2][t], loaded[n % 2][0], loaded[n % 2][1]);
        multiply<BFLOAT>(sum[t][2 * w + 1], own[k % 2][t], loaded[n % 2][2], loaded[n % 2][3]);
      }
    }
    used = used + SLOT == end ? slots : used + SLOT;
    next = next + SLOT == end ? slots : next + SLOT;
  }
  #pragma unroll
  for (int w = 0; w < 2 * WIDE; ++w) {
    const int output = column + first_output + 8 * w + 2 * (lane % 4);
    if (output >= outputs) continue;
    const T* plus = bias + (long)tile.expert * outputs + output;
    const float low = BIAS ? static_cast<float>(plus[0]) : 0.f;
    const float high = BIAS ? static_cast<float>(plus[1]) : 0.f;
    #pragma unroll
    for (int t = 0; t < TALL; ++t) {
      #pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int n = first + 16 * t + 8 * half + lane / 4;
        if (n >= tile.count) continue;
        const long row = sorted.written(tile.start + n);
        *reinterpret_cast<unsigned*>(out + row * outputs + output) =
            rounded<BFLOAT>(sum[t][w][2 * half] + low, sum[t][w][2 * half + 1] + high);
      }
    }
  }
