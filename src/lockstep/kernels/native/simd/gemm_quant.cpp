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
const float kZeros[kRows * kPanel] = {};

enum class Terms { kChannel, kScales, kMinimums, kZeroPoints };

// Adds one piece: from integer sums to `to`, or, for the last piece of a block, to the row's sums.
template <Terms kTerms, bool kIsLast, int MR, int NV>
LS_INLINE void add_piece(V (&acc)[MR][NV], const float* scales, const float* shifts, const char* sums_of_rows,
                         const char* row_scales, int64_t stride, const float* from, float* to) {
  V row_scale[MR], row_sum[MR];
#pragma GCC unroll 6
  for (int r = 0; r < MR; ++r) {
    float one;
    if (kIsLast) {
      std::memcpy(&one, row_scales + r * stride, 4);
      row_scale[r] = set1(one);
    }
    if (kTerms >= Terms::kMinimums) {
      std::memcpy(&one, sums_of_rows + r * stride, 4);
      row_sum[r] = set1(one);
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < NV; ++v) {
    const V scale = kTerms == Terms::kChannel ? zero() : load(scales + v * kLanes);
    const V shift = kTerms >= Terms::kMinimums ? load(shifts + v * kLanes) : zero();
#pragma GCC unroll 6
    for (int r = 0; r < MR; ++r) {
      V value = to_float(acc[r][v]);
      if (kTerms == Terms::kZeroPoints) value = fma(shift, row_sum[r], value);  // whole numbers below 2^24: exact
      if (kTerms != Terms::kChannel) value = fma(scale, value, load(from + r * kPanel + v * kLanes));
      if (kTerms == Terms::kMinimums) value = fma(shift, row_sum[r], value);
      float* at = to + r * kPanel + v * kLanes;
      store(at, kIsLast ? fma(row_scale[r], value, load(at)) : value);
    }
  }
}

template <Terms kTerms, int MR, int NV>
__attribute__((noinline)) void multiply(const QuantTileArguments& t, int first_vector) {
  const int64_t stride = t.layout->stride;
  const int pieces = t.pieces, words = kWords / pieces;
  const char *q = t.rows + t.block * kBlock, *values = t.weight.values + first_vector * kLanes * 4;
  const char* row_scales = t.rows + t.layout->scales_at + t.block * 4;
  const char* starts = t.rows + t.layout->starts_at + t.block * pieces * 4;
  const char* row_sums = t.rows + t.layout->sums_at + t.block * pieces * 4;
  const float *scales = t.weight.scales, *shifts = t.weight.shifts;
  if (kTerms != Terms::kChannel) scales += first_vector * kLanes;
  if (kTerms >= Terms::kMinimums) shifts += first_vector * kLanes;
  float* sums = t.sums + first_vector * kLanes;
  alignas(64) float partial[MR * kPanel];
  for (int64_t block = 0; block < t.blocks; ++block, q += kBlock, values += t.weight.value_stride, row_scales += 4) {
    for (int piece = 0; piece < pieces; ++piece) {
      V acc[MR][NV];
#pragma GCC unroll 6
      for (int r = 0; r < MR; ++r) {
        uint32_t start;
        std::memcpy(&start, starts + r * stride, 4);
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) acc[r][v] = set1_bits(start);
      }
      const char *at = q + piece * words * 4, *b = values + piece * words * kPanel * 4;
      for (int w = 0; w < words; ++w) {
        V bv[NV];
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) bv[v] = load_words(b + (w * kPanel + v * kLanes) * 4);
#pragma GCC unroll 6
        for (int r = 0; r < MR; ++r) {
          uint32_t word;
          std::memcpy(&word, at + r * stride + w * 4, 4);
          const V av = set1_bits(word);
#pragma GCC unroll 4
          for (int v = 0; v < NV; ++v) acc[r][v] = dot_bytes(acc[r][v], bv[v], av);
        }
      }
      const float* from = piece == 0 ? kZeros : partial;
      if (piece + 1 < pieces) {
        add_piece<kTerms, false, MR, NV>(acc, scales, shifts, row_sums, row_scales, stride, from, partial);
      } else {
        add_piece<kTerms, true, MR, NV>(acc, scales, shifts, row_sums, row_scales, stride, from, sums);
      }
      starts += 4;
      row_sums += 4;
      if (kTerms != Terms::kChannel) scales += kPanel;
      if (kTerms >= Terms::kMinimums) shifts += kPanel;
    }
  }
}

template <Terms kTerms, int MR, int kVectors>
void tile_with(const QuantTileArguments& t) {
  constexpr int NV = std::min(kVectors, kColumnVectors);
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
