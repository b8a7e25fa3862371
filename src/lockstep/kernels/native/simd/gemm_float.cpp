// Register tiles of fp32 and bf16: one accumulator an output, steps ascending.
//
// A step is 64 words of a panel, [k][64] in fp32 and [k/2][64][2] in bf16. A tile continues from the sums it finds, so
// that K can be blocked for a cache without changing a bit.
#include "gemm.h"

namespace ls {
namespace LOCKSTEP_ISA {
namespace {

template <bool kIsBf16, int MR, int NV>
LS_INLINE void multiply(const char* a, int64_t a_stride, const float* b, int64_t steps, float* sums) {
  V acc[MR][NV];
#pragma GCC unroll 6
  for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) acc[r][v] = load(sums + r * kPanel + v * kLanes);
  }
  for (int64_t s = 0; s < steps; ++s) {
    V bv[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) bv[v] = load(b + s * kPanel + v * kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < MR; ++r) {
      uint32_t word;
      std::memcpy(&word, a + r * a_stride + s * 4, 4);
      const V av = set1_bits(word);
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) acc[r][v] = kIsBf16 ? dot_bf16(acc[r][v], av, bv[v]) : fma(av, bv[v], acc[r][v]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) store(sums + r * kPanel + v * kLanes, acc[r][v]);
  }
}

template <bool kIsBf16, int MR, int kVectors>
void tile(const char* a, int64_t a_stride, const float* b, int64_t steps, float* sums) {
  constexpr int NV = std::min(kVectors, kColumnVectors);
  for (int v = 0; v < kVectors; v += NV) {
    multiply<kIsBf16, MR, NV>(a, a_stride, b + v * kLanes, steps, sums + v * kLanes);
  }
}

template <bool kIsBf16, int kVectors>
FloatTile tile_of(int rows) {
  static constexpr FloatTile kTiles[kRows] = {tile<kIsBf16, 1, kVectors>, tile<kIsBf16, 2, kVectors>,
                                              tile<kIsBf16, 3, kVectors>, tile<kIsBf16, 4, kVectors>,
                                              tile<kIsBf16, 5, kVectors>, tile<kIsBf16, 6, kVectors>};
  return kTiles[rows - 1];
}

}  // namespace

FloatTile float_tile(bool is_bf16, int rows, int vectors) {
  if (is_bf16) return vectors == 4 ? tile_of<true, 4>(rows) : tile_of<true, 2>(rows);
  return vectors == 4 ? tile_of<false, 4>(rows) : tile_of<false, 2>(rows);
}

}  // namespace LOCKSTEP_ISA
}  // namespace ls
