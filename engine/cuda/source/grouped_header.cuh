// CUDA source of products of few tokens with the weights of their experts; see ``grouped``. ``ptx``
// comes before it.
//
// A warp multiplies 16 or 32 rows of a weight with up to 64 tokens on tensor cores. Weight rows and
// tokens are read as they lie in memory, 16 bytes a lane: the lanes of a quad take other numbers of
// a row than the instruction says, but the same ones of a weight row and of a token, so that the
// sum is the same. The warps of a block each take a part of the rows' numbers.

// The first of the ascending numbers that is not below a bound.
template <typename I> __device__ inline int first_from(const I* numbers, int count, int bound) {
  int low = 0, high = count;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (static_cast<int>(numbers[middle]) < bound) low = middle + 1; else high = middle;
  }
  return low;
}

// What a code of a quantized weight stands for, apart from scale and bias: an integer (AFFINE), or a
// float of 4 bits (e2m1) or 8 (e4m3).
enum Mode { AFFINE, MXFP4, MXFP8, NVFP4 };
template <int MODE, int BITS> __device__ inline float number_of(unsigned code) {
  if constexpr (MODE == AFFINE) return static_cast<float>(code);
  float size;
  if constexpr (BITS == 4) {
    // Twice the eight numbers without sign, four bits each.
    size = .5f * static_cast<float>(0xc8643210u >> 4 * (code & 7) & 15);
  } else {
    const unsigned exponent = code >> 3 & 15, fraction = code & 7;
    unsigned bits = (code & 127) + (120 << 3) << 20;
    size = exponent ? reinterpret_cast<float&>(bits) : static_cast<float>(fraction) * 0x1p-9f;
  }
  return code >> (BITS - 1) & 1 ? -size : size;
}

// A scale: a float, a power of two (e8m0), or a float of 8 bits.
template <int MODE, typename S> __device__ inline float scale_of(S scale) {
  if constexpr (MODE == AFFINE) return static_cast<float>(scale);
  if constexpr (MODE == NVFP4) return number_of<MXFP8, 8>(static_cast<unsigned>(scale));
  unsigned bits = scale ? static_cast<unsigned>(scale) << 23 : 1u << 22;
  return reinterpret_cast<float&>(bits);
}

// Adds a warp's part of the product of weight rows [at, at + 16 * ROWS) and tokens [start, last).
template <
    int MODE, bool BFLOAT, int BITS, int GROUP, int WARPS, int ROWS, int TILES, typename T,
    typename S>
__device__ inline void add_part(
    float (&sum)[ROWS][TILES][4], int inputs, const T* x, const void* weight, const S* scales,
    const T* biases, long at, int start, int last) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quad = lane % 4;
  constexpr int EACH = BITS ? 128 / BITS : 8;  // numbers in 16 bytes of a weight row
  const int pieces = inputs / EACH;  // of 16 bytes, in a weight row
  const uint4* rows = reinterpret_cast<const uint4*>(weight) + (at + group) * pieces;
  const T* from[TILES];
  #pragma unroll
  for (int t = 0; t < TILES; ++t)
    from[t] = x + (long)min(start + t * 8 + group, last - 1) * inputs;
  #pragma unroll (TILES == 1 && BITS == 0 ? 4 : 2)
  for (int k = 4 * warp; k < pieces; k += 4 * WARPS) {
    // The last lanes of a row whose pieces are no multiple of four read a piece again, times zero.
    const bool real = BITS == 0 || k + quad < pieces;
    const int piece = real ? k + quad : pieces - 1;
    uint4 words[ROWS][2];
    #pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      words[r][0] = rows[(long)(r * 16) * pieces + piece];
      words[r][1] = rows[(long)(r * 16 + 8) * pieces + piece];
    }
    if constexpr (BITS == 0) {
      #pragma unroll
      for (int t = 0; t < TILES; ++t) {
        const uint4 token = *reinterpret_cast<const uint4*>(from[t] + piece * EACH);
        #pragma unroll
        for (int r = 0; r < ROWS; ++r) {
          const uint4 low = words[r][0], high = words[r][1];
          multiply<BFLOAT>(sum[r][t], {low.x, high.x, low.y, high.y}, token.x, token.y);
          multiply<BFLOAT>(sum[r][t], {low.z, high.z, low.w, high.w}, token.z, token.w);
        }
      }
    } else {
      constexpr unsigned MASK = (1u << BITS) - 1;
      constexpr int SCALES = EACH > GROUP ? EACH / GROUP : 1;
      float scale[ROWS][2][SCALES], shift[ROWS][2][SCALES];
      #pragma unroll
      for (int r = 0; r < ROWS; ++r)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
          const long row = at + r * 16 + half * 8 + group;
          const long place = row * (inputs / GROUP) + piece * EACH / GROUP;
          #pragma unroll
          for (int i = 0; i < SCALES; ++i) {
            scale[r][half][i] = real ? scale_of<MODE>(scales[place + i]) : 0.f;
            shift[r][half][i] =
                real && MODE == AFFINE ? static_cast<float>(biases[place + i]) : 0.f;
          }
        }
      #pragma unroll
      for (int n = 0; n < EACH; n += 4) {  // four numbers of each row and token
        unsigned pairs[ROWS][2][2];
        #pragma unroll
        for (int r = 0; r < ROWS; ++r)
          #pragma unroll
          for (int half = 0; half < 2; ++half) {
            const unsigned word =
                reinterpret_cast<const unsigned*>(&words[r][half])[n * BITS / 32];
            float number[4];
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
              const unsigned q = (word >> ((n + i) * BITS % 32)) & MASK;
              const int own = SCALES > 1 ? n / GROUP : 0;
              number[i] = fmaf(number_of<MODE, BITS>(q), scale[r][half][own], shift[r][half][own]);
            }
            pairs[r][half][0] = rounded<BFLOAT>(number[0], number[1]);
            pairs[r][half][1] = rounded<BFLOAT>(number[2], number[3]);
          }
        #pragma unroll
        for (int t = 0; t < TILES; ++t) {
          const uint2 token = *reinterpret_cast<const uint2*>(from[t] + piece * EACH + n);
          #pragma unroll
          for (int r = 0; r < ROWS; ++r)
            multiply<BFLOAT>(sum[r][t],
                             {pairs[r][0][0], pairs[r][1][0], pairs[r][0][1], pairs[r][1][1]},
                             token.x, token.y);
        }
      }
    }
  }
}

// The product of a block: the warps' parts are added in shared memory.
template <
    int MODE, bool BFLOAT, int BITS, int GROUP, int WARPS, int ROWS, int TILES, typename T,
    typename S>
__device__ inline void product(
    float* shared, int inputs, int outputs, const T* x, const void* weight, const S* scales,
    const T* biases, const T* bias, T* out, int expert, int column, int start, int last) {
  float sum[ROWS][TILES][4] = {};
  add_part<MODE, BFLOAT, BITS, GROUP, WARPS, ROWS, TILES>(
      sum, inputs, x, weight, scales, biases, (long)expert * outputs + column, start, last);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quad = lane % 4;
  #pragma unroll
  for (int r = 0; r < ROWS; ++r)
    #pragma unroll
    for (int t = 0; t < TILES; ++t) {
      __syncthreads();
      reinterpret_cast<float4*>(shared)[threadIdx.x] =
          float4{sum[r][t][0], sum[r][t][1], sum[r][t][2], sum[r][t][3]};
      __syncthreads();
      if (warp == (r * TILES + t) % WARPS) {
        float4 all = reinterpret_cast<float4*>(shared)[lane];
        #pragma unroll
        for (int w = 1; w < WARPS; ++w) {
          const float4 more = reinterpret_cast<float4*>(shared)[w * 32 + lane];
          all.x += more.x; all.y += more.y; all.z += more.z; all.w += more.w;
        }
        const int row = column + r * 16 + group;
        const float low = bias ? static_cast<float>(bias[(long)expert * outputs + row]) : 0.f;
        const float high = bias ? static_cast<float>(bias[(long)expert * outputs + row + 8]) : 0.f;
        const int token = start + t * 8 + 2 * quad;
        if (token < last) {
          out[(long)token * outputs + row] = T(all.x + low);
          out[(long)token * outputs + row + 8] = T(all.z + high);
        }
        if (token + 1 < last) {
          out[(long)(token + 1) * outputs + row] = T(all.y + low);
          out[(long)(token + 1) * outputs + row + 8] = T(all.w + high);
        }
      }
    }
}
