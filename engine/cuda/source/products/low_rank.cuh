// Grid: (tile of outputs, token).
  struct alignas(WIDE * sizeof(T)) Numbers { T v[WIDE]; };
  __shared__ float narrow[RANK];
  const int token = blockIdx.y, slot = own[token];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (slot >= 0) {
    const Numbers* from = reinterpret_cast<const Numbers*>(x + (long)token * IN);
    for (int r = warp; r < RANK; r += WARPS) {
      const Numbers* row = reinterpret_cast<const Numbers*>(a + ((long)slot * RANK + r) * IN);
      float sum = 0.f;
      #pragma unroll 4
      for (int i = lane; i < IN / WIDE; i += 32) {
        const Numbers left = from[i], right = row[i];
        #pragma unroll
        for (int n = 0; n < WIDE; ++n)
          sum += static_cast<float>(left.v[n]) * static_cast<float>(right.v[n]);
      }
      #pragma unroll
      for (int apart = 16; apart; apart /= 2) sum += __shfl_xor_sync(0xffffffff, sum, apart);
      if (lane == 0) narrow[r] = sum;
    }
    __syncthreads();
  }
  const int stop = min((int)(blockIdx.x + 1) * TILE, OUT);
  for (int o = blockIdx.x * TILE + threadIdx.x; o < stop; o += WARPS * 32) {
    float sum = static_cast<float>(y[(long)token * OUT + o]);
    if (slot >= 0) {
      #pragma unroll 8
      for (int r = 0; r < RANK; ++r)
        sum += narrow[r] * static_cast<float>(b[((long)slot * RANK + r) * OUT + o]);
    }
    out[(long)token * OUT + o] = T(sum);
  }
