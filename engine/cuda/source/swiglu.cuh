// One-dimensional grid: each thread computes eight numbers of a token's SwiGLU.
  struct alignas(8 * sizeof(T)) Eight { T v[8]; };
  const long i = (long)blockIdx.x * blockDim.x + threadIdx.x;
  const int wide = product_shape[2] / 16;
  if (i >= (long)product_shape[0] * product_shape[1] * wide) return;
  const Eight* from = reinterpret_cast<const Eight*>(product) + i / wide * 2 * wide + i % wide;
  const Eight gate = from[0], up = from[wide];
  Eight mixed;
  #pragma unroll
  for (int n = 0; n < 8; ++n) {
    const float g = static_cast<float>(gate.v[n]);
    mixed.v[n] = T(g / (1.f + expf(-g)) * static_cast<float>(up.v[n]));
  }
  reinterpret_cast<Eight*>(out)[i] = mixed;
