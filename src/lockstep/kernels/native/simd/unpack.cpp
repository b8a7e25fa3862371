// Packed quantised weights taken apart into a buffer that stays in cache for all tiles: nibbles to bytes, bytes to
// floats where activations are floats, scales of every kind to fp32.
#include "gemm.h"
#include "gemm_scales.h"

namespace ls {
namespace LOCKSTEP_ISA {
namespace {

constexpr int kWords = 16;  // four-byte words of a block, for each column
constexpr int kVectors = kPanel / kLanes;

// e4m3 in the low byte of each word: exponent bias 7 to 127 by a multiplication, which is exact; 0x7F is NaN.
LS_INLINE V fp8_to_float(V byte) {
  const V magnitude = and_words(byte, set1_bits(0x7F));
  const V value = mul(shift_left<20>(magnitude), set1(0x1p120f));
  const V is_nan = shift_right<7>(add_words(magnitude, set1_bits(1)));  // 1 or 0
  const V quiet = shift_left<1>(to_float(is_nan));  // fills up the exponent of 480, as which NaN came out
  const V sign = shift_left<24>(and_words(byte, set1_bits(0x80)));
  return or_words(or_words(value, quiet), sign);
}

// Four values of 16 columns to floats, as bf16 pairs (two vectors, 64 words apart) or fp32 (four).
LS_INLINE void word_to_floats(V word, bool is_fp8, V shift, bool pair_is_bf16, float* out) {
  const V low_byte = set1_bits(255);
  const V bytes[4] = {and_words(word, low_byte), and_words(shift_right<8>(word), low_byte),
                      and_words(shift_right<16>(word), low_byte), shift_right<24>(word)};
  V values[4];
  for (int i = 0; i < 4; ++i) values[i] = is_fp8 ? fp8_to_float(bytes[i]) : add(to_float(bytes[i]), shift);
  if (pair_is_bf16) {
    const V high = set1_bits(0xFFFF0000u);
    for (int i = 0; i < 2; ++i) {
      store_words(out + i * kPanel, or_words(shift_right<16>(values[2 * i]), and_words(values[2 * i + 1], high)));
    }
  } else {
    for (int i = 0; i < 4; ++i) store(out + i * kPanel, values[i]);
  }
}

// Nibbles of a block to bytes: the low ones of a packed word are one word, the high ones the next.
LS_INLINE void nibbles_to_bytes(const char* packed, char* out) {
  const V low = set1_bits(0x0F0F0F0F);
  for (int pair = 0; pair < kWords / 2; ++pair) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const V both = load_words(packed + (pair * kVectors + v) * 64);
      store_words(out + (2 * pair * kVectors + v) * 64, and_words(both, low));
      store_words(out + ((2 * pair + 1) * kVectors + v) * 64, and_words(shift_right<4>(both), low));
    }
  }
}

}  // namespace

int64_t unpacked_floats(const Format& f, const QuantLayout& layout) {
  return kPanel * kBlock + 2 * layout.pieces * kPanel * (f.is_grouped() ? 1 : 0);
}

Unpacked unpack(const Format& f, const QuantLayout& layout, const char* panel, int64_t begin, int64_t end,
                bool pair_is_bf16, float* buffer) {
  const int64_t blocks = end - begin, pieces = layout.pieces;
  const bool keeps_values = f.values == Values::kU8 && f.int_activations;
  const int64_t value_floats = f.int_activations ? kPanel * kWords : kPanel * kBlock / (pair_is_bf16 ? 2 : 1);
  float* scales = buffer + blocks * kPanel * kBlock;
  float* shifts = scales + blocks * pieces * kPanel;
  const bool has_shifts = f.is_grouped() && f.shift != Shift::kOffset;
  for (int64_t block = 0; block < blocks; ++block) {
    const char* record = panel + (begin + block) * layout.record_bytes;
    float* block_shifts = shifts + block * pieces * kPanel;
    for (int64_t piece = 0; f.is_grouped() && piece < pieces; ++piece) {
      for (int column = 0; column < kPanel; column += kLanes) {
        store(scales + (block * pieces + piece) * kPanel + column, scale_vector(f, layout, record, piece, column));
        if (!has_shifts) continue;
        store(block_shifts + piece * kPanel + column, shift_vector(f, layout, record, piece, column));
      }
    }
    if (keeps_values) continue;
    const char* values = record + layout.values_at;
    float* out = buffer + block * value_floats;
    if (f.int_activations) {
      nibbles_to_bytes(values, reinterpret_cast<char*>(out));
      continue;
    }
    alignas(64) char bytes[kPanel * kBlock];
    if (f.values == Values::kU4) {
      nibbles_to_bytes(values, bytes);
      values = bytes;
    }
    for (int word = 0; word < kWords; ++word) {
      const float* zero_points = block_shifts + word / (kWords / pieces) * kPanel;
      for (int v = 0; v < kVectors; ++v) {
        const V shift = f.shift == Shift::kZeroPoint ? load(zero_points + v * kLanes)
                                                     : set1(f.shift == Shift::kOffset ? -float(f.offset) : 0.0f);
        word_to_floats(load_words(values + (word * kVectors + v) * 64), f.values == Values::kFp8, shift, pair_is_bf16,
                       out + word * (pair_is_bf16 ? 2 : 4) * kPanel + v * kLanes);
      }
    }
  }
  Unpacked unpacked{reinterpret_cast<const char*>(buffer), value_floats * 4, f.is_grouped() ? scales : nullptr,
                    has_shifts ? shifts : nullptr};
  if (keeps_values) {
    unpacked.values = panel + begin * layout.record_bytes + layout.values_at;
    unpacked.value_stride = layout.record_bytes;
  }
  // Zero points of float activations are already taken off.
  if (!f.int_activations && f.shift == Shift::kZeroPoint) unpacked.shifts = nullptr;
  return unpacked;
}

}  // namespace LOCKSTEP_ISA
}  // namespace ls
