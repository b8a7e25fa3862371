// Cases of simd/grad_weight.cpp and simd/optimizer.cpp.
#include "cases.h"

void case_grad_weight(Run& run) {
  struct Shape {
    int64_t t, n, k;
  };
  constexpr Shape kShapes[] = {{0, 3, 5}, {1, 1, 1}, {3, 17, 3}, {17, 127, 64}, {4099, 3, 17}, {127, 49, 130}};
  for (int dtype : kDtypes) {
    // vdpbf16ps flushes denormals, other instruction sets do not.
    if (dtype == ls::kBf16 && run.numbers == Numbers::denormal) continue;
    for (const auto& [t, n, k] : kShapes) {
      for (int accumulate : {0, 1}) {
        const int64_t ldy = n + 3, ldx = k + 1, last = t > 0 ? t - 1 : 0, one = t > 0;
        auto dy = run.values(last * ldy + one * n, dtype), x = run.values(last * ldx + one * k, dtype);
        auto dw = run.floats(n * k);
        run.kernels.grad_weight(dw.data(), dy.data(), x.data(), dtype, t, n, k, ldy, ldx, accumulate);
        run.take(dw);
      }
    }
  }
}

void case_adamw(Run& run) {
  for (int64_t count : {int64_t{1}, int64_t{17}, int64_t{4099}, int64_t{70001}}) {
    auto p = run.floats(count), m = run.floats(count), v = run.ordinary(count, 0, 1), g = run.floats(count);
    run.kernels.adamw(p.data(), m.data(), v.data(), g.data(), count, 0.5f, 0.999f, 0.1f, 0.999f, 0.001f, 0.01f, 0.9f,
                      1e-8f);
    run.take(p);
    run.take(m);
    run.take(v);
  }
}

void case_sum_of_squares(Run& run) {
  for (int64_t count : {int64_t{1}, int64_t{1025}, int64_t{70001}}) {
    const auto x = run.floats(count);
    std::vector<double> sums(count / 65536 + 1);
    run.kernels.sum_of_squares(sums.data(), x.data(), count);
    std::vector<float> rounded(sums.begin(), sums.end());  // a sum of denormals is 0, of NaN any NaN
    run.take(rounded);
  }
}
