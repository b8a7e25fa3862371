// dW = dY^T X: the gradient of a matrix product's weight, in fp32, with T summed in ascending order.
//
// Both operands lie in rows of T, so both are read as words of one row (fp32) or two (bf16): no transposed copy. A unit
// is 48 outputs N by some panels of 64 inputs K; its strip of dY stays in L2 beside one panel of X. Where dW is
// accumulated, each output's one accumulator starts from it, so cutting T into micro-batches or into blocks for the cache
// gives one chain of sums. Bound by arithmetic from some 64 rows on.
#include "pair_product.h"

namespace ls {
namespace LOCKSTEP_ISA {
namespace {

constexpr int64_t kPanel = 64, kStrip = 48;
constexpr int64_t kStepsInCache = 1024;  // of a panel: 256 KiB, of a strip: 192 KiB

struct Product {
  float* dw;
  int64_t t, n, k, ldy, ldx;
  bool accumulate;
};

// Rows [begin, end) of T of `count` columns from `in` on as words: out[step][width].
template <typename T>
void join_strip(const T* in, int64_t begin, int64_t end, int64_t stride, int64_t count, int64_t width, float* out) {
  for (int64_t i = begin; i < end; i += kPair<T>) {
    const T* second = i + 1 < end ? in + (i + 1) * stride : nullptr;
    join_rows(in + i * stride, second, count, width, out + (i - begin) / kPair<T> * width);
  }
}

// c (m x n) with n no multiple of 16: through a copy wide enough.
template <bool kIsBf16>
void product_at_edge(Words a, const float* b, int64_t m, int64_t n, int64_t steps, float* c, int64_t ldc,
                     bool accumulate) {
  alignas(64) float tile[kStrip * kPanel];
  for (int64_t r = 0; accumulate && r < m; ++r) {
    std::memcpy(tile + r * kPanel, c + r * ldc, n * sizeof(float));
    std::memset(tile + r * kPanel + n, 0, (kPanel - n) * sizeof(float));
  }
  const int64_t width = (n + kLanes - 1) / kLanes * kLanes;
  pair_product<kIsBf16>(a, b, kPanel, m, width, steps, tile, kPanel, accumulate);
  for (int64_t r = 0; r < m; ++r) std::memcpy(c + r * ldc, tile + r * kPanel, n * sizeof(float));
}

// Rows [begin, end) of T, at most kStepsInCache steps.
template <typename T>
void add_block(const Product& p, const T* dy, const T* x, int64_t begin, int64_t end, bool accumulate) {
  constexpr bool kIsBf16 = kPair<T> == 2;
  const int64_t steps = (end - begin + kPair<T> - 1) / kPair<T>;
  const int64_t strips = (p.n + kStrip - 1) / kStrip, panels = (p.k + kPanel - 1) / kPanel;
  static thread_local Scratch shared;
  float* x_words = shared.get(panels * steps * kPanel);
  parallel(panels, 1, [&](int64_t first, int64_t last) {
    for (int64_t panel = first; panel < last; ++panel) {
      join_strip(x + panel * kPanel, begin, end, p.ldx, std::min(kPanel, p.k - panel * kPanel), kPanel,
                 x_words + panel * steps * kPanel);
    }
  });
  // Few strips are cut over the panels too, so that every thread has work.
  const int64_t groups = strips >= 4 * num_threads() ? 1 : panels;
  parallel(strips * groups, 1, [&](int64_t first, int64_t last) {
    static thread_local Scratch own;
    float* y_words = own.get(steps * kStrip);
    for (int64_t unit = first; unit < last; ++unit) {
      const int64_t row = unit / groups * kStrip, rows = std::min(kStrip, p.n - row);
      if (unit == first || unit % groups == 0) join_strip(dy + row, begin, end, p.ldy, rows, kStrip, y_words);
      for (int64_t panel = panels * (unit % groups) / groups; panel < panels * (unit % groups + 1) / groups; ++panel) {
        const int64_t columns = std::min(kPanel, p.k - panel * kPanel);
        float* c = p.dw + row * p.k + panel * kPanel;
        const float* b = x_words + panel * steps * kPanel;
        if (columns % kLanes == 0) {
          pair_product<kIsBf16>({y_words, 1, kStrip}, b, kPanel, rows, columns, steps, c, p.k, accumulate);
        } else {
          product_at_edge<kIsBf16>({y_words, 1, kStrip}, b, rows, columns, steps, c, p.k, accumulate);
        }
      }
    }
  });
}

}  // namespace

void grad_weight(float* dw, const void* dy, const void* x, int dtype, int64_t t, int64_t n, int64_t k, int64_t ldy,
                 int64_t ldx, int accumulate) {
  const Product p{dw, t, n, k, ldy, ldx, accumulate != 0};
  if (t == 0 && !p.accumulate) std::memset(dw, 0, n * k * sizeof(float));
  with_dtype(dtype, [&](auto* e) {
    using T = std::remove_pointer_t<decltype(e)>;
    constexpr int64_t rows = kStepsInCache * kPair<T>;
    for (int64_t begin = 0; begin < t; begin += rows) {
      add_block(p, static_cast<const T*>(dy), static_cast<const T*>(x), begin, std::min(begin + rows, t),
                p.accumulate || begin > 0);
    }
  });
}

}  // namespace LOCKSTEP_ISA
}  // namespace ls
