// The arithmetic of attention for each compute dtype: products, powers of two, and what happens to subnormals.
//
// fp32: one fma a product. bf16: operands in pairs, two products an instruction (dot_bf16), fp32 sums. vdpbf16ps takes
// subnormal inputs as zero and flushes subnormal results; FlushSubnormals makes plain instructions do the same, so that
// every instruction set has the same bits.
#pragma once
#include "vec.h"

namespace ls {
namespace LOCKSTEP_ISA {

// Within its life this thread's arithmetic treats subnormal numbers as zero, operands and results alike.
class FlushSubnormals {
 public:
#if defined(__SSE2__)
  FlushSubnormals() : before_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(before_ | 0x8040); }
  ~FlushSubnormals() { __builtin_ia32_ldmxcsr(before_); }

 private:
  unsigned before_;
#elif defined(__aarch64__)
  FlushSubnormals() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" ::"r"(before_ | (uint64_t{1} << 24)));
  }
  ~FlushSubnormals() { asm volatile("msr fpcr, %0" ::"r"(before_)); }

 private:
  uint64_t before_;
#else
#error "say how this processor flushes subnormals"
#endif
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;
};

#if defined(__AVX512F__)
LS_INLINE V and_bits(V a, uint32_t mask) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(static_cast<int>(mask))));
}
LS_INLINE float largest(V v) { return _mm512_reduce_max_ps(v); }
LS_INLINE float first_lane(V v) { return _mm512_cvtss_f32(v); }
#elif defined(__AVX2__)
LS_INLINE V and_bits(V a, uint32_t mask) {
  const __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(mask)));
  return {_mm256_and_ps(a.lo, m), _mm256_and_ps(a.hi, m)};
}
LS_INLINE float largest(V v) { return max_lanes(v); }
LS_INLINE float first_lane(V v) { return _mm256_cvtss_f32(v.lo); }
#else
LS_INLINE V and_bits(V a, uint32_t mask) {
  V r;
  for (int i = 0; i < kLanes; ++i) r.v[i] = float_of(bits_of(a.v[i]) & mask);
  return r;
}
LS_INLINE float largest(V v) { return max_lanes(v); }
LS_INLINE float first_lane(V v) { return v.v[0]; }
#endif

struct Fp32Math {
  using Elem = float;
  static constexpr int kPack = 1;  // neighbours along the sum that one instruction multiplies
  LS_INLINE V broadcast(const float* p) { return set1(*p); }
  LS_INLINE V vector(const float* p) { return load(p); }
  LS_INLINE V dot(V c, V a, V b) { return fma(a, b, c); }
  LS_INLINE void store_weights(float* p, V v) { store(p, v); }

  // 2^x for x <= 0, relative error 1e-7; 0 below 2^-126, 1 at 0; NaN stays NaN. Minimax, fitted with p(0) = 1.
  LS_INLINE V exp2(V x) {
    const Split s = split_exponent(x);
    V p = fma(set1(0.0001535336196f), s.f, set1(0.001339887502f));
    p = fma(p, s.f, set1(0.009618436918f));
    p = fma(p, s.f, set1(0.05550332367f));
    p = fma(p, s.f, set1(0.2402264774f));
    p = fma(p, s.f, set1(0.6931471825f));
    p = fma(p, s.f, set1(1.0f));
    return zero_if_below(x, set1(-126.0f), mul(p, add_exponent(set1(1.0f), s.t)));
  }
};

struct Bf16Math {
  using Elem = bf16;
  static constexpr int kPack = 2;
  LS_INLINE V broadcast(const bf16* p) {
    uint32_t pair;
    std::memcpy(&pair, p, sizeof pair);
    return set1_bits(pair);
  }
  LS_INLINE V vector(const bf16* p) { return load(reinterpret_cast<const float*>(p)); }
  LS_INLINE V dot(V c, V a, V b) { return dot_bf16(c, a, b); }
  // Rounded to nearest even; there are no subnormals here.
  LS_INLINE void store_weights(bf16* p, V v) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v)));
#else
    store(p, v);
#endif
  }

  // As above, relative error 3e-6: what it gives is rounded to bf16, or scales what was summed from such values. 0 at
  // -127 and below, subnormal and so flushed by whatever takes it below -126. Of a NaN, which max lets through as its
  // second operand, the low bits are 0, so that no exponent is added.
  LS_INLINE V exp2(V x) {
    const Split s = split_exponent(max(set1(-127.0f), x));
    V p = fma(set1(0.009582852945f), s.f, set1(0.05590642616f));
    p = fma(p, s.f, set1(0.2402409911f));
    p = fma(p, s.f, set1(0.6931241751f));
    p = fma(p, s.f, set1(1.0f));
    return add_exponent(p, s.t);
  }
};

// What is summed in pairs flushes; fp32 alone keeps subnormals.
struct KeepSubnormals {
  KeepSubnormals() {}
};
template <typename T>
using FlushSubnormalsIf = std::conditional_t<std::is_same_v<T, bf16>, FlushSubnormals, KeepSubnormals>;

template <typename T>
using MathOf = std::conditional_t<std::is_same_v<T, bf16>, Bf16Math, Fp32Math>;

}  // namespace LOCKSTEP_ISA
}  // namespace ls
