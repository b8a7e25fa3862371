// Tiles of 8-bit activations, and packed weights taken apart.
//
// A block of 64 inputs is 64 columns x 16 words of four bytes. Bytes multiply exactly into 32-bit sums (64 products of
// at most 255 * 127), each piece of a block becomes a float once: P = sum over pieces of scale * sum (+ minimum *
// sum of activations), and the row's sums gain scale of activations * P. All of it in one order on every machine.
#include "gemm.h"

namespace ls {
namespace LOCKSTEP_ISA {
namespace {

constexpr int kWords = 16;  // four-byte words of a block, for each column

enum class Terms { kChannel, kScales, kMinimums, kZeroPoints };

// Vectors of columns whose integer sums, and block sums beside them where blocks have scales, fit into registers.
template <Terms kTerms, int MR, int kVectors>
constexpr int vectors_at_once() {
  const int fit = kTerms == Terms::kChannel || MR <= 3 ? 4 : 2;
  return std::min({kVectors, kColumnVectors, fit});
}

LS_INLINE float float_at(const char* p) {
  float value;
  std::memcpy(&value, p, 4);
  return value;
}
LS_INLINE V broadcast_word(const char* p) {
  uint32_t word;
  std::memcpy(&word, p, 4);
  return set1_bits(word);
}

template <Terms kTerms, int MR, int NV>
__attribute__((noinline)) void multiply(const QuantTileArguments& t, int first_vector) {
  constexpr bool kHasScales = kTerms != Terms::kChannel, kHasShifts = kTerms >= Terms::kMinimums;
  const int64_t stride = t.layout->stride, blocks = t.blocks, value_stride = t.weight.value_stride;
  const int pieces = kHasScales ? t.pieces : 1, words = kWords / pieces;
  const char *q = t.rows + t.block * kBlock, *values = t.weight.values + first_vector * kLanes * 4;
  const char* row_scales = t.rows + t.layout->scales_at + t.block * 4;
  const char* starts = t.rows + t.layout->starts_at + t.block * pieces * 4;
  const char* row_sums = t.rows + t.layout->sums_at + t.block * pieces * 4;
  const float* scales = kHasScales ? t.weight.scales + first_vector * kLanes : nullptr;
  const float* shifts = kHasShifts ? t.weight.shifts + first_vector * kLanes : nullptr;
  float* sums = t.sums + first_vector * kLanes;
  for (int64_t block = 0; block < blocks; ++block, values += value_stride) {
    asm volatile("" ::: "memory");  // keeps gcc from a second copy of all sums on the stack, written at every block
    V total[MR][NV];
#pragma GCC unroll 6
    for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) total[r][v] = zero();
    }
    const char* b = values;
    for (int piece = 0; piece < pieces; ++piece) {
      V acc[MR][NV];
#pragma GCC unroll 6
      for (int r = 0; r < MR; ++r) {
        const V start = broadcast_word(starts + r * stride);
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) acc[r][v] = start;
      }
      for (int w = 0; w < words; ++w, q += 4, b += kPanel * 4) {
        V bv[NV];
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) bv[v] = load_words(b + v * kLanes * 4);
#pragma GCC unroll 6
        for (int r = 0; r < MR; ++r) {
          const V word = broadcast_word(q + r * stride);
#pragma GCC unroll 4
          for (int v = 0; v < NV; ++v) acc[r][v] = dot_bytes(acc[r][v], bv[v], word);
        }
      }
#pragma GCC unroll 6
      for (int r = 0; r < MR; ++r) {
        const V row_sum = kHasShifts ? set1(float_at(row_sums + r * stride)) : zero();
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) {
          V value = to_float(acc[r][v]);
          const V shift = kHasShifts ? load(shifts + v * kLanes) : zero();
          if (kTerms == Terms::kZeroPoints) value = fma(shift, row_sum, value);  // whole numbers below 2^24: exact
          total[r][v] = kHasScales ? fma(load(scales + v * kLanes), value, total[r][v]) : value;
          if (kTerms == Terms::kMinimums) total[r][v] = fma(shift, row_sum, total[r][v]);
        }
      }
      starts += 4;
      row_sums += 4;
      if (kHasScales) scales += kPanel;
      if (kHasShifts) shifts += kPanel;
    }
#pragma GCC unroll 6
    for (int r = 0; r < MR; ++r) {
      const V row_scale = set1(float_at(row_scales + r * stride));
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) {
        float* sum = sums + r * kPanel + v * kLanes;
        store(sum, fma(row_scale, total[r][v], load(sum)));
      }
    }
    row_scales += 4;
  }
}

template <Terms kTerms, int MR, int kVectors>
void tile_with(const QuantTileArguments& t) {
  constexpr int NV = vectors_at_once<kTerms, MR, kVectors>();
  for (int v = 0; v < kVectors; v += NV) multiply<kTerms, MR, NV>(t, v);
}

template <int MR, int kVectors>
void tile(const QuantTileArguments& t) {
  if (!t.weight.scales) return tile_with<Terms::kChannel, MR, kVectors>(t);
  if (!t.weight.shifts) return tile_with<Terms::kScales, MR, kVectors>(t);
  if (t.zero_points) return tile_with<Terms::kZeroPoints, MR, kVectors>(t);
  tile_with<Terms::kMinimums, MR, kVectors>(t);
}

template <int kVectors>
QuantTile tile_of(int rows) {
  static constexpr QuantTile kTiles[kRows] = {tile<1, kVectors>, tile<2, kVectors>, tile<3, kVectors>,
                                              tile<4, kVectors>, tile<5, kVectors>, tile<6, kVectors>};
  return kTiles[rows - 1];
}

}  // namespace

QuantTile quant_tile(int rows, int vectors) { return vectors == 4 ? tile_of<4>(rows) : tile_of<2>(rows); }

}  // namespace LOCKSTEP_ISA
}  // namespace ls
