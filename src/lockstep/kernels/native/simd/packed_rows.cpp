// Rows of a packed quantised weight as floats, for token tables tied to the last projection; and a
// matrix times a number, for adapters.
#include "gemm.h"
#include "rows.h"

namespace ls {
namespace LOCKSTEP_ISA {
namespace {

constexpr int64_t kWordBytes = kPanel * 4;  // four values of each column of a panel

// Fields of one column of a record: what packing put there, one at a time.
struct Column {
  const Format& format;
  const QuantLayout& layout;
  int64_t column;  // within its panel

  float value(const char* record, int64_t input) const {
    const auto* values = reinterpret_cast<const uint8_t*>(record + layout.values_at);
    const int64_t word = input / 4, at = column * 4 + input % 4;
    if (format.values != Values::kU4) return static_cast<float>(values[word * kWordBytes + at]);
    const uint8_t both = values[word / 2 * kWordBytes + at];
    return static_cast<float>(word % 2 ? both >> 4 : both & 15);
  }
  float half(const char* p) const {
    uint16_t halves[kLanes];
    for (auto& h : halves) std::memcpy(&h, p, 2);
    alignas(64) float lanes[kLanes];
    store(lanes, load_half(halves));
    return lanes[0];
  }
  float scale(const char* record, int64_t at, int64_t piece, int64_t super_at) const {
    const char* p = record + at + (piece * kPanel + column) * layout.scale_bytes;
    switch (format.scales) {
      case Scales::kFp32: {
        float x;
        std::memcpy(&x, p, 4);
        return x;
      }
      case Scales::kFp16: return half(p);
      case Scales::kBf16: return to_float(*reinterpret_cast<const bf16*>(p));
      case Scales::kSuperUnsigned:
        return half(record + super_at + column * 2) * static_cast<float>(static_cast<uint8_t>(*p));
      default: return half(record + super_at + column * 2) * static_cast<float>(static_cast<int8_t>(*p));
    }
  }
};

template <typename T>
void dequantise_row(T* y, const Format& f, const QuantLayout& layout, const char* packed, int64_t row, int64_t k) {
  const char* panel = packed + row / kPanel * layout.panel_bytes;
  const Column c{f, layout, row % kPanel};
  float channel = 1.0f;
  if (!f.is_grouped()) std::memcpy(&channel, panel + layout.blocks * layout.record_bytes + c.column * 4, 4);
  const int64_t length = kBlock / layout.pieces;
  for (int64_t begin = 0; begin < k; begin += length) {
    const char* record = panel + begin / kBlock * layout.record_bytes;
    const int64_t piece = begin % kBlock / length;
    const float scale = f.is_grouped() ? c.scale(record, layout.scales_at, piece, 0) : channel;
    float offset = f.shift == Shift::kOffset ? static_cast<float>(f.offset) : 0.0f, minimum = 0.0f;
    if (f.shift == Shift::kZeroPoint) {
      offset = static_cast<float>(static_cast<uint8_t>(record[layout.shifts_at + piece * kPanel + c.column]));
    } else if (f.shift == Shift::kMinimum) {
      minimum = c.scale(record, layout.shifts_at, piece, kPanel * 2);
      if (f.is_super()) minimum = -minimum;
    }
    for (int64_t i = begin; i < std::min(begin + length, k); ++i) {
      float value = (c.value(record, i % kBlock) - offset) * scale;
      if (f.shift == Shift::kMinimum) value += minimum;
      put(y + i, value);
    }
  }
}

}  // namespace

void embedding_quantised(void* y, int dtype, const void* packed, int64_t format, const int64_t* tokens, int64_t t,
                         int64_t k) {
  const Format f = Format::of(format);
  const QuantLayout layout(f, k);
  with_dtype(dtype, [&](auto* element) {
    auto* rows = static_cast<decltype(element)>(y);
    parallel(t, 4, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        dequantise_row(rows + i * k, f, layout, static_cast<const char*>(packed), tokens[i], k);
      }
    });
  });
}

void scale(void* y, const void* x, int dtype, float factor, int64_t count) {
  with_dtype(dtype, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    constexpr int64_t piece = 64 * 1024;
    parallel((count + piece - 1) / piece, 1, [&](int64_t begin, int64_t end) {
      const int64_t first = begin * piece;
      each_vector(std::min(end * piece, count) - first, [&](int64_t i, int64_t n) {
        const V value = load_upto(static_cast<const T*>(x) + first + i, n);
        store_upto(static_cast<T*>(y) + first + i, mul(value, set1(factor)), n);
      });
    });
  });
}

}  // namespace LOCKSTEP_ISA
}  // namespace ls
