// Tiles of 8-bit activations and 4-bit weights for a row or a few: nibbles are taken apart in registers, as they come
// from memory, and scales as they are needed. The arithmetic, and so the bits, are those of gemm_quant.cpp after
// unpack.cpp; more rows share what those two write to L1.
#include "gemm.h"
#include "gemm_scales.h"

namespace ls {
namespace LOCKSTEP_ISA {
namespace {

constexpr int kPairs = 8;  // of the 16 four-byte words of a block: low nibbles are one, high nibbles the next

template <int MR, int NV>
__attribute__((noinline)) void multiply(const NibbleTileArguments& t, int of_strip) {
  const Format& f = *t.format;
  const QuantLayout& layout = *t.quant;
  const int pieces = layout.pieces, pairs = kPairs / pieces;
  const int64_t stride = t.layout->stride;
  const char* q = t.rows + t.block * kBlock;
  const char* row_scales = t.rows + t.layout->scales_at + t.block * 4;
  const char* starts = t.rows + t.layout->starts_at + t.block * pieces * 4;
  const char* row_sums = t.rows + t.layout->sums_at + t.block * pieces * 4;
  const V low = set1_bits(0x0F0F0F0F);
  const int first_vector = t.first_vector + of_strip;
  float* sums = t.sums + of_strip * kLanes;
  const char* record = t.record;
  for (int64_t block = 0; block < t.blocks; ++block, record += layout.record_bytes, row_scales += 4) {
    const char* values = record + layout.values_at + first_vector * 64;
    V total[MR][NV];
    for (int r = 0; r < MR; ++r) {
      for (int v = 0; v < NV; ++v) total[r][v] = zero();
    }
    for (int piece = 0; piece < pieces; ++piece, starts += 4, row_sums += 4) {
      V scale[NV], shift[NV];  // first, as they lie before the values: memory is read in one ascending run
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) {
        const int column = (first_vector + v) * kLanes;
        scale[v] = scale_vector(f, layout, record, piece, column);
        shift[v] = f.shift == Shift::kOffset ? zero() : shift_vector(f, layout, record, piece, column);
      }
      V acc[MR][NV];
#pragma GCC unroll 3
      for (int r = 0; r < MR; ++r) {
        const V start = word_at(starts + r * stride);
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) acc[r][v] = start;
      }
      for (int pair = 0; pair < pairs; ++pair, q += 8, values += kPanel * 4) {
        V first[MR], second[MR];
#pragma GCC unroll 3
        for (int r = 0; r < MR; ++r) first[r] = word_at(q + r * stride), second[r] = word_at(q + r * stride + 4);
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) {
          const V both = load_words(values + v * 64);
          const V lows = and_words(both, low), highs = and_words(shift_right<4>(both), low);
#pragma GCC unroll 3
          for (int r = 0; r < MR; ++r) acc[r][v] = dot_bytes(acc[r][v], lows, first[r]);
#pragma GCC unroll 3
          for (int r = 0; r < MR; ++r) acc[r][v] = dot_bytes(acc[r][v], highs, second[r]);
        }
      }
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) {
#pragma GCC unroll 3
        for (int r = 0; r < MR; ++r) {
          V value = to_float(acc[r][v]);
          const V row_sum = word_at(row_sums + r * stride);
          if (f.shift == Shift::kZeroPoint) value = fma(shift[v], row_sum, value);
          total[r][v] = fma(scale[v], value, total[r][v]);
          if (f.shift == Shift::kMinimum) total[r][v] = fma(shift[v], row_sum, total[r][v]);
        }
      }
    }
#pragma GCC unroll 3
    for (int r = 0; r < MR; ++r) {
      const V row_scale = word_at(row_scales + r * stride);
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) {
        float* sum = sums + r * kPanel + v * kLanes;
        store(sum, fma(row_scale, total[r][v], load(sum)));
      }
    }
  }
}

template <int MR, int kVectors>
void tile(const NibbleTileArguments& t) {
  constexpr int NV = std::min(kVectors, kColumnVectors);
  for (int v = 0; v < kVectors; v += NV) multiply<MR, NV>(t, v);
}

template <int kVectors>
void tile_of(const NibbleTileArguments& t, int rows) {
  static constexpr void (*kTiles[kNibbleRows])(const NibbleTileArguments&) = {tile<1, kVectors>, tile<2, kVectors>,
                                                                            tile<3, kVectors>};
  kTiles[rows - 1](t);
}

}  // namespace

void nibble_tile(const NibbleTileArguments& t, int rows, int vectors) {
  vectors == 4 ? tile_of<4>(t, rows) : tile_of<2>(t, rows);
}

}  // namespace LOCKSTEP_ISA
}  // namespace ls
