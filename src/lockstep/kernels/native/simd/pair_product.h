// The register tile that gradient products share: C += A B over words, a word being one fp32 or a pair of bf16.
//
// Each output has one accumulator that runs over the words in ascending order and starts from C, so a sum cut into
// pieces has the bits of the whole. A may be read along rows or columns: its word (r, s) lies at data[r row + s step].
#pragma once
#include "vec.h"

namespace ls {
namespace LOCKSTEP_ISA {

constexpr int kPairRows = 6;  // rows of a register tile

template <typename T>
constexpr int kPair = sizeof(T) == 2 ? 2 : 1;

struct Words {
  const float* data;
  int64_t row, step;  // strides
};

// c (MR x 16 NV) = or += sum over steps of a[r][step] * b[step][16 v ...].
template <bool kIsBf16, int MR, int NV>
LS_INLINE void pair_tile(Words a, const float* b, int64_t ldb, int64_t steps, float* c, int64_t ldc, bool accumulate) {
  V acc[MR][NV];
#pragma GCC unroll 6
  for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) acc[r][v] = accumulate ? load(c + r * ldc + v * kLanes) : zero();
  }
  for (int64_t s = 0; s < steps; ++s) {
    V bv[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) bv[v] = load(b + s * ldb + v * kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < MR; ++r) {
      uint32_t word;
      std::memcpy(&word, a.data + r * a.row + s * a.step, 4);
      const V av = set1_bits(word);
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) acc[r][v] = kIsBf16 ? dot_bf16(acc[r][v], av, bv[v]) : fma(av, bv[v], acc[r][v]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) store(c + r * ldc + v * kLanes, acc[r][v]);
  }
}

template <bool kIsBf16, int MR>
void pair_strip(Words a, const float* b, int64_t ldb, int64_t n, int64_t steps, float* c, int64_t ldc,
                bool accumulate) {
  int64_t column = 0;
  for (; kColumnVectors > 1 && column + kColumnVectors * kLanes <= n; column += kColumnVectors * kLanes) {
    pair_tile<kIsBf16, MR, kColumnVectors>(a, b + column, ldb, steps, c + column, ldc, accumulate);
  }
  for (; column < n; column += kLanes) {
    pair_tile<kIsBf16, MR, 1>(a, b + column, ldb, steps, c + column, ldc, accumulate);
  }
}

// c (m x n) = or += a (m x steps) b (steps x n); n a multiple of 16, b and c in rows of ldb and ldc words.
template <bool kIsBf16>
void pair_product(Words a, const float* b, int64_t ldb, int64_t m, int64_t n, int64_t steps, float* c, int64_t ldc,
                  bool accumulate) {
  for (int64_t row = 0; row < m; row += kPairRows) {
    const Words part{a.data + row * a.row, a.row, a.step};
    float* out = c + row * ldc;
    switch (std::min<int64_t>(kPairRows, m - row)) {
      case 1: pair_strip<kIsBf16, 1>(part, b, ldb, n, steps, out, ldc, accumulate); break;
      case 2: pair_strip<kIsBf16, 2>(part, b, ldb, n, steps, out, ldc, accumulate); break;
      case 3: pair_strip<kIsBf16, 3>(part, b, ldb, n, steps, out, ldc, accumulate); break;
      case 4: pair_strip<kIsBf16, 4>(part, b, ldb, n, steps, out, ldc, accumulate); break;
      case 5: pair_strip<kIsBf16, 5>(part, b, ldb, n, steps, out, ldc, accumulate); break;
      default: pair_strip<kIsBf16, 6>(part, b, ldb, n, steps, out, ldc, accumulate); break;
    }
  }
}

// One row of words out of one row (fp32) or two (bf16; `second` null stands for zeros): out[c], zero from `count` to
// `width`, a multiple of 16.
LS_INLINE void join_rows(const float* first, const float*, int64_t count, int64_t width, float* out) {
  std::memcpy(out, first, count * sizeof(float));
  std::memset(out + count, 0, (width - count) * sizeof(float));
}
LS_INLINE void join_rows(const bf16* first, const bf16* second, int64_t count, int64_t width, float* out) {
  for (int64_t c = 0; c < width; c += kLanes) {
    const int64_t left = count - c;
    const V low = left >= kLanes ? load(first + c) : left > 0 ? load_partial(first + c, left, bf16(0)) : zero();
    V high = zero();
    if (second) high = left >= kLanes ? load(second + c) : left > 0 ? load_partial(second + c, left, bf16(0)) : zero();
    store(out + c, pair_bf16(low, high));
  }
}

}  // namespace LOCKSTEP_ISA
}  // namespace ls
