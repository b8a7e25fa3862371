// Weights into panels of 64 columns, as the product reads them (docs/decisions/011).
//
// A piece of a weight fills columns of its own, so that several weights make one product: first_column + row, or, when
// interleaved (gate and up of a gated product), 16 rows into every other 16 columns.
#include "pack.h"

namespace ls {
namespace LOCKSTEP_ISA {
namespace {

template <typename Dst, typename Src>
void pack_as(Dst* dst, const Src* src, const Columns& columns, int64_t k, int64_t stride_n, int64_t stride_k) {
  constexpr int pair = sizeof(Dst) == 2 ? 2 : 1;
  const int64_t steps = (k + pair - 1) / pair;
  constexpr int64_t kBand = 32;  // steps packed at a time, so that what is read and what is written stay in L1
  const int64_t bands = (steps + kBand - 1) / kBand;
  parallel(columns.panels() * bands, 4, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t panel = columns.first_panel() + unit / bands, first = unit % bands * kBand;
      const int64_t last = std::min(first + kBand, steps), ks = std::min(last * pair, k) - first * pair;
      Dst* out = dst + (panel * steps + first) * kPanel * pair;
      const Src* rows[kPanel];
      for (int c = 0; c < kPanel; ++c) {
        const int64_t row = columns.row_of(panel * kPanel + c);
        rows[c] = row < 0 ? nullptr : src + row * stride_n + first * pair * stride_k;
      }
      const auto put_at = [&](int64_t i, int c) {
        put(out + (i / pair * kPanel + c) * pair + i % pair, to_float(rows[c][i * stride_k]));
      };
      for (int c = 0; c < kPanel; ++c) {  // padding: the odd end of K, and columns that nobody fills
        if (rows[c] ? ks < (last - first) * pair : columns.first == 0) {
          for (int64_t i = rows[c] ? ks : 0; i < (last - first) * pair; ++i) {
            out[(i / pair * kPanel + c) * pair + i % pair] = 0;
          }
        }
      }
      if (stride_n == 1) {
        for (int64_t i = 0; i < ks; ++i) {
          for (int c = 0; c < kPanel; ++c) {
            if (rows[c]) put_at(i, c);
          }
        }
      } else {
        for (int c = 0; c < kPanel; ++c) {
          if (!rows[c]) continue;
          for (int64_t i = 0; i < ks; ++i) put_at(i, c);
        }
      }
    }
  });
}

}  // namespace

void pack(void* dst, int dst_dtype, const void* src, int src_dtype, int64_t n, int64_t k, int64_t stride_n,
          int64_t stride_k, int64_t first_column, int interleaved) {
  with_dtype(dst_dtype, [&](auto* d) {
    with_dtype(src_dtype, [&](auto* s) {
      pack_as(static_cast<decltype(d)>(dst), static_cast<decltype(s)>(const_cast<void*>(src)),
              {first_column, n, interleaved != 0}, k, stride_n, stride_k);
    });
  });
}

}  // namespace LOCKSTEP_ISA
}  // namespace ls
