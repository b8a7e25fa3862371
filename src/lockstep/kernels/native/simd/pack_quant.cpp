// Quantised weights from their row-major form into panels: what a block of 64 inputs needs lies together, so that a
// product reads one stream (docs/decisions/011).
#include "pack.h"

namespace ls {
namespace LOCKSTEP_ISA {
namespace {

constexpr int64_t kSuperGroup = 256;  // inputs that share a super scale

struct Source {
  const uint8_t* values;  // (n, k)
  const char *scales, *shifts;  // (n, groups)
  const uint16_t *super_scales, *super_minimums;  // (n, k / 256)
  int64_t k, groups, super_groups;
};

// One column of one block; `row` < 0 clears it.
void pack_column(char* record, int column, const Format& f, const QuantLayout& layout, const Source& from, int64_t row,
                 int64_t block) {
  const int64_t first = block * kBlock, count = row < 0 ? 0 : std::min(kBlock, from.k - first);
  auto* super = reinterpret_cast<uint16_t*>(record);
  if (f.is_super()) {
    const int64_t at = row * from.super_groups + first / kSuperGroup;
    super[column] = row < 0 ? 0 : from.super_scales[at];
    if (f.shift == Shift::kMinimum) super[kPanel + column] = row < 0 ? 0 : from.super_minimums[at];
  }
  for (int piece = 0; f.is_grouped() && piece < layout.pieces; ++piece) {
    const int64_t k = first + piece * kBlock / layout.pieces, at = row * from.groups + k / f.group;
    const bool there = row >= 0 && k < from.k;
    const auto copy = [&](int64_t record_at, const char* source, int64_t bytes) {
      char* to = record + record_at + (piece * kPanel + column) * bytes;
      if (there) {
        std::memcpy(to, source + at * bytes, bytes);
      } else {
        std::memset(to, 0, bytes);
      }
    };
    copy(layout.scales_at, from.scales, layout.scale_bytes);
    if (f.shift != Shift::kOffset) copy(layout.shifts_at, from.shifts, layout.shift_bytes);
  }
  auto* values = reinterpret_cast<uint8_t*>(record + layout.values_at);
  const auto value = [&](int64_t i) -> uint8_t { return i < count ? from.values[row * from.k + first + i] : 0; };
  if (f.values == Values::kU4) {
    for (int i = 0; i < kBlock; i += 8) {
      uint8_t* word = values + (i / 8 * kPanel + column) * 4;
      for (int j = 0; j < 4; ++j) word[j] = value(i + j) | value(i + 4 + j) << 4;
    }
  } else {
    for (int i = 0; i < kBlock; i += 4) {
      uint8_t* word = values + (i / 4 * kPanel + column) * 4;
      for (int j = 0; j < 4; ++j) word[j] = value(i + j);
    }
  }
}

}  // namespace

void pack_quantised(void* dst, int64_t format, const void* values, const void* scales, const void* shifts,
                    const void* super_scales, const void* super_minimums, int64_t n, int64_t k, int64_t first_column,
                    int interleaved) {
  const Format f = Format::of(format);
  const QuantLayout layout(f, k);
  const Columns columns{first_column, n, interleaved != 0};
  const Source from{static_cast<const uint8_t*>(values), static_cast<const char*>(scales),
                    static_cast<const char*>(shifts), static_cast<const uint16_t*>(super_scales),
                    static_cast<const uint16_t*>(super_minimums), k, f.is_grouped() ? (k + f.group - 1) / f.group : 1,
                    (k + kSuperGroup - 1) / kSuperGroup};
  parallel(columns.panels(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t number = columns.first_panel() + i;
      char* panel = static_cast<char*>(dst) + number * layout.panel_bytes;
      for (int c = 0; c < kPanel; ++c) {
        const int64_t row = columns.row_of(number * kPanel + c);
        if (row < 0 && first_column > 0) continue;  // another piece's
        for (int64_t block = 0; block < layout.blocks; ++block) {
          pack_column(panel + block * layout.record_bytes, c, f, layout, from, row, block);
        }
        if (f.scales == Scales::kChannel) {
          float* channel = reinterpret_cast<float*>(panel + layout.blocks * layout.record_bytes);
          channel[c] = row < 0 ? 0.0f : reinterpret_cast<const float*>(scales)[row];
        }
      }
    }
  });
}

}  // namespace LOCKSTEP_ISA
}  // namespace ls
