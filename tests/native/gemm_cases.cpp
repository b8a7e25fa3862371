// Cases of simd/gemm.cpp.
#include "cases.h"

namespace {

constexpr int64_t kPanel = 64;

int64_t packed_size(int64_t n, int64_t k, int dtype) {
  return (n + kPanel - 1) / kPanel * kPanel * (dtype == ls::kBf16 ? k + k % 2 : k);
}

struct Shape {
  int64_t m, n, k;
};
constexpr Shape kShapes[] = {{1, 1, 1},    {3, 17, 3},    {17, 127, 17}, {127, 3, 127},
                             {1, 127, 4099}, {7, 65, 4099}, {1, 4099, 17}, {127, 130, 64}};

}  // namespace

void case_pack(Run& run) {
  for (int dst : kDtypes) {
    for (int src : kDtypes) {
      for (const auto& shape : kShapes) {
        for (bool transposed : {false, true}) {
          auto b = run.values(shape.n * shape.k, src), packed = Run::room(packed_size(shape.n, shape.k, dst), dst);
          run.kernels.pack(packed.data(), dst, b.data(), src, shape.n, shape.k, transposed ? 1 : shape.k,
                           transposed ? shape.n : 1);
          run.take(packed);
        }
      }
    }
  }
}

void case_gemm(Run& run) {
  // vdpbf16ps flushes denormals, other instruction sets do not: bf16 products promise equal bits without them only.
  const bool skip_bf16 = run.numbers == Numbers::denormal;
  for (int dtype : kDtypes) {
    if (dtype == ls::kBf16 && skip_bf16) continue;
    for (int c_dtype : {dtype, static_cast<int>(ls::kFp32)}) {
      for (const auto& [m, n, k] : kShapes) {
        for (int segments : {1, 8}) {
          const int64_t lda = k + 4, ldc = n + 3;
          auto a = run.values((m - 1) * lda + k, dtype), b = run.values(n * k, dtype);
          auto packed = Run::room(packed_size(n, k, dtype), dtype), c = run.values((m - 1) * ldc + n, c_dtype);
          const auto bias = run.floats(n);
          run.kernels.pack(packed.data(), dtype, b.data(), dtype, n, k, k, 1);
          run.kernels.gemm(c.data(), c_dtype, a.data(), dtype, packed.data(), m % 2 ? bias.data() : nullptr, m, n, k,
                           lda, ldc, segments, segments == 1);
          run.take(c);
        }
      }
    }
  }
}
