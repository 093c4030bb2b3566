// The gated delta rule; without DELTA, each token only decays the state and adds to it.
// One-dimensional grid: the tiles of each head's value dimensions, head by head, of all rows. Eight
// lanes have one line of the state, the key dimensions of one value dimension; a lane has every
// eighth four of them.
  struct alignas(4 * sizeof(T)) Four { T v[4]; };
  constexpr int OWN = DK / 8, DECAYS = VECTOR ? OWN : 1;
  struct Token { float k[OWN], q[OWN], decay[DECAYS], v, beta; };
  const int lane = threadIdx.x % 8, tokens = q_shape[1];
  constexpr int TILES = (DV + LINES - 1) / LINES;
  const int of_all = blockIdx.x / TILES;  // the head among those of all rows
  const int row = of_all / HEADS, head = of_all % HEADS;
  const int key_head = head / (HEADS / KEY_HEADS);
  const int line = blockIdx.x % TILES * LINES + threadIdx.x / 8;
  // Lanes without a line compute the last one too, so that all lanes of a warp meet.
  const int column = min(line, DV - 1);
  const auto load = [&](int t, Token& to) {
    const long token = (long)row * tokens + t, key = (token * KEY_HEADS + key_head) * DK;
    const long own = token * HEADS + head;
    #pragma unroll
    for (int i = 0; i < OWN; i += 4) {
      const int from = i * 8 + lane * 4;
      const Four some_k = *reinterpret_cast<const Four*>(k + key + from);
      const Four some_q = *reinterpret_cast<const Four*>(q + key + from);
      #pragma unroll
      for (int n = 0; n < 4; ++n) {
        to.k[i + n] = static_cast<float>(some_k.v[n]);
        to.q[i + n] = static_cast<float>(some_q.v[n]);
        if constexpr (VECTOR) to.decay[i + n] = static_cast<float>(g[own * DK + from + n]);
      }
    }
    if constexpr (!VECTOR) to.decay[0] = static_cast<float>(g[own]);
    to.v = static_cast<float>(v[own * DV + column]);
    to.beta = DELTA ? static_cast<float>(beta[own]) : 1.f;
  };
  const auto sum = [](const float (&parts)[4]) {
    float all = (parts[0] + parts[1]) + (parts[2] + parts[3]);
    #pragma unroll
    for (int apart = 1; apart < 8; apart *= 2) all += __shfl_xor_sync(0xffffffff, all, apart);
    return all;
  };
  const long place = ((long)of_all * DV + column) * DK + lane * 4;
  float s[OWN];
  #pragma unroll
  for (int i = 0; i < OWN; ++i) s[i] = state[place + i / 4 * 32 + i % 4];
  Token next;
  load(0, next);
  for (int t = 0; t < tokens; ++t) {
    const Token now = next;
    if (t + 1 < tokens) load(t + 1, next);
    const long to = (((long)row * tokens + t) * HEADS + head) * DV + line;
#if MASKED
    if (!mask[row * tokens + t]) {
      if (lane == 0 && line < DV) y[to] = OUT(0.f);
      continue;
    }
#endif
    float known[4] = {}, read[4] = {};
    #pragma unroll
    for (int i = 0; i < OWN; ++i) {
      s[i] *= now.decay[VECTOR ? i : 0];
      if (DELTA) known[i % 4] += s[i] * now.k[i];
    }
    const float added = DELTA ? (now.v - sum(known)) * now.beta : now.v;
    #pragma unroll
    for (int i = 0; i < OWN; ++i) {
      s[i] += now.k[i] * added;
      read[i % 4] += s[i] * now.q[i];
    }
    const float output = sum(read);
    if (lane == 0 && line < DV) y[to] = OUT(output);
  }
  if (line < DV) {
    #pragma unroll
    for (int i = 0; i < OWN; ++i) new_state[place + i / 4 * 32 + i % 4] = s[i];
  }
