// CUDA source of products of few tokens with a weight (skinny GEMMs); see ``skinny``.
//
// A block multiplies 16 to 64 rows of a weight with all tokens on tensor cores. Each of its warps
// takes other numbers of the rows, 32 or 64 at a time, and their sums are added in shared memory.
// Weight rows and tokens are read as they lie in memory, 16 bytes a lane: the lanes of a quad take
// other numbers of a row than the instruction says, but the same ones of a weight row and of a
// token, so that the sum is the same.
//
// Grid: (16 * ROWS rows of the weight; half of them are rows of gate and half of up, if GATED). The
// tokens are at most 8 * TILES.
  constexpr int STEP = 32 * PARTS, TILE = 16 * 8, OWN = GATED ? ROWS / 2 : ROWS;
  alignas(16) __shared__ float parts[WARPS * ROWS * TILE];
  __shared__ float squares[WARPS * TILES * 8];
  const int tokens = x_shape[0], inputs = x_shape[1], outputs = weight_shape[0];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quad = lane % 4;
  const int column = blockIdx.x * 16 * OWN;
  // The first of a warp's weight rows; those of up are half a weight behind those of gate.
  const T* rows = weight + (long)(column + group) * inputs + quad * 8;
  const auto row_of = [&](int r) { return r < OWN ? r * 16 : outputs / 2 + (r - OWN) * 16; };
  const T* from[TILES];
  #pragma unroll
  for (int t = 0; t < TILES; ++t)
    from[t] = x + (long)min(t * 8 + group, tokens - 1) * inputs + quad * 8;
  float sum[ROWS][TILES][4] = {}, square[TILES] = {};
  Four words[ROWS][2][PARTS];
  const auto load = [&](int k) {
    #pragma unroll
    for (int r = 0; r < ROWS; ++r)
      #pragma unroll
      for (int half = 0; half < 2; ++half)
        #pragma unroll
        for (int part = 0; part < PARTS; ++part)
          words[r][half][part] = once(rows + (long)(row_of(r) + half * 8) * inputs + k + part * 32);
  };
  if (warp * STEP < inputs) load(warp * STEP);
  #pragma unroll (TILES == 1 ? 2 : 1)
  for (int k = warp * STEP; k < inputs; k += WARPS * STEP) {
    Four now[ROWS][2][PARTS];
    #pragma unroll
    for (int r = 0; r < ROWS; ++r)
      #pragma unroll
      for (int half = 0; half < 2; ++half)
        #pragma unroll
        for (int part = 0; part < PARTS; ++part) now[r][half][part] = words[r][half][part];
    // The next ones are on their way while these are multiplied.
    if (k + WARPS * STEP < inputs) load(k + WARPS * STEP);
    #pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      Eight<T> factors;
      if constexpr (NORM)
        factors = *reinterpret_cast<const Eight<T>*>(norm + k + part * 32 + quad * 8);
      #pragma unroll
      for (int t = 0; t < TILES; ++t) {
        Four token = *reinterpret_cast<const Four*>(from[t] + k + part * 32);
        if constexpr (NORM) {
          const Eight<T>& numbers = reinterpret_cast<const Eight<T>&>(token);
          Four scaled;
          #pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float low = static_cast<float>(numbers.v[2 * i]);
            const float high = static_cast<float>(numbers.v[2 * i + 1]);
            square[t] += low * low + high * high;
            scaled.v[i] = rounded<BFLOAT>(low * static_cast<float>(factors.v[2 * i]),
                                          high * static_cast<float>(factors.v[2 * i + 1]));
          }
          token = scaled;
        }
        #pragma unroll
        for (int r = 0; r < ROWS; ++r) {
          const Four &low = now[r][0][part], &high = now[r][1][part];
          multiply<BFLOAT>(sum[r][t], {low.v[0], high.v[0], low.v[1], high.v[1]}, token.v[0],
                           token.v[1]);
          multiply<BFLOAT>(sum[r][t], {low.v[2], high.v[2], low.v[3], high.v[3]}, token.v[2],
                           token.v[3]);
        }
      }
    }
  }
  if constexpr (NORM) {
    #pragma unroll
    for (int t = 0; t < TILES; ++t) {
      square[t] += __shfl_xor_sync(0xffffffff, square[t], 1);
      square[t] += __shfl_xor_sync(0xffffffff, square[t], 2);
      if (quad == 0) squares[(warp * TILES + t) * 8 + group] = square[t];
    }
  }
  #pragma unroll
  for (int t = 0; t < TILES; ++t) {
    __syncthreads();
    #pragma unroll
    for (int r = 0; r < ROWS; ++r)
      *reinterpret_cast<float4*>(parts + (warp * ROWS + r) * TILE + lane * 4) =
          float4{sum[r][t][0], sum[r][t][1], sum[r][t][2], sum[r][t][3]};
    __syncthreads();
    for (int i = threadIdx.x; i < OWN * TILE; i += WARPS * 32) {
      const int r = i / TILE, row = i % 16, token = i % TILE / 16;
      // The lane and the number of the sum of this row and token.
      const int place = r * TILE + row % 8 * 16 + token / 2 * 4 + row / 8 * 2 + token % 2;
      float total = 0.f, up = 0.f;
      #pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        total += parts[w * ROWS * TILE + place];
        if (GATED) up += parts[(w * ROWS + OWN) * TILE + place];
      }
      if (NORM) {
        float all = 0.f;
        #pragma unroll
        for (int w = 0; w < WARPS; ++w) all += squares[(w * TILES + t) * 8 + token];
        const float factor = 1.f / sqrtf(all / inputs + eps[0]);
        total *= factor;
        up *= factor;
      }
      if (GATED) total = total / (1.f + expf(-total)) * up;
      const int at = t * 8 + token;
      if (at < tokens) {
        const long where = (long)at * (GATED ? outputs / 2 : outputs) + column + r * 16 + row;
        if (ADD) total += static_cast<float>(to[where]);
        out[where] = T(total);
      }
    }
  }
