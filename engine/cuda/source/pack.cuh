// Grid: (one block, key head, token). The first of the two warps has the key, the second the value;
// each lane eight numbers.
  constexpr int PIECES = DIM / 8, TOGETHER = GROUP / 8;  // lanes of a group
  constexpr int MOST = (1 << BITS) - 1, ROW = row_size<T, DIM, GROUP, BITS>();
  const int lane = threadIdx.x % 32, key_head = blockIdx.y, key_heads = gridDim.y;
  const int token = blockIdx.z;
  const bool second = threadIdx.x >= 32, busy = lane < PIECES;
  const long place = ((long)token * key_heads + key_head) * PIECES + lane;
  Eight<T> numbers = {};
  if (busy) numbers = reinterpret_cast<const Eight<T>*>(second ? new_values : new_keys)[place];
  float low = static_cast<float>(numbers.v[0]), high = low;
  #pragma unroll
  for (int i = 1; i < 8; ++i) {
    low = fminf(low, static_cast<float>(numbers.v[i]));
    high = fmaxf(high, static_cast<float>(numbers.v[i]));
  }
  #pragma unroll
  for (int other = 1; other < TOGETHER; other *= 2) {
    low = fminf(low, __shfl_xor_sync(0xffffffffu, low, other));
    high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, other));
  }
  if (!busy) return;
  const T own_bias = static_cast<T>(low);
  const float bias = static_cast<float>(own_bias);
  const T own_scale = static_cast<T>((high - bias) / MOST);
  const float scale = static_cast<float>(own_scale), steps = scale > 0.f ? 1.f / scale : 0.f;
  unsigned codes[2] = {};
  #pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float nearest = rintf((static_cast<float>(numbers.v[i]) - bias) * steps);
    const unsigned code = static_cast<unsigned>(fminf(fmaxf(nearest, 0.f), MOST));
    codes[i * BITS / 32] |= code << (i * BITS % 32);
    numbers.v[i] = static_cast<T>(scale * static_cast<float>(code) + bias);
  }
  reinterpret_cast<Eight<T>*>(second ? rounded_values : rounded_keys)[place] = numbers;
  const int column = stops[token] - 1;
  const int page = pages[pages[owners[token]] + column / PAGE];
  unsigned* row = const_cast<unsigned*>(second ? values : keys) +
      (((long)page * key_heads + key_head) * PAGE + column % PAGE) * ROW;
  row[lane * BITS / 4] = codes[0];
  if (BITS == 8) row[lane * BITS / 4 + 1] = codes[1];
  if (lane % TOGETHER == 0) {
    T* scales = reinterpret_cast<T*>(row + DIM * BITS / 32) + lane / TOGETHER;
    scales[0] = own_scale;
    scales[DIM / GROUP] = own_bias;
  }
