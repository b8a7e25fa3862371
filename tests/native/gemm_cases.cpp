// Cases of simd/gemm*.cpp, pack*.cpp, unpack.cpp and quantise_rows.cpp.
#include "cases.h"

namespace {

constexpr int64_t kPanel = 64, kBlock = 64;
enum Epilogue : int { kStore, kAdd, kResidual, kGate };
enum Scales : int { kChannel = 1, kFloats, kHalfs, kBfloats, kSuperUnsigned, kSuperSigned };
enum Shift : int { kOffset, kZeroPoint, kMinimum };

// A quantised format as simd/gemm.h lays it out in a word; `values`: 2 bytes, 3 nibbles, 4 fp8.
struct QuantFormat {
  int values, scales, shift, offset, group;
  int64_t code(bool int_activations) const {
    return values | scales << 8 | shift << 16 | static_cast<int64_t>(offset) << 24 |
           static_cast<int64_t>(group) << 32 | static_cast<int64_t>(int_activations) << 48;
  }
};
constexpr QuantFormat kFormats[] = {
    {2, kChannel, kOffset, 128, 0},      {2, kHalfs, kOffset, 128, 32},       {3, kHalfs, kOffset, 8, 32},
    {3, kHalfs, kMinimum, 0, 32},        {3, kSuperUnsigned, kMinimum, 0, 32}, {2, kSuperSigned, kOffset, 32, 16},
    {3, kBfloats, kZeroPoint, 0, 64},    {3, kFloats, kZeroPoint, 0, 128},    {4, kChannel, kOffset, 0, 0}};
constexpr int64_t kLargestColumn = kBlock * 4 + 4 * 4 * 4 + 64;  // bytes of a column of a record, generously

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
                           transposed ? shape.n : 1, 0, 0, 0, shape.k);
          run.take(packed);
          auto below = Run::room(packed_size(shape.n, shape.k + 6, dst), dst);
          run.kernels.pack(below.data(), dst, b.data(), src, shape.n, 6 > shape.k ? shape.k : 6, transposed ? 1 : shape.k,
                           transposed ? shape.n : 1, 0, 0, 0, shape.k + 6);
          run.kernels.pack(below.data(), dst, b.data(), src, shape.n, shape.k, transposed ? 1 : shape.k,
                           transposed ? shape.n : 1, 0, 0, 6, shape.k + 6);
          run.take(below);
        }
      }
    }
  }
}

// Every quantised format: packed, multiplied, stored, added to a residual, gated.
static void quantised_products(Run& run, int dtype) {
  for (const auto& format : kFormats) {
    for (bool int_activations : {true, false}) {
      if (int_activations && format.values == 4) continue;
      for (const auto& [m, n, k] : kShapes) {
        const int64_t groups = format.group ? (k + format.group - 1) / format.group : 1, supers = (k + 255) / 256;
        auto values = run.integers<uint8_t>(n * k, format.values == 3 ? 16 : 128);
        const auto floats = run.ordinary(n * groups, 0.01f, 0.1f);
        const auto bytes = run.integers<uint8_t>(n * groups, 16);
        std::vector<uint16_t> halfs(n * groups), super(n * supers);
        for (auto& half : halfs) half = static_cast<uint16_t>(0x2000 + run.integers<uint16_t>(1, 1000)[0]);
        for (auto& half : super) half = static_cast<uint16_t>(0x2000 + run.integers<uint16_t>(1, 1000)[0]);
        const bool is_super = format.scales >= kSuperUnsigned;
        const void* scales = is_super ? static_cast<const void*>(bytes.data())
                             : format.scales <= kFloats ? static_cast<const void*>(floats.data())
                                                        : static_cast<const void*>(halfs.data());
        const void* shifts = format.shift == kZeroPoint || is_super ? static_cast<const void*>(bytes.data()) : halfs.data();
        const int64_t panels = (2 * (n + 15) / 16 * 16 + kPanel - 1) / kPanel + 1;
        std::vector<float> packed(panels * kPanel * ((k + kBlock - 1) / kBlock) * kLargestColumn / 4);
        auto a = run.values(m * k, dtype), y = Run::room(m * n, dtype), residual = run.values(m * n, dtype);
        auto norm = run.values(k, dtype);
        const int64_t code = format.code(int_activations);
        const auto pack = [&](int64_t first, int interleaved) {
          run.kernels.pack_quantised(packed.data(), code, values.data(), scales, shifts, super.data(), super.data(), n,
                                     k, first, interleaved);
        };
        pack(0, 0);
        run.kernels.gemm(y.data(), dtype, n, a.data(), dtype, k, nullptr, 0, packed.data(), code, nullptr,
                         residual.data(), n, m, n, k, 8, kResidual);
        run.take(y);
        if (format.values != 4) {
          const auto tokens = run.integers<int64_t>(5, n);
          auto rows = Run::room(5 * k, dtype);
          run.kernels.embedding_quantised(rows.data(), dtype, packed.data(), code, tokens.data(), 5, k);
          run.take(rows);
        }
        pack(0, 1);
        pack(16, 1);
        run.kernels.gemm(y.data(), dtype, n, a.data(), dtype, k, norm.data(), 1e-5f, packed.data(), code, nullptr,
                         nullptr, 0, m, n, k, 1, kGate);
        run.take(y);
      }
    }
  }
}

void case_gemm(Run& run) {
  // vdpbf16ps flushes denormals, other instruction sets do not: bf16 products promise equal bits without them only.
  const bool skip_bf16 = run.numbers == Numbers::denormal;
  for (int dtype : kDtypes) {
    if (dtype == ls::kBf16 && skip_bf16) continue;
    quantised_products(run, dtype);
    for (int c_dtype : {dtype, static_cast<int>(ls::kFp32)}) {
      for (const auto& [m, n, k] : kShapes) {
        for (int segments : {1, 8}) {
          const int64_t lda = k + 4, ldc = n + 3;
          auto a = run.values((m - 1) * lda + k, dtype), b = run.values(n * k, dtype);
          auto packed = Run::room(packed_size(n, k, dtype), dtype), c = run.values((m - 1) * ldc + n, c_dtype);
          const auto bias = run.floats(n);
          run.kernels.pack(packed.data(), dtype, b.data(), dtype, n, k, k, 1, 0, 0, 0, k);
          run.kernels.gemm(c.data(), c_dtype, ldc, a.data(), dtype, lda, nullptr, 0, packed.data(), dtype,
                           m % 2 ? bias.data() : nullptr, nullptr, 0, m, n, k, segments, segments == 1 ? kAdd : kStore);
          run.take(c);
        }
      }
    }
  }
}

void case_pack_quantised(Run& run) { run.take(std::vector<float>{}); }  // what it packs, quantised_products multiplies

void case_embedding_quantised(Run& run) { run.take(std::vector<float>{}); }  // in quantised_products, which packs

void case_quantise_rows(Run& run) {
  for (int dtype : kDtypes) {
    for (int64_t k : {1, 17, 64, 127, 4099}) {
      auto x = run.values(3 * k, dtype);
      std::vector<int8_t> q(3 * k);
      std::vector<float> scales(3 * ((k + kBlock - 1) / kBlock));
      run.kernels.quantise_rows(q.data(), scales.data(), x.data(), dtype, 3, k, k);
      run.take_integers(q);
      run.take(scales);
    }
  }
}
