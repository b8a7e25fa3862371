// The product family: what its parts share. The layouts and the arithmetic are in docs/decisions/011.
//
// gemm.cpp         the kernel: rows prepared, work split over threads, tiles run, results finished
// gemm_float.cpp   tiles of fp32 and bf16
// gemm_quant.cpp   tiles of 8-bit activations
// gemm_nibbles.cpp  the same for a few rows of 4-bit weights as they are packed
// unpack.cpp       packed weights taken apart for tiles
// pack.cpp         weights into panels
// quantise_rows.cpp  activations to 8 bits
#pragma once
#include "words.h"

namespace ls {
namespace LOCKSTEP_ISA {

constexpr int kPanel = 64;  // columns of a panel
constexpr int kRows = 6;    // rows of a register tile
constexpr int64_t kBlock = 64;  // inputs that share an activation scale, and a record of a quantised panel

enum class Values : uint8_t { kFp32, kBf16, kU8, kU4, kFp8 };
enum class Scales : uint8_t { kNone, kChannel, kFp32, kFp16, kBf16, kSuperUnsigned, kSuperSigned };
enum class Shift : uint8_t { kOffset, kZeroPoint, kMinimum };

// How a packed weight is held: the ABI's `format` word, lowest byte first.
struct Format {
  Values values;
  Scales scales;
  Shift shift;
  uint8_t offset;          // what is taken off every value, where shift is kOffset
  uint16_t group;          // inputs that share a scale
  uint8_t int_activations;  // 1: rows are quantised to 8 bits
  uint8_t unused;

  static Format of(int64_t code) {
    Format format;
    static_assert(sizeof format == sizeof code, "the format is one word");
    std::memcpy(&format, &code, sizeof code);
    return format;
  }
  bool is_float() const { return values <= Values::kBf16; }
  bool is_grouped() const { return scales >= Scales::kFp32; }
  bool is_super() const { return scales >= Scales::kSuperUnsigned; }
};

// Where things lie in a panel of a quantised weight: one record for each block of 64 inputs (super scales, super
// minimums, scales, minimums or zero points, values), then fp32 scales of its columns where there is one a column.
struct QuantLayout {
  int64_t blocks;
  int pieces;  // groups inside a block: 1, 2 or 4
  int64_t scale_bytes, shift_bytes;  // of one element
  int64_t scales_at, shifts_at, values_at, record_bytes, panel_bytes;

  QuantLayout(const Format& f, int64_t k) {
    blocks = (k + kBlock - 1) / kBlock;
    pieces = f.is_grouped() && f.group < kBlock ? static_cast<int>(kBlock / f.group) : 1;
    scale_bytes = !f.is_grouped() ? 0 : f.is_super() ? 1 : f.scales == Scales::kFp32 ? 4 : 2;
    shift_bytes = f.shift == Shift::kZeroPoint ? 1 : f.shift == Shift::kMinimum ? scale_bytes : 0;
    scales_at = !f.is_super() ? 0 : (f.shift == Shift::kMinimum ? 2 : 1) * kPanel * 2;
    shifts_at = scales_at + pieces * kPanel * scale_bytes;
    values_at = shifts_at + pieces * kPanel * shift_bytes;
    record_bytes = values_at + kPanel * kBlock / (f.values == Values::kU4 ? 2 : 1);
    panel_bytes = blocks * record_bytes + (f.scales == Scales::kChannel ? kPanel * 4 : 0);
  }
};

// sums (rows x 64) += a * b over `steps` 32-bit words of each row: one fp32 or two bf16; 64 words of b a step.
using FloatTile = void (*)(const char* a, int64_t a_stride, const float* b, int64_t steps, float* sums);
FloatTile float_tile(bool is_bf16, int rows, int vectors);

// Rows a multiple of 2 KiB apart share a few sets of the cache.
constexpr int64_t apart(int64_t stride) { return stride % 2048 == 0 ? stride + 64 : stride; }

// A quantised row: 64 bytes a block, then a scale a block, then for each piece what its accumulators start from
// (-offset * sum) and the sum of its values, as a float.
struct QuantRows {
  int64_t scales_at, starts_at, sums_at, stride;
  QuantRows(int64_t blocks, int pieces)
      : scales_at(blocks * kBlock),
        starts_at(scales_at + blocks * 4),
        sums_at(starts_at + blocks * pieces * 4),
        stride(apart((sums_at + blocks * pieces * 4 + 63) / 64 * 64)) {}
};

// Blocks of a panel ready for tiles: bytes (or floats, for float activations) and fp32 scales.
struct Unpacked {
  const char* values;
  int64_t value_stride;  // bytes from block to block
  const float* scales;   // [block][piece][64]; null: one a column, or none
  const float* shifts;   // [block][piece][64]: minimums, or zero points negated; null: neither
};

// A word of four bytes, or a float, in every lane.
LS_INLINE V word_at(const char* p) {
  uint32_t word;
  std::memcpy(&word, p, 4);
  return set1_bits(word);
}

struct QuantTileArguments {
  const char* rows;  // the first row
  const QuantRows* layout;
  int64_t block, blocks;  // the first, and how many
  int pieces;
  bool zero_points;
  Unpacked weight;
  float* sums;
};
using QuantTile = void (*)(const QuantTileArguments&);
QuantTile quant_tile(int rows, int vectors);

// The same for 4-bit weights as they are packed, and at most kNibbleRows rows.
constexpr int kNibbleRows = 3;
struct NibbleTileArguments {
  const char* rows;
  const QuantRows* layout;
  int64_t block, blocks;
  const Format* format;
  const QuantLayout* quant;
  const char* record;  // of the first block
  int first_vector;
  float* sums;
};
void nibble_tile(const NibbleTileArguments& t, int rows, int vectors);

// Unpacks blocks [begin, end) of a panel into `buffer`, of unpacked_floats() floats a block. `pair_is_bf16`: values as
// bf16 pairs, else fp32, where activations are floats; bytes where they are not (then U8 stays where it is).
int64_t unpacked_floats(const Format& f, const QuantLayout& layout);
Unpacked unpack(const Format& f, const QuantLayout& layout, const char* panel, int64_t begin, int64_t end,
                bool pair_is_bf16, float* buffer);

// One row to 8 bits: q[ceil(k / 64) * 64], zero-padded, and a scale a block.
void quantise_row(const void* x, int dtype, int64_t k, int8_t* q, float* scales);

}  // namespace LOCKSTEP_ISA
}  // namespace ls
