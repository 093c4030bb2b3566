// The last part of a kernel for single tokens: the splits of a token are merged.
  __syncthreads();
  for (int i = threadIdx.x; i < HEADS * VALUE; i += WARPS * 32) {
    const int h = i / VALUE, dim = i % VALUE;
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
    const long whole = (long)token * heads + head + h;
    if (used > 1) {
      partials[(whole * splits + split) * VALUE + dim] = result;
      if (dim == 0) {
        weights[(whole * splits + split) * 2] = higher;
        weights[(whole * splits + split) * 2 + 1] = total;
      }
    } else {
      out[whole * VALUE + dim] = static_cast<T>(total > 0.f ? result / total : 0.f);
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
  constexpr int EACH = (HEADS * VALUE + WARPS * 32 - 1) / (WARPS * 32);  // numbers of a thread
  constexpr int AT_ONCE = EACH < 8 ? EACH : 8;  // that it merges together
  for (int base = threadIdx.x; base < HEADS * VALUE; base += AT_ONCE * WARPS * 32) {
    float highest[AT_ONCE], total[AT_ONCE] = {}, result[AT_ONCE] = {};
    #pragma unroll
    for (int e = 0; e < AT_ONCE; ++e) highest[e] = LEAST;
    #pragma unroll 2
    for (int s = 0; s < used; ++s) {
      #pragma unroll
      for (int e = 0; e < AT_ONCE; ++e) {
        const int i = min(base + e * WARPS * 32, HEADS * VALUE - 1);
        const long at = ((long)token * heads + head + i / VALUE) * splits + s;
        const float theirs = __ldcg(weights + at * 2), share = __ldcg(weights + at * 2 + 1);
        const float number = __ldcg(partials + at * VALUE + i % VALUE);
        const float higher = fmaxf(highest[e], theirs);
        const float mine = exp2f(highest[e] - higher), their = exp2f(theirs - higher);
        total[e] = total[e] * mine + share * their;
        result[e] = result[e] * mine + number * their;
        highest[e] = higher;
      }
    }
    #pragma unroll
    for (int e = 0; e < AT_ONCE; ++e) {
      const int i = base + e * WARPS * 32;
      if (i < HEADS * VALUE)
        out[((long)token * heads + head) * VALUE + i] =
            static_cast<T>(total[e] > 0.f ? result[e] / total[e] : 0.f);
    }
  }
