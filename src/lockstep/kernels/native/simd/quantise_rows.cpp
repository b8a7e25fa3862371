// Activations to 8 bits: per row and block of 64 inputs, scale = max|x| / 127, q = round(x * (127 / max|x|)).
//
// A block whose 127 / max is not finite (all zeros, or magnitudes below 1e-36) is zeros with scale 0; a block that
// holds an infinity or a NaN has scale NaN, so that every output of its row becomes NaN.
#include "gemm.h"
#include "rows.h"

namespace ls {
namespace LOCKSTEP_ISA {
namespace {

template <typename T>
void quantise(const T* x, int64_t k, int8_t* q, float* scales) {
  const V magnitude = set1_bits(0x7FFFFFFF);
  for (int64_t begin = 0, block = 0; begin < k; begin += kBlock, ++block) {
    V values[kBlock / kLanes], largest = zero();
    for (int i = 0; i < kBlock / kLanes; ++i) {
      const int64_t first = begin + i * kLanes;
      values[i] = first < k ? load_upto(x + first, std::min<int64_t>(kLanes, k - first)) : zero();
      largest = max_words(largest, and_words(values[i], magnitude));  // as integers: infinity, then NaN, above all
    }
    uint32_t lanes[kLanes];
    store_words(lanes, largest);
    const uint32_t bits = *std::max_element(lanes, lanes + kLanes);
    float max;
    std::memcpy(&max, &bits, 4);
    const bool finite = bits < 0x7F800000;
    float inverse = 127.0f / max;
    scales[block] = max / 127.0f;
    if (!finite) {
      scales[block] = __builtin_nanf("");
      inverse = 0.0f;
    } else if (!(inverse <= 3.4028235e38f)) {
      scales[block] = inverse = 0.0f;
    }
    for (int i = 0; i < kBlock / kLanes; ++i) {
      store_bytes(q + begin + i * kLanes, finite ? mul(values[i], set1(inverse)) : zero());
    }
  }
}

}  // namespace

void quantise_row(const void* x, int dtype, int64_t k, int8_t* q, float* scales) {
  with_dtype(dtype, [&](auto* e) { quantise(static_cast<decltype(e)>(const_cast<void*>(x)), k, q, scales); });
}

void quantise_rows(void* q, float* scales, const void* x, int dtype, int64_t t, int64_t k, int64_t stride) {
  const int64_t blocks = (k + kBlock - 1) / kBlock, element = dtype == kBf16 ? 2 : 4;
  parallel(t, std::max<int64_t>(1, 16 * 1024 / std::max<int64_t>(k, 1)), [&](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    auto* padded = reinterpret_cast<int8_t*>(scratch.get(blocks * kBlock / 4));
    for (int64_t row = begin; row < end; ++row) {
      quantise_row(static_cast<const char*>(x) + row * stride * element, dtype, k, padded, scales + row * blocks);
      std::memcpy(static_cast<int8_t*>(q) + row * k, padded, k);
    }
  });
}

}  // namespace LOCKSTEP_ISA
}  // namespace ls
