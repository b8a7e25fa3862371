// Sixteen 32-bit words in a V: bytes, nibbles and halves taken apart and put together, and exact integer products.
//
// A V may hold integers as well as floats.
#pragma once
#include "vec.h"

namespace ls {
namespace LOCKSTEP_ISA {

#if defined(__AVX512F__)
LS_INLINE __m512i words_of(V v) { return _mm512_castps_si512(v); }
LS_INLINE V of_words(__m512i v) { return _mm512_castsi512_ps(v); }
LS_INLINE V load_words(const void* p) { return of_words(_mm512_loadu_si512(p)); }
LS_INLINE void store_words(void* p, V v) { _mm512_storeu_si512(p, words_of(v)); }
LS_INLINE V and_words(V a, V b) { return of_words(_mm512_and_si512(words_of(a), words_of(b))); }
LS_INLINE V or_words(V a, V b) { return of_words(_mm512_or_si512(words_of(a), words_of(b))); }
LS_INLINE V add_words(V a, V b) { return of_words(_mm512_add_epi32(words_of(a), words_of(b))); }
template <int N>
LS_INLINE V shift_left(V a) {
  return of_words(_mm512_slli_epi32(words_of(a), N));
}
template <int N>
LS_INLINE V shift_right(V a) {
  return of_words(_mm512_srli_epi32(words_of(a), N));
}
LS_INLINE V max_words(V a, V b) { return of_words(_mm512_max_epi32(words_of(a), words_of(b))); }
LS_INLINE V to_float(V words) { return _mm512_cvtepi32_ps(words_of(words)); }
LS_INLINE V load_half(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
LS_INLINE V load_bytes(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
LS_INLINE V load_bytes(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
// Rounds half to even and keeps the low byte of each.
LS_INLINE void store_bytes(int8_t* p, V v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v)));
}
// sums + four products of an unsigned and a signed byte, in each word; exact
#if defined(__AVX512VNNI__)
LS_INLINE V dot_bytes(V sums, V u, V s) {  // as an intrinsic, gcc 12 copies and spills every accumulator of a tile
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(u), "v"(s));
  return sums;
}
#else
LS_INLINE V dot_bytes(V sums, V u, V s) {  // vpmaddubsw would saturate
  const __m512i ui = words_of(u), si = words_of(s);
  const __m512i even = _mm512_madd_epi16(_mm512_and_si512(ui, _mm512_set1_epi16(255)),
                                         _mm512_srai_epi16(_mm512_slli_epi16(si, 8), 8));
  const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(ui, 8), _mm512_srai_epi16(si, 8));
  return of_words(_mm512_add_epi32(words_of(sums), _mm512_add_epi32(even, odd)));
}
#endif

#elif defined(__AVX2__)
LS_INLINE __m256i words_of(__m256 v) { return _mm256_castps_si256(v); }
LS_INLINE __m256 of_words(__m256i v) { return _mm256_castsi256_ps(v); }
LS_INLINE V load_words(const void* p) { return load(static_cast<const float*>(p)); }
LS_INLINE void store_words(void* p, V v) { store(static_cast<float*>(p), v); }
#define LS_BOTH(op) \
  { of_words(op(words_of(a.lo), words_of(b.lo))), of_words(op(words_of(a.hi), words_of(b.hi))) }
LS_INLINE V and_words(V a, V b) { return LS_BOTH(_mm256_and_si256); }
LS_INLINE V or_words(V a, V b) { return LS_BOTH(_mm256_or_si256); }
LS_INLINE V add_words(V a, V b) { return LS_BOTH(_mm256_add_epi32); }
LS_INLINE V max_words(V a, V b) { return LS_BOTH(_mm256_max_epi32); }
#undef LS_BOTH
template <int N>
LS_INLINE V shift_left(V a) {
  return {of_words(_mm256_slli_epi32(words_of(a.lo), N)), of_words(_mm256_slli_epi32(words_of(a.hi), N))};
}
template <int N>
LS_INLINE V shift_right(V a) {
  return {of_words(_mm256_srli_epi32(words_of(a.lo), N)), of_words(_mm256_srli_epi32(words_of(a.hi), N))};
}
LS_INLINE V to_float(V words) { return {_mm256_cvtepi32_ps(words_of(words.lo)), _mm256_cvtepi32_ps(words_of(words.hi))}; }
LS_INLINE V load_half(const uint16_t* p) {
  const auto* halves = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}
LS_INLINE V load_bytes(const uint8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)),
          _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)))};
}
LS_INLINE V load_bytes(const int8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}
LS_INLINE void store_bytes(int8_t* p, V v) {
  int32_t lanes[kLanes];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), _mm256_cvtps_epi32(v.lo));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes + 8), _mm256_cvtps_epi32(v.hi));
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int8_t>(lanes[i]);
}
LS_INLINE __m256 dot_bytes(__m256 sums, __m256 u, __m256 s) {
  const __m256i ui = words_of(u), si = words_of(s);
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(ui, _mm256_set1_epi16(255)),
                                         _mm256_srai_epi16(_mm256_slli_epi16(si, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(ui, 8), _mm256_srai_epi16(si, 8));
  return of_words(_mm256_add_epi32(words_of(sums), _mm256_add_epi32(even, odd)));
}
LS_INLINE V dot_bytes(V sums, V u, V s) { return {dot_bytes(sums.lo, u.lo, s.lo), dot_bytes(sums.hi, u.hi, s.hi)}; }

#else
#define LS_EACH(expression)                               \
  V r;                                                    \
  for (int i = 0; i < kLanes; ++i) r.v[i] = (expression); \
  return r;
LS_INLINE V load_words(const void* p) { return load(static_cast<const float*>(p)); }
LS_INLINE void store_words(void* p, V v) { store(static_cast<float*>(p), v); }
LS_INLINE V and_words(V a, V b) { LS_EACH(float_of(bits_of(a.v[i]) & bits_of(b.v[i]))) }
LS_INLINE V or_words(V a, V b) { LS_EACH(float_of(bits_of(a.v[i]) | bits_of(b.v[i]))) }
LS_INLINE V add_words(V a, V b) { LS_EACH(float_of(bits_of(a.v[i]) + bits_of(b.v[i]))) }
LS_INLINE int32_t signed_of(float x) { return static_cast<int32_t>(bits_of(x)); }
LS_INLINE V max_words(V a, V b) { LS_EACH(signed_of(a.v[i]) > signed_of(b.v[i]) ? a.v[i] : b.v[i]) }
template <int N>
LS_INLINE V shift_left(V a) {
  LS_EACH(float_of(bits_of(a.v[i]) << N))
}
template <int N>
LS_INLINE V shift_right(V a) {
  LS_EACH(float_of(bits_of(a.v[i]) >> N))
}
LS_INLINE V to_float(V words) { LS_EACH(static_cast<float>(signed_of(words.v[i]))) }
LS_INLINE float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, magnitude = h & 0x7FFF;
  if (magnitude >= 0x7C00) {  // infinity or NaN, made quiet
    return float_of(sign | 0x7F800000 | magnitude << 13 | (magnitude > 0x7C00 ? 0x400000 : 0));
  }
  return float_of(sign | bits_of(float_of(magnitude << 13) * 0x1p112f));  // exponent bias 15 to 127; exact
}
LS_INLINE V load_half(const uint16_t* p) { LS_EACH(half_to_float(p[i])) }
LS_INLINE V load_bytes(const uint8_t* p) { LS_EACH(static_cast<float>(p[i])) }
LS_INLINE V load_bytes(const int8_t* p) { LS_EACH(static_cast<float>(p[i])) }
LS_INLINE void store_bytes(int8_t* p, V v) {
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int8_t>(static_cast<int32_t>(__builtin_rintf(v.v[i])));
}
LS_INLINE V dot_bytes(V sums, V u, V s) {
  V r;
  for (int i = 0; i < kLanes; ++i) {
    const uint32_t ui = bits_of(u.v[i]), si = bits_of(s.v[i]);
    int32_t sum = signed_of(sums.v[i]);
    for (int b = 0; b < 32; b += 8) sum += static_cast<int32_t>(ui >> b & 255) * static_cast<int8_t>(si >> b & 255);
    r.v[i] = float_of(static_cast<uint32_t>(sum));
  }
  return r;
}
#undef LS_EACH
#endif

}  // namespace LOCKSTEP_ISA
}  // namespace ls
