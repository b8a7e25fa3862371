// Tiles of 8-bit activations and weights of bytes, as they are packed or as unpack.cpp leaves them.
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

// Vectors of columns at a time: the integer sums of a piece fit into registers beside the floats they are added to.
template <int MR, int kVectors>
constexpr int vectors_at_once() {
  return std::min({kVectors, kColumnVectors, MR <= 3 ? 4 : 2});
}

template <int MR, int NV, typename F>
LS_INLINE void each(const F& f) {
#pragma GCC unroll 6
  for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) f(r, v);
  }
}

// acc = starts + products of `words` four-byte words; moves q and b behind them.
template <int MR, int NV>
LS_INLINE void dots(V (&acc)[MR][NV], const char* starts, const char*& q, int64_t stride, const char*& b, int words) {
#pragma GCC unroll 6
  for (int r = 0; r < MR; ++r) {
    const V start = word_at(starts + r * stride);
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) acc[r][v] = start;
  }
  for (int w = 0; w < words; ++w, q += 4, b += kPanel * 4) {
    V bv[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) bv[v] = load_words(b + v * kLanes * 4);
#pragma GCC unroll 6
    for (int r = 0; r < MR; ++r) {
      const V word = word_at(q + r * stride);
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) acc[r][v] = dot_bytes(acc[r][v], bv[v], word);
    }
  }
}

// One scale a column, applied when a row is finished: sums stay in registers from block to block.
template <int MR, int NV>
__attribute__((noinline)) void multiply_channel(const QuantTileArguments& t, int first_vector) {
  const int64_t stride = t.layout->stride;
  const char *q = t.rows + t.block * kBlock, *values = t.weight.values + first_vector * kLanes * 4;
  const char* row_scales = t.rows + t.layout->scales_at + t.block * 4;
  const char* starts = t.rows + t.layout->starts_at + t.block * 4;
  float* sums = t.sums + first_vector * kLanes;
  V sum[MR][NV];
  each<MR, NV>([&](int r, int v) { sum[r][v] = load(sums + r * kPanel + v * kLanes); });
  for (int64_t block = 0; block < t.blocks; ++block, values += t.weight.value_stride, row_scales += 4, starts += 4) {
    V acc[MR][NV];
    const char* b = values;
    dots(acc, starts, q, stride, b, kWords);
    each<MR, NV>([&](int r, int v) {
      sum[r][v] = fma(word_at(row_scales + r * stride), to_float(acc[r][v]), sum[r][v]);
    });
  }
  each<MR, NV>([&](int r, int v) { store(sums + r * kPanel + v * kLanes, sum[r][v]); });
}

template <Terms kTerms, int MR, int NV>
__attribute__((noinline)) void multiply(const QuantTileArguments& t, int first_vector) {
  constexpr bool kHasShifts = kTerms >= Terms::kMinimums;
  const int64_t stride = t.layout->stride;
  const int pieces = t.pieces, words = kWords / pieces;
  const char *q = t.rows + t.block * kBlock, *values = t.weight.values + first_vector * kLanes * 4;
  const char* row_scales = t.rows + t.layout->scales_at + t.block * 4;
  const char* starts = t.rows + t.layout->starts_at + t.block * pieces * 4;
  const char* row_sums = t.rows + t.layout->sums_at + t.block * pieces * 4;
  const float* scales = t.weight.scales + first_vector * kLanes;
  const float* shifts = kHasShifts ? t.weight.shifts + first_vector * kLanes : nullptr;
  float* sums = t.sums + first_vector * kLanes;
  for (int64_t block = 0; block < t.blocks; ++block, values += t.weight.value_stride, row_scales += 4) {
    asm volatile("" ::: "memory");  // keeps gcc from a second copy of all sums on the stack, written at every block
    V total[MR][NV];
    each<MR, NV>([&](int r, int v) { total[r][v] = zero(); });
    const char* b = values;
    for (int piece = 0; piece < pieces; ++piece, starts += 4, row_sums += 4, scales += kPanel) {
      V acc[MR][NV];
      dots(acc, starts, q, stride, b, words);
      each<MR, NV>([&](int r, int v) {
        V value = to_float(acc[r][v]);
        if constexpr (kHasShifts) {
          const V shift = load(shifts + v * kLanes), row_sum = word_at(row_sums + r * stride);
          if (kTerms == Terms::kZeroPoints) value = fma(shift, row_sum, value);  // whole numbers below 2^24: exact
          total[r][v] = fma(load(scales + v * kLanes), value, total[r][v]);
          if (kTerms == Terms::kMinimums) total[r][v] = fma(shift, row_sum, total[r][v]);
        } else {
          total[r][v] = fma(load(scales + v * kLanes), value, total[r][v]);
        }
      });
      if (kHasShifts) shifts += kPanel;
    }
    each<MR, NV>([&](int r, int v) {
      float* sum = sums + r * kPanel + v * kLanes;
      store(sum, fma(word_at(row_scales + r * stride), total[r][v], load(sum)));
    });
  }
}

template <Terms kTerms, int MR, int kVectors>
void tile_with(const QuantTileArguments& t) {
  constexpr int NV = vectors_at_once<MR, kVectors>();
  for (int v = 0; v < kVectors; v += NV) {
    if constexpr (kTerms == Terms::kChannel) {
      multiply_channel<MR, NV>(t, v);
    } else {
      multiply<kTerms, MR, NV>(t, v);
    }
  }
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
