// CUDA source of products of few tokens with the weights of their experts; see ``grouped``. ``ptx``
// comes before it.
//
// A block multiplies 16 * ROWS rows of a weight with up to 8 * MOST tokens on tensor cores; each of
// its warps sums over a part of the inputs. A lane reads 16 bytes of a weight row at a time, which
// are not the inputs that the tensor cores expect in that lane. The result is right because each
// lane takes the same inputs of the weight rows and of the tokens: a sum may be in any order.

// How many places from 0 on have a property, which no later place has: a search in which the lanes of
// a warp look at 32 places at a time.
template <typename Has> __device__ inline int leading(int count, const Has& has) {
  int low = 0, high = count;
  while (low < high) {
    const int lane = threadIdx.x % 32, step = (high - low + 31) / 32, place = low + lane * step;
    const int lanes = __popc(__ballot_sync(0xffffffffu, place < high && has(place)));
    if (lanes == 0) return low;
    high = min(high, low + lanes * step);
    low += (lanes - 1) * step + 1;
  }
  return low;
}

// The place of the first of the ascending numbers that is not below a bound.
template <typename I> __device__ inline int first_from(const I* numbers, int count, int bound) {
  return leading(count, [&](int place) { return static_cast<int>(numbers[place]) < bound; });
}

// The pairs of an expert, if all pairs are sorted by expert: pair n reads row n of the tokens and
// writes row n of the products, or the rows that arrays name.
struct Sorted {
  const unsigned *from, *to;
  __device__ inline int read(int n) const { return from ? from[n] : n; }
  __device__ inline int written(int n) const { return to ? to[n] : n; }
};

// The pairs of an expert, from a list. Each token has ``each`` pairs, one after the other.
struct Listed {
  const int* pairs;
  int each;
  __device__ inline int read(int n) const { return pairs[n] / each; }
  __device__ inline int written(int n) const { return pairs[n]; }

  // Lists all pairs with the expert of pair ``one``, and returns their number; 0 if ``one`` is
  // not the first, whose block computes them all. Each warp writes the same list.
  template <typename I> __device__ static int list(int* to, const I* experts, int count, int one) {
    const int lane = threadIdx.x % 32;
    int found = 0;
    for (int start = 0; start < count; start += 32) {
      const int place = start + lane;
      const unsigned same =
          __ballot_sync(0xffffffffu, place < count && experts[place] == experts[one]);
      if (same >> lane & 1) to[found + __popc(same & (1u << lane) - 1)] = place;
      found += __popc(same);
    }
    __syncthreads();
    return to[0] == one ? found : 0;
  }
};

// How a weight is quantized: as integers with a scale and a bias (AFFINE), or as floats of 4 bits
// (e2m1) or 8 (e4m3) with a scale, which is a power of two (e8m0) or a float of 8 bits (NVFP4).
enum Mode { AFFINE, MXFP4, MXFP8, NVFP4 };

// Shifts a word left, or right if BY is negative.
template <int BY> __device__ inline unsigned moved(unsigned word) {
  if constexpr (BY >= 0) return word << BY; else return word >> -BY;
}

// The floats of two codes of a word as a pair; the first code begins at bit AT, the second 16 bits
// later. NOTE: the codes of e4m3 that are NaN become 480; MLX's quantization makes none.
template <bool BFLOAT, int BITS, int AT> __device__ inline unsigned float_pair(unsigned word) {
  // A code's exponent and fraction are moved to the lowest bits of the wider exponent and the
  // highest of the wider fraction. As the wider exponent has a larger bias, this is the float
  // divided by POWER; it is subnormal if the code is.
  constexpr int LEFT = (BFLOAT ? 7 : 10) - (BITS == 4 ? 1 : 3) - AT;
  constexpr unsigned SIZE = (1u << (BITS - 1)) - 1 << LEFT + AT;
  constexpr unsigned POWER = BITS == 4 ? BFLOAT ? 0x7e80 : 0x7400 : BFLOAT ? 0x7b80 : 0x5c00;
  const unsigned sizes = moved<LEFT>(word) & twice(SIZE);
  const unsigned signs = moved<16 - BITS - AT>(word) & twice(0x8000);
  return pair_product<BFLOAT>(sizes | signs, twice(POWER));
}

// The scale and the bias of a group of quantized numbers, as MLX calls numbers with one scale.
template <int MODE, bool BFLOAT, typename T, typename S> struct Group {
  // Whether scale and codes are bfloat16: powers of two (e8m0) exceed float16's range.
  static constexpr bool WIDE = BFLOAT || MODE == MXFP4 || MODE == MXFP8;
  unsigned scale, shift;  // each twice, as a pair

  // If not ``real``, all numbers become zero.
  __device__ inline Group(S of, T plus, bool real) {
    shift = 0;
    if constexpr (MODE == AFFINE) {
      scale = pair(of, of);
      shift = real ? pair(plus, plus) : 0;
    } else if constexpr (MODE == NVFP4) {
      scale = float_pair<BFLOAT, 8, 0>(twice(of));
    } else {
      // bfloat16 has the same exponent, but 2 ** -127 (code 0) is subnormal.
      scale = twice(of ? static_cast<unsigned>(of) << 7 : 64u);
    }
    if (!real) scale = 0;
  }

  // The numbers of two codes of a word; the first begins at bit AT, the second 16 bits later.
  template <int BITS, int AT> __device__ inline unsigned numbers(unsigned word) const {
    if constexpr (MODE != AFFINE) {
      const unsigned exact = float_pair<WIDE, BITS, AT>(word);
      if constexpr (WIDE == BFLOAT) return pair_product<BFLOAT>(exact, scale);
      const float by = low_float<WIDE>(scale);
      return rounded<BFLOAT>(low_float<WIDE>(exact) * by, high_float<WIDE>(exact) * by);
    } else if constexpr (BITS == 4) {
      // The lowest bits of a fraction are the code, so that the float is 128 (1,024 in float16)
      // plus the code.
      constexpr unsigned BASE = BFLOAT ? 0x4300 : 0x6400;
      const unsigned codes = moved<-AT>(word) & twice(15) | twice(BASE);
      const unsigned exact = pair_sum<BFLOAT>(codes, twice(BASE | 0x8000));
      return pair_fma<BFLOAT>(exact, scale, shift);
    } else {
      // The same in float32, with 2 ** 23. Converting an integer takes four times as long.
      const unsigned bits[2] = {
          moved<-AT>(word) & 255 | 0x4b000000, moved<-16 - AT>(word) & 255 | 0x4b000000};
      const float by = low_float<BFLOAT>(scale), plus = low_float<BFLOAT>(shift);
      return rounded<BFLOAT>(
          fmaf(reinterpret_cast<const float&>(bits[0]) - 0x1p23f, by, plus),
          fmaf(reinterpret_cast<const float&>(bits[1]) - 0x1p23f, by, plus));
    }
  }
};

// Eight numbers of a token, in the order of those that ``make_eight`` makes of a weight: the two
// codes of a pair are 16 bits apart.
template <int BITS> __device__ inline uint4 in_order(const uint4& t) {
  const auto low = [](unsigned a, unsigned b) { return a & 0xffff | b << 16; };
  const auto high = [](unsigned a, unsigned b) { return a >> 16 | b & 0xffff0000; };
  if constexpr (BITS == 0) return t;
  if constexpr (BITS == 4) return {low(t.x, t.z), high(t.x, t.z), low(t.y, t.w), high(t.y, t.w)};
  return {low(t.x, t.y), high(t.x, t.y), low(t.z, t.w), high(t.z, t.w)};
}

// What a lane reads of a weight at a time: 16 bytes of each of its rows, with their scales.
template <int MODE, int BITS, int GROUP, int ROWS, typename T, typename S> struct Piece {
  static constexpr int EACH = BITS ? 128 / BITS : 8;  // numbers in 16 bytes
  static constexpr int SCALES = BITS && EACH > GROUP ? EACH / GROUP : 1;
  uint4 words[ROWS][2];
  S scale[ROWS][2][SCALES];
  T shift[ROWS][2][SCALES];

  // Reads of a row and of each eighth row after it. The pointers are the row's; ``piece`` counts 16
  // bytes.
  __device__ inline void load(
      const uint4* weight, const S* scales, const T* biases, int inputs, int piece) {
    #pragma unroll
    for (int r = 0; r < ROWS; ++r)
      #pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = r * 16 + half * 8;
        words[r][half] = weight[row * (inputs / EACH) + piece];
        if constexpr (BITS == 0) continue;
        #pragma unroll
        for (int i = 0; i < SCALES; ++i) {
          const int place = row * (inputs / GROUP) + piece * EACH / GROUP + i;
          scale[r][half][i] = scales[place];
          if constexpr (MODE == AFFINE) shift[r][half][i] = biases[place];
        }
      }
  }

  // Makes the eight numbers from ``n`` on of one of the rows, in pairs; all zero if not ``real``.
  template <bool BFLOAT>
  __device__ inline void make_eight(unsigned (&to)[4], int r, int half, int n, bool real) const {
    const unsigned* word = reinterpret_cast<const unsigned*>(&words[r][half]) + n * BITS / 32;
    if constexpr (BITS == 0) {
      #pragma unroll
      for (int i = 0; i < 4; ++i) to[i] = word[i];
    } else {
      constexpr int SECOND = BITS == 4 ? 0 : 1, AT = BITS == 4 ? 8 : 0;
      const int group = n / GROUP;
      const Group<MODE, BFLOAT, T, S> own(scale[r][half][group], shift[r][half][group], real);
      to[0] = own.template numbers<BITS, 0>(word[0]);
      to[1] = own.template numbers<BITS, BITS>(word[0]);
      to[2] = own.template numbers<BITS, AT>(word[SECOND]);
      to[3] = own.template numbers<BITS, AT + BITS>(word[SECOND]);
    }
  }
};

// The weights of the experts, tokens and products; what all blocks of a launch have in common.
template <
    int MODE, bool BFLOAT, int BITS, int GROUP, int WARPS, int ROWS, typename T, typename S>
struct Product {
  typedef Piece<MODE, BITS, GROUP, ROWS, T, S> Own;
  int inputs, outputs;
  const T* x;
  const void* weight;
  const S* scales;
  const T *biases, *bias;
  T* out;

  // Adds a warp's part of the product of weight rows [at, at + 16 * ROWS) and tokens [start, last).
  template <int TILES, typename Tokens>
  __device__ inline void add_part(
      float (&sum)[ROWS][TILES][4], const Tokens& tokens, long at, int start, int last) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quad = lane % 4;
    const int pieces = inputs / Own::EACH;
    const T* from[TILES];
    #pragma unroll
    for (int t = 0; t < TILES; ++t)
      from[t] = x + (long)tokens.read(min(start + t * 8 + group, last - 1)) * inputs;
    // The last lanes of a row whose pieces are no multiple of four read its last piece again, and
    // multiply with zeros.
    const auto place = [&](int k) { return min(k + quad, pieces - 1); };
    const uint4* words = reinterpret_cast<const uint4*>(weight) + (at + group) * pieces;
    const long first_group = (at + group) * (inputs / GROUP);
    const auto load = [&](Own& to, int k) {
      if (k < pieces) to.load(words, scales + first_group, biases + first_group, inputs, place(k));
    };
    Own next[1];  // NOTE: the compiler copies a struct outside of an array through memory
    load(next[0], 4 * warp);
    for (int k = 4 * warp; k < pieces; k += 4 * WARPS) {
      const Own own = next[0];
      load(next[0], k + 4 * WARPS);  // while this piece is multiplied
      const bool real = k + quad < pieces;
      const int first = place(k) * Own::EACH;
      #pragma unroll
      for (int n = 0; n < Own::EACH; n += 8) {  // eight numbers of each row and token
        unsigned made[ROWS][2][4];
        #pragma unroll
        for (int r = 0; r < ROWS; ++r)
          #pragma unroll
          for (int half = 0; half < 2; ++half)
            own.template make_eight<BFLOAT>(made[r][half], r, half, n, real);
        #pragma unroll
        for (int t = 0; t < TILES; ++t) {
          const uint4 token = in_order<BITS>(*reinterpret_cast<const uint4*>(from[t] + first + n));
          #pragma unroll
          for (int r = 0; r < ROWS; ++r) {
            const auto &low = made[r][0], &high = made[r][1];
            multiply<BFLOAT>(sum[r][t], {low[0], high[0], low[1], high[1]}, token.x, token.y);
            multiply<BFLOAT>(sum[r][t], {low[2], high[2], low[3], high[3]}, token.z, token.w);
          }
        }
      }
    }
  }

  // Writes the products of at most 8 * TILES tokens [start, last) with 16 * ROWS rows of an expert
  // from ``column`` on. The warps' parts are added in shared memory, which has a float4 for each
  // thread, row of tiles and tile.
  template <int TILES, typename Tokens>
  __device__ inline void write(
      float4* shared, const Tokens& tokens, int expert, int column, int start, int last) const {
    float sum[ROWS][TILES][4] = {};
    add_part<TILES>(sum, tokens, (long)expert * outputs + column, start, last);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quad = lane % 4;
    __syncthreads();  // no warp needs the sums of earlier tokens
    #pragma unroll
    for (int r = 0; r < ROWS; ++r)
      #pragma unroll
      for (int t = 0; t < TILES; ++t)
        shared[(r * TILES + t) * WARPS * 32 + threadIdx.x] =
            float4{sum[r][t][0], sum[r][t][1], sum[r][t][2], sum[r][t][3]};
    __syncthreads();
    #pragma unroll
    for (int tile = 0; tile < ROWS * TILES; ++tile) {
      if (tile % WARPS != warp) continue;
      float4 all = shared[tile * WARPS * 32 + lane];
      #pragma unroll
      for (int w = 1; w < WARPS; ++w) {
        const float4 more = shared[(tile * WARPS + w) * 32 + lane];
        all.x += more.x; all.y += more.y; all.z += more.z; all.w += more.w;
      }
      const int row = column + tile / TILES * 16 + group;
      const float low = bias ? static_cast<float>(bias[(long)expert * outputs + row]) : 0.f;
      const float high = bias ? static_cast<float>(bias[(long)expert * outputs + row + 8]) : 0.f;
      const int token = start + tile % TILES * 8 + 2 * quad;
      if (token < last) {
        T* to = out + (long)tokens.written(token) * outputs + row;
        to[0] = T(all.x + low);
        to[8] = T(all.z + high);
      }
      if (token + 1 < last) {
        T* to = out + (long)tokens.written(token + 1) * outputs + row;
        to[0] = T(all.y + low);
        to[8] = T(all.w + high);
      }
    }
  }

  // Writes the products of all tokens [start, last) of an expert, up to 8 * MOST at a time.
  template <int MOST, typename Tokens>
  __device__ inline void write_all(
      float4* shared, const Tokens& tokens, int expert, int column, int start, int last) const {
    while (start < last) {
      const auto some = [&](auto tiles) {
        constexpr int TILES = decltype(tiles)::value;
        write<TILES>(shared, tokens, expert, column, start, last);
        start += 8 * TILES;
      };
      if (last - start <= 8) some(Constant<1>{});
      else if (last - start <= 16 || MOST == 2) some(Constant<2>{});
      else some(Constant<MOST>{});
    }
  }
};

// The type of scales: the bytes of e8m0 or e4m3, unless they have the tokens' type.
template <int MODE, typename T> struct Scale { typedef unsigned char Type; };
template <typename T> struct Scale<AFFINE, T> { typedef T Type; };
