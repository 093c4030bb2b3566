// CUDA's types and functions, and in place of ``ptx.cuh``'s functions of one instruction, C++.
#pragma once

namespace {

struct __nv_bfloat16 {
  uint16_t bits;
  __nv_bfloat16() = default;
  __nv_bfloat16(float number) {
    uint32_t all;
    memcpy(&all, &number, 4);
    bits = number != number ? 0x7fff : (all + 0x7fff + (all >> 16 & 1)) >> 16;
  }
  operator float() const {
    const uint32_t all = (uint32_t)bits << 16;
    float number;
    memcpy(&number, &all, 4);
    return number;
  }
};

struct __half {
  _Float16 number;
  __half() = default;
  __half(float wide) : number(wide) {}
  operator float() const { return number; }
};

struct float4 { float x, y, z, w; };
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };

#define DYNAMIC_SHARED(name, bytes) __shared__ uint4 name[(bytes) / 16];

float rsqrtf(float x) { return 1.f / sqrtf(x); }
void __threadfence() {}
template <typename T> T __ldcg(const T* from) { return *from; }
template <typename T> T atomicAdd(T* to, T number) {
  const T before = *to;
  *to += number;
  return before;
}
int __clz(int number) { return number ? __builtin_clz(number) : 32; }

int __popc(unsigned number) { return __builtin_popcount(number); }

template <typename A, typename B> auto min(A a, B b) { return b < a ? b : a; }
template <typename A, typename B> auto max(A a, B b) { return a < b ? b : a; }

template <typename T> T __shfl_xor_sync(unsigned, T value, int other) {
  struct Operands { T value, result; int other; } mine{value, value, other};
  together(mine, [](Operands** lanes) {
    for (int l = 0; l < 32; ++l) lanes[l]->result = lanes[l ^ lanes[l]->other]->value;
  });
  return mine.result;
}

template <typename T> T __shfl_up_sync(unsigned, T value, int by) {
  struct Operands { T value, result; int by; } mine{value, value, by};
  together(mine, [](Operands** lanes) {
    for (int l = 0; l < 32; ++l) {
      const int from = l - lanes[l]->by;
      if (from >= 0) lanes[l]->result = lanes[from]->value;
    }
  });
  return mine.result;
}

unsigned __ballot_sync(unsigned, bool is) {
  struct Operands { bool is; unsigned result; } mine{is, 0};
  together(mine, [](Operands** lanes) {
    unsigned all = 0;
    for (int l = 0; l < 32; ++l) all |= (unsigned)lanes[l]->is << l;
    for (int l = 0; l < 32; ++l) lanes[l]->result = all;
  });
  return mine.result;
}

template <bool BFLOAT> void unpack(float* to, unsigned both) {
  for (int i = 0; i < 2; ++i) {
    const uint16_t bits = both >> 16 * i;
    if constexpr (BFLOAT) {
      __nv_bfloat16 number;
      memcpy(&number, &bits, 2);
      to[i] = (float)number;
    } else {
      __half number;
      memcpy(&number, &bits, 2);
      to[i] = (float)number;
    }
  }
}

template <bool BFLOAT>
void multiply(float (&sum)[4], const unsigned (&rows)[4], unsigned column0, unsigned column1) {
  struct Operands { float* sum; const unsigned* rows; unsigned columns[2]; };
  Operands mine{sum, rows, {column0, column1}};
  together(mine, [](Operands** lanes) {
    float a[16][16], b[8][16];
    for (int l = 0; l < 32; ++l) {
      const int g = l / 4, c = l % 4 * 2;
      for (int i = 0; i < 4; ++i) unpack<BFLOAT>(&a[g + i % 2 * 8][c + i / 2 * 8], lanes[l]->rows[i]);
      for (int i = 0; i < 2; ++i) unpack<BFLOAT>(&b[g][c + i * 8], lanes[l]->columns[i]);
    }
    for (int l = 0; l < 32; ++l) {
      for (int i = 0; i < 4; ++i) {
        const float *row = a[l / 4 + i / 2 * 8], *column = b[l % 4 * 2 + i % 2];
        float total = lanes[l]->sum[i];
        for (int k = 0; k < 16; ++k) total += row[k] * column[k];
        lanes[l]->sum[i] = total;
      }
    }
  });
}

template <bool BFLOAT> unsigned rounded(float low, float high) {
  uint16_t bits[2];
  if constexpr (BFLOAT) {
    const __nv_bfloat16 both[2] = {low, high};
    memcpy(bits, both, 4);
  } else {
    const __half both[2] = {low, high};
    memcpy(bits, both, 4);
  }
  return bits[0] | (unsigned)bits[1] << 16;
}

template <bool BFLOAT> float low_float(unsigned both) {
  float numbers[2];
  unpack<BFLOAT>(numbers, both);
  return numbers[0];
}
template <bool BFLOAT> float high_float(unsigned both) { return low_float<BFLOAT>(both >> 16); }

template <bool BFLOAT> unsigned pair_fma(unsigned one, unsigned other, unsigned plus) {
  float a[2], b[2], c[2];
  unpack<BFLOAT>(a, one);
  unpack<BFLOAT>(b, other);
  unpack<BFLOAT>(c, plus);
  return rounded<BFLOAT>(fmaf(a[0], b[0], c[0]), fmaf(a[1], b[1], c[1]));
}

float power(float x) { return exp2f(x); }

struct Matrices { uint16_t* loaded; const uint16_t* row; bool transposed; };

void load_all(unsigned (&loaded)[4], const void* row, bool transposed) {
  Matrices mine{(uint16_t*)loaded, (const uint16_t*)row, transposed};
  together(mine, [](Matrices** lanes) {
    for (int l = 0; l < 32; ++l) {
      for (int i = 0; i < 8; ++i) {
        const int matrix = i / 2, near = l / 4, far = l % 4 * 2 + i % 2;
        const bool turn = lanes[l]->transposed;
        lanes[l]->loaded[i] = lanes[matrix * 8 + (turn ? far : near)]->row[turn ? near : far];
      }
    }
  });
}

void load_matrices(unsigned (&loaded)[4], const void* row) { load_all(loaded, row, false); }
void load_transposed(unsigned (&loaded)[4], const void* row) { load_all(loaded, row, true); }

unsigned transposed(unsigned both) {
  struct Operands { uint16_t both[2], result[2]; } mine;
  memcpy(mine.both, &both, 4);
  together(mine, [](Operands** lanes) {
    for (int l = 0; l < 32; ++l) {
      for (int i = 0; i < 2; ++i)
        lanes[l]->result[i] = lanes[(l % 4 * 2 + i) * 4 + l / 8]->both[l / 4 % 2];
    }
  });
  unsigned result;
  memcpy(&result, mine.result, 4);
  return result;
}

void copy(const Copy& one) {
  if (one.real) memcpy(one.to, one.from, 16);
  else memset(one.to, 0, 16);
}

void copy_later(void* to, const void* from, bool real) {
  const Copy one{to, from, real};
  if (backwards) copy(one);
  else fibers[current].copies[fibers[current].begun++] = one;
}

void complete_copies(int count) {
  Fiber& fiber = fibers[current];
  for (int i = 0; i < count; ++i) copy(fiber.copies[i]);
  for (int i = count; i < fiber.begun; ++i) fiber.copies[i - count] = fiber.copies[i];
  fiber.begun -= count;
  for (int& end : fiber.group_ends) end = max(0, end - count);
}

void wait_for_copies() { complete_copies(fibers[current].begun); }

void end_copies() {
  Fiber& fiber = fibers[current];
  for (int i = MAX_GROUPS - 1; i; --i) fiber.group_ends[i] = fiber.group_ends[i - 1];
  fiber.group_ends[0] = fiber.begun;
}

template <int LATER> void wait_for_copies() {
  static_assert(LATER < MAX_GROUPS);
  complete_copies(fibers[current].group_ends[LATER]);
}

void __syncwarp() {
  int nothing = 0;
  together(nothing, [](int**) {});
}

}  // namespace
