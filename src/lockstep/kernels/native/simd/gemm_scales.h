// Scales, minimums and zero points of a packed panel, 16 columns at a time, as fp32.
#pragma once
#include "gemm.h"

namespace ls {
namespace LOCKSTEP_ISA {

LS_INLINE V scale_value(const Format& f, const char* scales, const uint16_t* super, int column) {
  switch (f.scales) {
    case Scales::kFp32: return load(reinterpret_cast<const float*>(scales) + column);
    case Scales::kFp16: return load_half(reinterpret_cast<const uint16_t*>(scales) + column);
    case Scales::kBf16: return load(reinterpret_cast<const bf16*>(scales) + column);
    case Scales::kSuperUnsigned:
      return mul(load_half(super + column), load_bytes(reinterpret_cast<const uint8_t*>(scales) + column));
    default: return mul(load_half(super + column), load_bytes(reinterpret_cast<const int8_t*>(scales) + column));
  }
}

// The scale of a piece of the block that `record` holds.
LS_INLINE V scale_vector(const Format& f, const QuantLayout& layout, const char* record, int64_t piece, int column) {
  return scale_value(f, record + layout.scales_at + piece * kPanel * layout.scale_bytes,
                     reinterpret_cast<const uint16_t*>(record), column);
}

// Its minimum, or its zero point negated.
LS_INLINE V shift_vector(const Format& f, const QuantLayout& layout, const char* record, int64_t piece, int column) {
  const char* shifts = record + layout.shifts_at + piece * kPanel * layout.shift_bytes;
  if (f.shift == Shift::kZeroPoint) {
    return sub(zero(), load_bytes(reinterpret_cast<const uint8_t*>(shifts) + column));
  }
  const V minimum = scale_value(f, shifts, reinterpret_cast<const uint16_t*>(record) + kPanel, column);
  return f.is_super() ? sub(zero(), minimum) : minimum;
}

}  // namespace LOCKSTEP_ISA
}  // namespace ls
