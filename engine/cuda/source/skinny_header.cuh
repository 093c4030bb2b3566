// Functions of the kernel for products of few tokens; ``ptx`` comes before it.
template <typename T> __device__ inline Four once(const T* from) {
  const uint4 words = __ldcg(reinterpret_cast<const uint4*>(from));
  return {words.x, words.y, words.z, words.w};
}
