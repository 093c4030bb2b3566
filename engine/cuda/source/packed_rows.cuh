// Functions that all kernels over pages share: of scores, and of packed rows.

// A capped score. Scores are exponents of two: ``cap`` has the factor log2(e).
__device__ inline float capped(float score, float factor, float cap) {
  constexpr float TWICE_LOG2_E = 2.8853900817779268f;
  return cap - 2.f * cap / (power(score * factor * TWICE_LOG2_E) + 1.f);  // cap * tanh
}

// The numbers, of the pool's type, that a column of one key head has. GROUP and BITS are 0 if the
// pages have the type of the keys; T is that type.
template <typename T, int DIM, int GROUP, int BITS> __device__ constexpr int row_size() {
  if constexpr (BITS == 0) return DIM;
  else return DIM * BITS / 32 + 2 * DIM / GROUP * (int)sizeof(T) / 4;
}

// The numbers 8 * piece to 8 * piece + 7 of a column.
template <typename T, int DIM, int GROUP, int BITS, typename Pool>
__device__ inline Eight<T> piece_of(const Pool* row, int piece) {
  if constexpr (BITS == 0) {
    return reinterpret_cast<const Eight<T>*>(row)[piece];
  } else {
    unsigned codes[2];
    codes[0] = row[piece * BITS / 4];
    if constexpr (BITS == 8) codes[1] = row[piece * 2 + 1];
    const T* scales = reinterpret_cast<const T*>(row + DIM * BITS / 32) + piece * 8 / GROUP;
    const float scale = static_cast<float>(scales[0]);
    const float bias = static_cast<float>(scales[DIM / GROUP]);
    Eight<T> numbers;
    #pragma unroll
    for (int i = 0; i < 8; ++i) {
      const unsigned code = codes[i * BITS / 32] >> (i * BITS % 32) & ((1u << BITS) - 1);
      numbers.v[i] = static_cast<T>(scale * static_cast<float>(code) + bias);
    }
    return numbers;
  }
}
