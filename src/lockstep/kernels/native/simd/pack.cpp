// Weights into panels of 64 columns, as the product reads them (docs/decisions/011).
//
// A piece of a weight fills columns of its own, so that several weights make one product: first_column + row, or, when
// interleaved (gate and up of a gated product), 16 rows into every other 16 columns.
#include "pack.h"

namespace ls {
namespace LOCKSTEP_ISA {
namespace {

constexpr int kBand = 32;  // steps packed at a time, so that what is read and what is written stay in L1

// Steps of a panel from a matrix whose columns lie together: in[i * stride + column].
template <typename Dst, typename Src>
void join_steps(Dst* out, const Src* in, int64_t width, int64_t ks, int64_t stride) {
  constexpr int pair = sizeof(Dst) == 2 ? 2 : 1;
  alignas(64) Dst rows[2][kPanel] = {};
  for (int64_t i = 0; i < ks; i += pair) {
    for (int64_t half = 0; half < pair; ++half) {
      const bool is_there = i + half < ks;
      for (int64_t c = 0; c < kPanel; c += kLanes) {
        const Src* at = in + (i + half) * stride + c;
        const int64_t left = is_there ? width - c : 0;
        store(rows[half] + c, left >= kLanes ? load(at) : left > 0 ? load_partial(at, left, Src(0)) : zero());
      }
    }
    auto* words = reinterpret_cast<float*>(out + i * kPanel);
    if (pair == 1) {
      std::memcpy(words, rows[0], kPanel * sizeof(float));
    } else {
      for (int64_t c = 0; c < kPanel; c += kLanes) store(words + c, pair_bf16(load(rows[0] + c), load(rows[1] + c)));
    }
  }
}

// Steps of a panel from a matrix whose rows lie together: in[column * stride + i].
template <typename Dst, typename Src>
void turn_rows(Dst* out, const Src* in, int64_t width, int64_t ks, int64_t stride) {
  constexpr int pair = sizeof(Dst) == 2 ? 2 : 1;
  alignas(64) uint32_t words[kPanel][kBand];
  for (int64_t c = 0; c < width; ++c) {
    auto* line = reinterpret_cast<Dst*>(words[c]);
    const Src* row = in + c * stride;
    int64_t i = 0;
    for (; i + kLanes <= ks; i += kLanes) store(line + i, load(row + i));
    if (i < ks) store(line + i, load_partial(row + i, ks - i, Src(0)));
  }
  auto* to = reinterpret_cast<uint32_t*>(out);
  for (int64_t s = 0; s < (ks + pair - 1) / pair; ++s) {
    for (int64_t c = 0; c < width; ++c) to[s * kPanel + c] = words[c][s];
  }
}

template <typename Dst, typename Src>
void pack_as(Dst* dst, const Src* src, const Columns& columns, int64_t k, int64_t stride_n, int64_t stride_k,
             int64_t first_input, int64_t num_inputs) {
  constexpr int pair = sizeof(Dst) == 2 ? 2 : 1;
  const int64_t steps = (k + pair - 1) / pair;
  const int64_t panel_steps = (num_inputs + pair - 1) / pair, first_step = first_input / pair;
  const int64_t bands = (steps + kBand - 1) / kBand;
  // Panels of its own: what a later piece puts into the last one comes after.
  const bool is_whole = !columns.interleaved && columns.first % kPanel == 0;
  parallel(columns.panels() * bands, 4, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t panel = columns.first_panel() + unit / bands, first = unit % bands * kBand;
      const int64_t last = std::min(first + kBand, steps), ks = std::min(last * pair, k) - first * pair;
      Dst* out = dst + (panel * panel_steps + first_step + first) * kPanel * pair;
      if (is_whole && (stride_n == 1 || stride_k == 1)) {
        const int64_t row = panel * kPanel - columns.first, width = std::min<int64_t>(kPanel, columns.rows - row);
        const Src* in = src + row * stride_n + first * pair * stride_k;
        if (width < kPanel || ks < (last - first) * pair) std::memset(out, 0, (last - first) * kPanel * pair * sizeof(Dst));
        if (stride_n == 1) {
          join_steps(out, in, width, ks, stride_k);
        } else {
          turn_rows(out, in, width, ks, stride_n);
        }
        continue;
      }
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
      for (int c = 0; c < kPanel; ++c) {
        if (!rows[c]) continue;
        for (int64_t i = 0; i < ks; ++i) put_at(i, c);
      }
    }
  });
}

}  // namespace

void pack(void* dst, int dst_dtype, const void* src, int src_dtype, int64_t n, int64_t k, int64_t stride_n,
          int64_t stride_k, int64_t first_column, int interleaved, int64_t first_input, int64_t num_inputs) {
  with_dtype(dst_dtype, [&](auto* d) {
    with_dtype(src_dtype, [&](auto* s) {
      pack_as(static_cast<decltype(d)>(dst), static_cast<decltype(s)>(const_cast<void*>(src)),
              {first_column, n, interleaved != 0}, k, stride_n, stride_k, first_input, num_inputs);
    });
  });
}

}  // namespace LOCKSTEP_ISA
}  // namespace ls
