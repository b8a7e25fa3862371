// Sixteen fp32 lanes, the same on every instruction set: one zmm, two ymm, or an array.
//
// Each operation rounds exactly once as IEEE 754 says, fma included, and sums over lanes follow one fixed tree, so all
// instruction sets give the same bits (vdpbf16ps flushes subnormals; see dot_bf16).
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "../lockstep_native.h"

#define LS_INLINE static inline __attribute__((always_inline))

namespace ls {
namespace LOCKSTEP_ISA {

using bf16 = uint16_t;
constexpr int kLanes = 16;

#if defined(__AVX512F__)
using V = __m512;
constexpr int kColumnVectors = 4;  // accumulators per row that fit beside six rows
LS_INLINE V zero() { return _mm512_setzero_ps(); }
LS_INLINE V set1(float x) { return _mm512_set1_ps(x); }
LS_INLINE V load(const float* p) { return _mm512_loadu_ps(p); }
LS_INLINE void store(float* p, V v) { _mm512_storeu_ps(p, v); }
LS_INLINE V add(V a, V b) { return _mm512_add_ps(a, b); }
LS_INLINE V sub(V a, V b) { return _mm512_sub_ps(a, b); }
LS_INLINE V mul(V a, V b) { return _mm512_mul_ps(a, b); }
LS_INLINE V div(V a, V b) { return _mm512_div_ps(a, b); }
LS_INLINE V sqrt(V a) { return _mm512_sqrt_ps(a); }
LS_INLINE V max(V a, V b) { return _mm512_max_ps(a, b); }
LS_INLINE V min(V a, V b) { return _mm512_min_ps(a, b); }
LS_INLINE V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
// a, or 0 where x < limit; a NaN in x lets a through
LS_INLINE V zero_if_below(V x, V limit, V a) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), a);
}
LS_INLINE bool any_nan(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q) != 0; }
// Bit i: a[i] == b[i]
LS_INLINE uint32_t equal_lanes(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
LS_INLINE uint32_t at_least_lanes(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
// bits(a) + (bits(t) << 23)
LS_INLINE V add_exponent(V a, V t) {
  return _mm512_castsi512_ps(
      _mm512_add_epi32(_mm512_castps_si512(a), _mm512_slli_epi32(_mm512_castps_si512(t), 23)));
}
LS_INLINE V load(const bf16* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
LS_INLINE void store(bf16* p, V v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x400000));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}
LS_INLINE V set1_bits(uint32_t x) { return _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(x))); }
// Of two vectors of bf16 values held as fp32, the pairs (low, high) that dot_bf16 takes.
LS_INLINE V pair_bf16(V low, V high) {
  return _mm512_castsi512_ps(_mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(low), 16),
                                             _mm512_and_si512(_mm512_castps_si512(high), _mm512_set1_epi32(-65536))));
}
#if defined(__AVX512BF16__)
LS_INLINE V dot_bf16(V c, V a, V b) {
  return _mm512_dpbf16_ps(c, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}
#else
LS_INLINE V high_half(V a) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(-65536)));
}
LS_INLINE V low_half(V a) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a), 16)); }
#endif

#elif defined(__AVX2__)
struct V {
  __m256 lo, hi;
};
constexpr int kColumnVectors = 1;
#define LS_BOTH(op) \
  { op(a.lo, b.lo), op(a.hi, b.hi) }
LS_INLINE V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
LS_INLINE V set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
LS_INLINE V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
LS_INLINE void store(float* p, V v) {
  _mm256_storeu_ps(p, v.lo);
  _mm256_storeu_ps(p + 8, v.hi);
}
LS_INLINE V add(V a, V b) { return LS_BOTH(_mm256_add_ps); }
LS_INLINE V sub(V a, V b) { return LS_BOTH(_mm256_sub_ps); }
LS_INLINE V mul(V a, V b) { return LS_BOTH(_mm256_mul_ps); }
LS_INLINE V div(V a, V b) { return LS_BOTH(_mm256_div_ps); }
LS_INLINE V sqrt(V a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }
LS_INLINE V max(V a, V b) { return LS_BOTH(_mm256_max_ps); }
LS_INLINE V min(V a, V b) { return LS_BOTH(_mm256_min_ps); }
LS_INLINE V fma(V a, V b, V c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
LS_INLINE V zero_if_below(V x, V limit, V a) {
  return {_mm256_and_ps(_mm256_cmp_ps(x.lo, limit.lo, _CMP_NLT_UQ), a.lo),
          _mm256_and_ps(_mm256_cmp_ps(x.hi, limit.hi, _CMP_NLT_UQ), a.hi)};
}
template <int kPredicate>
LS_INLINE uint32_t compare_lanes(V a, V b) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, kPredicate))) |
         static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, kPredicate))) << 8;
}
LS_INLINE bool any_nan(V a, V b) { return compare_lanes<_CMP_UNORD_Q>(a, b) != 0; }
LS_INLINE uint32_t equal_lanes(V a, V b) { return compare_lanes<_CMP_EQ_OQ>(a, b); }
LS_INLINE uint32_t at_least_lanes(V a, V b) { return compare_lanes<_CMP_GE_OQ>(a, b); }
LS_INLINE __m256 add_exponent_half(__m256 a, __m256 t) {
  return _mm256_castsi256_ps(
      _mm256_add_epi32(_mm256_castps_si256(a), _mm256_slli_epi32(_mm256_castps_si256(t), 23)));
}
LS_INLINE V add_exponent(V a, V t) { return {add_exponent_half(a.lo, t.lo), add_exponent_half(a.hi, t.hi)}; }
LS_INLINE __m256 widen(const bf16* p) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
LS_INLINE V load(const bf16* p) { return {widen(p), widen(p + 8)}; }
LS_INLINE __m128i narrow(__m256 v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  rounded = _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)));
  rounded = _mm256_srli_epi32(rounded, 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
}
LS_INLINE void store(bf16* p, V v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(v.lo));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), narrow(v.hi));
}
LS_INLINE V set1_bits(uint32_t x) {
  const __m256 all = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(x)));
  return {all, all};
}
LS_INLINE __m256 high_bits(__m256 a) { return _mm256_and_ps(a, _mm256_castsi256_ps(_mm256_set1_epi32(-65536))); }
LS_INLINE __m256 low_bits(__m256 a) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a), 16)); }
LS_INLINE V high_half(V a) { return {high_bits(a.lo), high_bits(a.hi)}; }
LS_INLINE V low_half(V a) { return {low_bits(a.lo), low_bits(a.hi)}; }
LS_INLINE __m256 pair_bits(__m256 low, __m256 high) {
  return _mm256_or_ps(_mm256_castsi256_ps(_mm256_srli_epi32(_mm256_castps_si256(low), 16)), high_bits(high));
}
LS_INLINE V pair_bf16(V low, V high) { return {pair_bits(low.lo, high.lo), pair_bits(low.hi, high.hi)}; }
#undef LS_BOTH

#else
struct V {
  float v[kLanes];
};
constexpr int kColumnVectors = 1;
#define LS_EACH(expression)                               \
  V r;                                                    \
  for (int i = 0; i < kLanes; ++i) r.v[i] = (expression); \
  return r;
LS_INLINE float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
LS_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
LS_INLINE V zero() { LS_EACH(0.0f) }
LS_INLINE V set1(float x) { LS_EACH(x) }
LS_INLINE V load(const float* p) { LS_EACH(p[i]) }
LS_INLINE void store(float* p, V v) { std::memcpy(p, v.v, sizeof v.v); }
LS_INLINE V add(V a, V b) { LS_EACH(a.v[i] + b.v[i]) }
LS_INLINE V sub(V a, V b) { LS_EACH(a.v[i] - b.v[i]) }
LS_INLINE V mul(V a, V b) { LS_EACH(a.v[i] * b.v[i]) }
LS_INLINE V div(V a, V b) { LS_EACH(a.v[i] / b.v[i]) }
LS_INLINE V sqrt(V a) { LS_EACH(std::sqrt(a.v[i])) }
LS_INLINE V max(V a, V b) { LS_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]) }
LS_INLINE V min(V a, V b) { LS_EACH(a.v[i] < b.v[i] ? a.v[i] : b.v[i]) }
LS_INLINE V fma(V a, V b, V c) { LS_EACH(__builtin_fmaf(a.v[i], b.v[i], c.v[i])) }
LS_INLINE V zero_if_below(V x, V limit, V a) { LS_EACH(x.v[i] < limit.v[i] ? 0.0f : a.v[i]) }
LS_INLINE bool any_nan(V a, V b) {
  bool any = false;
  for (int i = 0; i < kLanes; ++i) any |= a.v[i] != a.v[i] || b.v[i] != b.v[i];
  return any;
}
LS_INLINE uint32_t equal_lanes(V a, V b) {
  uint32_t lanes = 0;
  for (int i = 0; i < kLanes; ++i) lanes |= static_cast<uint32_t>(a.v[i] == b.v[i]) << i;
  return lanes;
}
LS_INLINE uint32_t at_least_lanes(V a, V b) {
  uint32_t lanes = 0;
  for (int i = 0; i < kLanes; ++i) lanes |= static_cast<uint32_t>(a.v[i] >= b.v[i]) << i;
  return lanes;
}
LS_INLINE V add_exponent(V a, V t) { LS_EACH(float_of(bits_of(a.v[i]) + (bits_of(t.v[i]) << 23))) }
LS_INLINE V load(const bf16* p) { LS_EACH(float_of(static_cast<uint32_t>(p[i]) << 16)) }
LS_INLINE void store(bf16* p, V v) {
  for (int i = 0; i < kLanes; ++i) {
    const uint32_t bits = bits_of(v.v[i]);
    const bool is_nan = v.v[i] != v.v[i];
    p[i] = static_cast<bf16>((is_nan ? bits | 0x400000 : bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
  }
}
LS_INLINE V set1_bits(uint32_t x) { LS_EACH(float_of(x)) }
LS_INLINE V high_half(V a) { LS_EACH(float_of(bits_of(a.v[i]) & 0xFFFF0000u)) }
LS_INLINE V low_half(V a) { LS_EACH(float_of(bits_of(a.v[i]) << 16)) }
LS_INLINE V pair_bf16(V low, V high) { LS_EACH(float_of(bits_of(low.v[i]) >> 16 | (bits_of(high.v[i]) & 0xFFFF0000u))) }
#undef LS_EACH
#endif

#if !defined(__AVX512BF16__)
// Two bf16 products added to fp32, in vdpbf16ps's order: the high pair, then the low pair. The instruction also flushes
// subnormal inputs and results to zero, which this does not.
LS_INLINE V dot_bf16(V c, V a, V b) {
  return fma(low_half(a), low_half(b), fma(high_half(a), high_half(b), c));
}
#endif

// Fixed tree: lanes i and i+8, then i+4, i+2, i+1.
LS_INLINE float sum_lanes(V v) {
  float lanes[kLanes];
  store(lanes, v);
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}
LS_INLINE float max_lanes(V v) {
  float lanes[kLanes];
  store(lanes, v);
  float best = lanes[0];
  for (int i = 1; i < kLanes; ++i) best = lanes[i] > best ? lanes[i] : best;
  return best;
}

// The first `count` (< 16) elements, the rest `fill`; and a store of as many.
template <typename T>
LS_INLINE V load_partial(const T* p, int64_t count, T fill) {
  T lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = i < count ? p[i] : fill;
  return load(lanes);
}
template <typename T>
LS_INLINE void store_partial(T* p, V v, int64_t count) {
  T lanes[kLanes];
  store(lanes, v);
  std::memcpy(p, lanes, count * sizeof(T));
}

// x = n + f with n integral and |f| <= 1/2: adding 1.5 * 2^23 leaves n in the low bits of t.
struct Split {
  V t, n, f;
};
LS_INLINE Split split_exponent(V x) {
  const V magic = set1(12582912.0f), t = add(x, magic), n = sub(t, magic);
  return {t, n, sub(x, n)};
}

// e^x with a degree-6 polynomial on [-ln2/2, ln2/2], error below 2 ulp; 0 below -87.3, x capped at 88.37. NaN stays NaN:
// max and min give back their second operand when it is one.
LS_INLINE V exp(V x) {
  const V lowest = set1(-87.3365479f), capped = max(lowest, min(set1(88.3762626f), x));
  const Split s = split_exponent(mul(capped, set1(1.44269504f)));
  V r = fma(s.n, set1(-0.693359375f), capped);
  r = fma(s.n, set1(2.12194440e-4f), r);
  V p = set1(1.3981999507e-3f);
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(mul(r, r), p, add(r, set1(1.0f)));
  return zero_if_below(x, lowest, mul(p, add_exponent(set1(1.0f), s.t)));
}
LS_INLINE float exp(float x) {
  float lanes[kLanes];
  store(lanes, exp(set1(x)));
  return lanes[0];
}

LS_INLINE float to_float(float x) { return x; }
LS_INLINE float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}
LS_INLINE bf16 round_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<bf16>((x != x ? bits | 0x400000 : bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
LS_INLINE void put(float* p, float x) { *p = x; }
LS_INLINE void put(bf16* p, float x) { *p = round_bf16(x); }

// Runs body(begin, end) over [0, count) on the pool.
template <typename Body>
LS_INLINE void parallel(int64_t count, int64_t grain, const Body& body) {
  parallel_for(
      count, grain, [](void* context, int64_t begin, int64_t end) { (*static_cast<const Body*>(context))(begin, end); },
      const_cast<Body*>(&body));
}

// Calls f with a null pointer of the dtype's element type.
template <typename F>
LS_INLINE void with_dtype(int dtype, const F& f) {
  if (dtype == kBf16) {
    f(static_cast<bf16*>(nullptr));
  } else {
    f(static_cast<float*>(nullptr));
  }
}

// An aligned buffer that each thread keeps and grows.
struct Scratch {
  float* data = nullptr;
  int64_t size = 0;
  ~Scratch() { std::free(data); }
  float* get(int64_t floats) {
    if (floats > size) {
      std::free(data);
      size = (floats + 1023) / 1024 * 1024;
      data = static_cast<float*>(std::aligned_alloc(64, size * sizeof(float)));
      if (data == nullptr) std::abort();
    }
    return data;
  }
};

}  // namespace LOCKSTEP_ISA
}  // namespace ls
