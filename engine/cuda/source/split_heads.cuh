// Grid: (query, key and value heads, token); one warp for each head of a token. A lane computes
// pairs of numbers that the rotary embedding rotates together, then pairs of the remaining numbers.
  constexpr int PAIRS = DIM / 2, HALF = TURNED / 2, EACH = (PAIRS + 31) / 32;
  const int head = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int length = product_shape[1], token = blockIdx.y;
  const int row = token / length, at = token % length;
  if (head >= HEADS + 2 * KEY_HEADS) return;
  const bool is_value = head >= HEADS + KEY_HEADS, is_key = head >= HEADS && !is_value;
  const long from = ((long)token * (HEADS + 2 * KEY_HEADS) + head) * DIM;
  int low[EACH], high[EACH];
  float lows[EACH], highs[EACH], sum = 0.f;
  #pragma unroll
  for (int e = 0; e < EACH; ++e) {
    const int pair = lane + 32 * e;
    if (pair >= PAIRS) break;
    low[e] = pair < HALF ? pair : TURNED + 2 * (pair - HALF);
    high[e] = pair < HALF ? pair + HALF : low[e] + 1;
    lows[e] = static_cast<float>(product[from + low[e]]);
    highs[e] = static_cast<float>(product[from + high[e]]);
    if (BIAS) {
      lows[e] = static_cast<float>(T(lows[e] + static_cast<float>(bias[head * DIM + low[e]])));
      highs[e] = static_cast<float>(T(highs[e] + static_cast<float>(bias[head * DIM + high[e]])));
    }
    sum += lows[e] * lows[e] + highs[e] * highs[e];
  }
  if (NORMS && !is_value) {
    #pragma unroll
    for (int apart = 16; apart; apart /= 2) sum += __shfl_xor_sync(0xffffffff, sum, apart);
    const float factor = rsqrtf(sum / DIM + eps[0]);
    const T* weight = is_key ? key_norm : query_norm;
    #pragma unroll
    for (int e = 0; e < EACH; ++e) {
      if (lane + 32 * e >= PAIRS) break;
      lows[e] = static_cast<float>(T(lows[e] * factor * static_cast<float>(weight[low[e]])));
      highs[e] = static_cast<float>(T(highs[e] * factor * static_cast<float>(weight[high[e]])));
    }
  }
  const int own = is_value ? head - HEADS - KEY_HEADS : is_key ? head - HEADS : head;
  T* const to = is_value ? values : is_key ? keys : queries;
  const long where = (((long)row * (is_value || is_key ? KEY_HEADS : HEADS) + own) * length + at)
      * DIM;
  const float position = positions[row] + at;
  #pragma unroll
  for (int e = 0; e < EACH; ++e) {
    const int pair = lane + 32 * e;
    if (pair >= PAIRS) break;
    float sine = 0.f, cosine = 1.f;
    if (pair < HALF && !is_value) sincosf(position * frequencies[pair], &sine, &cosine);
    to[where + low[e]] = T(lows[e] * cosine - highs[e] * sine);
    to[where + high[e]] = T(lows[e] * sine + highs[e] * cosine);
  }
