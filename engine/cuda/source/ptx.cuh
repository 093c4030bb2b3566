// What the kernels have in common: types, and functions of one PTX instruction.
//
// The emulator of the tests defines EMULATED and has those functions in C++.
template <typename T> struct alignas(16) Eight { T v[8]; };
struct alignas(16) Four { unsigned v[4]; };
// A template argument of a lambda.
template <int N> struct Constant { static constexpr int value = N; };

template <typename T> __device__ inline unsigned pair(T low, T high) {
  return reinterpret_cast<unsigned short&>(low) |
      (static_cast<unsigned>(reinterpret_cast<unsigned short&>(high)) << 16);
}

// The same 16 bits twice.
__device__ inline unsigned twice(unsigned bits) { return bits << 16 | bits; }

// 16 bytes that are read once, and not kept in the L1 cache.
template <typename T> __device__ inline Four once(const T* from) {
  const uint4 words = __ldcg(reinterpret_cast<const uint4*>(from));
  return {words.x, words.y, words.z, words.w};
}

#ifndef EMULATED
// Shared memory whose size the launch requests; ``bytes`` is for the emulator.
#define DYNAMIC_SHARED(name, bytes) extern __shared__ uint4 name[];

// Adds 16 rows of 16 numbers, times 16 columns of eight. A thread has the rows g = lane / 4 and
// g + 8; of the sum the columns 2 * (lane % 4) and the next.
template <bool BFLOAT>
__device__ inline void multiply(
    float (&sum)[4], const unsigned (&rows)[4], unsigned column0, unsigned column1) {
  if constexpr (BFLOAT) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "r"(column0), "r"(column1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "r"(column0), "r"(column1));
  }
}

// Two numbers, rounded to 16 bits.
template <bool BFLOAT> __device__ inline unsigned rounded(float low, float high) {
  unsigned both;
  if constexpr (BFLOAT) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  }
  return both;
}

// The two numbers of a pair as floats.
template <bool BFLOAT> __device__ inline float low_float(unsigned both) {
  float number;
  if constexpr (BFLOAT) {
    both <<= 16;
    number = reinterpret_cast<float&>(both);
  } else {
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low;}"
        : "=f"(number) : "r"(both));
  }
  return number;
}
template <bool BFLOAT> __device__ inline float high_float(unsigned both) {
  return low_float<BFLOAT>(both >> 16);
}

// Multiplies the numbers of two pairs and adds those of a third; rounds once.
template <bool BFLOAT>
__device__ inline unsigned pair_fma(unsigned one, unsigned other, unsigned plus) {
  unsigned both;
  if constexpr (BFLOAT) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(both) : "r"(one), "r"(other), "r"(plus));
  } else {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(both) : "r"(one), "r"(other), "r"(plus));
  }
  return both;
}

// Two to the power of x.
__device__ inline float power(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// Four matrices of eight rows of 16 bytes in shared memory; lane l has the address of row l % 8 of
// matrix l / 8, and gets the numbers 2 * (l % 4) and the next of row l / 4.
__device__ inline void load_matrices(unsigned (&loaded)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(loaded[0]), "=r"(loaded[1]), "=r"(loaded[2]), "=r"(loaded[3])
      : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row))) : "memory");
}

// The same, transposed: of column l / 4 the rows 2 * (l % 4) and the next.
__device__ inline void load_transposed(unsigned (&loaded)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(loaded[0]), "=r"(loaded[1]), "=r"(loaded[2]), "=r"(loaded[3])
      : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row))) : "memory");
}

// Transposes a matrix of eight rows of eight 16-bit numbers. A thread has the numbers
// 2 * (lane % 4) and the next of row lane / 4.
__device__ inline unsigned transposed(unsigned both) {
  unsigned result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(both));
  return result;
}

// Begins to copy 16 bytes to shared memory, or zeros, if not ``real``; nothing is read then.
__device__ inline void copy_later(void* to, const void* from, bool real) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
      :: "r"(static_cast<unsigned>(__cvta_generic_to_shared(to))), "l"(from), "r"(real ? 16 : 0)
      : "memory");
}

// Ends a group of copies that this thread has begun.
__device__ inline void end_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits for the copies of this thread's groups, except those of its last LATER groups.
template <int LATER> __device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" :: "n"(LATER) : "memory");
}

// Waits for all copies that this thread has begun, in a group or not.
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}
#endif

// Multiplies the numbers of two pairs, or adds them.
template <bool BFLOAT> __device__ inline unsigned pair_product(unsigned one, unsigned other) {
  return pair_fma<BFLOAT>(one, other, twice(0x8000));  // adding -0 changes no number
}
template <bool BFLOAT> __device__ inline unsigned pair_sum(unsigned one, unsigned other) {
  return pair_fma<BFLOAT>(one, twice(BFLOAT ? 0x3f80 : 0x3c00), other);
}
