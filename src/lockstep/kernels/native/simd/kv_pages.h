// Pages of 16 tokens' keys and values for one K/V head: how they lie in memory, how they are written and read.
//
// fp32: keys (H, 16), values (16, Hp), Hp being H rounded up to 16. The others hold neighbours in pairs, as the pair
// dot product wants them: keys (H / 2, 16, 2), values (8, Hp, 2), two tokens side by side. int8 and fp8 (e4m3) have one
// fp32 scale a (token, K/V head), the largest magnitude over the largest code; a key or value that is not finite makes
// its scale so, hence all that is computed from it.
#pragma once
#include "vec.h"

namespace ls {
namespace LOCKSTEP_ISA {

constexpr int kBlock = 16;

enum KvFormat : int { kKvFp32 = 0, kKvBf16 = 1, kKvInt8 = 2, kKvFp8 = 3 };

LS_INLINE int pack_of(int format) { return format == kKvFp32 ? 1 : 2; }

// An e4m3 code (bias 7, no infinity) as fp32; NaN codes are never written.
LS_INLINE float fp8_value(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float magnitude = exponent == 0 ? static_cast<float>(mantissa) * 0x1p-9f
                                        : static_cast<float>(8 + mantissa) * std::ldexp(1.0f, exponent - 10);
  return code & 0x80 ? -magnitude : magnitude;
}

// Nearest e4m3 code of |x| <= 448, ties to even.
LS_INLINE uint8_t fp8_code(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint8_t sign = static_cast<uint8_t>(bits >> 24 & 0x80);
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  if (magnitude < 0x3C800000) {  // below 2^-6: multiples of 2^-9
    float m;
    std::memcpy(&m, &magnitude, 4);
    return sign | static_cast<uint8_t>(__builtin_rintf(m * 0x1p9f));
  }
  const uint32_t rounded = magnitude + 0x7FFFF + (magnitude >> 20 & 1);
  return sign | static_cast<uint8_t>(std::min<uint32_t>((rounded >> 20) - (120u << 3), 0x7E));
}

// bf16 value of each byte.
template <int kFormat>
const bf16* code_values() {
  static const struct Table {
    bf16 values[256];
    Table() {
      for (int code = 0; code < 256; ++code) {
        const float value = kFormat == kKvInt8 ? static_cast<float>(static_cast<int8_t>(code))
                                               : fp8_value(static_cast<uint8_t>(code));
        values[code] = round_bf16(value);
      }
    }
  } table;
  return table.values;
}

// bf16 values of `count` codes, a multiple of 32. All of them are exact.
template <int kFormat>
LS_INLINE void widen_codes(const uint8_t* codes, bf16* out, int64_t count) {
#if defined(__AVX512BF16__)
  if constexpr (kFormat == kKvInt8) {
    const auto as_floats = [](const uint8_t* p) {
      return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
    };
    for (int64_t i = 0; i < count; i += 32) {
      const __m512bh pairs = _mm512_cvtne2ps_pbh(as_floats(codes + i + 16), as_floats(codes + i));
      _mm512_storeu_si512(out + i, reinterpret_cast<__m512i>(pairs));
    }
    return;
  }
#endif
  const bf16* values = code_values<kFormat>();
#if defined(__AVX512BW__)
  const __m512i t0 = _mm512_loadu_si512(values), t1 = _mm512_loadu_si512(values + 32);
  const __m512i t2 = _mm512_loadu_si512(values + 64), t3 = _mm512_loadu_si512(values + 96);
  const __m512i t4 = _mm512_set1_epi16(kFormat == kKvInt8 ? static_cast<short>(0x4300) : 0);  // |-128|
  const __m512i sign_bit = _mm512_set1_epi16(static_cast<short>(0x8000));
  for (int64_t i = 0; i < count; i += 32) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i));
    __m512i magnitude, sign;
    if (kFormat == kKvInt8) {
      const __m512i wide = _mm512_cvtepi8_epi16(bytes);
      magnitude = _mm512_abs_epi16(wide);
      sign = _mm512_and_si512(wide, sign_bit);
    } else {
      const __m512i wide = _mm512_cvtepu8_epi16(bytes);
      magnitude = _mm512_and_si512(wide, _mm512_set1_epi16(0x7F));
      sign = _mm512_and_si512(_mm512_slli_epi16(wide, 8), sign_bit);
    }
    const __m512i low = _mm512_permutex2var_epi16(t0, magnitude, t1), high = _mm512_permutex2var_epi16(t2, magnitude, t3);
    __m512i value = _mm512_mask_mov_epi16(low, _mm512_test_epi16_mask(magnitude, _mm512_set1_epi16(64)), high);
    value = _mm512_mask_mov_epi16(value, _mm512_test_epi16_mask(magnitude, _mm512_set1_epi16(128)), t4);
    _mm512_storeu_si512(out + i, _mm512_or_si512(value, sign));
  }
#else
  for (int64_t i = 0; i < count; ++i) out[i] = values[codes[i]];
#endif
}

// The pages of one layer.
struct PageStore {
  void *k, *v;
  float *k_scales, *v_scales;  // (block, K, 16); int8 and fp8 only
  int format;
  int64_t num_kv, head_dim, padded_dim;

  int64_t k_size() const { return head_dim * kBlock; }
  int64_t v_size() const { return padded_dim * kBlock; }
  template <typename E>
  E* k_at(int64_t block, int64_t head) const {
    return static_cast<E*>(k) + (block * num_kv + head) * k_size();
  }
  template <typename E>
  E* v_at(int64_t block, int64_t head) const {
    return static_cast<E*>(v) + (block * num_kv + head) * v_size();
  }
};

// One token's key and value of one head, as elements E of the store, into their place in a page.
template <typename E, int kPack>
LS_INLINE void scatter(const PageStore& store, int64_t block, int64_t head, int64_t slot, const E* k, const E* v) {
  struct Group {
    E each[kPack];
  };
  auto* k_out = reinterpret_cast<Group*>(store.k_at<E>(block, head)) + slot;
  for (int64_t i = 0; i < store.head_dim / kPack; ++i) std::memcpy(k_out + i * kBlock, k + i * kPack, sizeof(Group));
  E* v_out = store.v_at<E>(block, head) + slot / kPack * kPack * store.padded_dim + slot % kPack;
  for (int64_t h = 0; h < store.head_dim; ++h) v_out[h * kPack] = v[h];
  for (int64_t h = store.head_dim; h < store.padded_dim; ++h) v_out[h * kPack] = E(0);
}

// Codes of `dim` numbers and their scale.
template <int kFormat, typename T>
float quantise(const T* x, int64_t dim, uint8_t* codes) {
  constexpr float kLargest = kFormat == kKvInt8 ? 127.0f : 448.0f;
  uint32_t largest_bits = 0;  // as integers, so that NaN is the largest of all
  for (int64_t i = 0; i < dim; ++i) {
    const float value = to_float(x[i]);
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    largest_bits = std::max(largest_bits, bits & 0x7FFFFFFF);
  }
  float largest;
  std::memcpy(&largest, &largest_bits, 4);
  const float inverse = kLargest / largest;
  const bool is_plain = largest > 0.0f && std::isfinite(largest) && std::isfinite(inverse);
  for (int64_t i = 0; i < dim; ++i) {
    const float value = is_plain ? std::min(std::max(to_float(x[i]) * inverse, -kLargest), kLargest) : 0.0f;
    codes[i] = kFormat == kKvInt8 ? static_cast<uint8_t>(static_cast<int8_t>(__builtin_rintf(value))) : fp8_code(value);
  }
  return is_plain ? largest / kLargest : std::isfinite(largest) ? 0.0f : __builtin_nanf("");
}

template <int kFormat, typename T>
void write_codes(const PageStore& store, int64_t block, int64_t head, int64_t slot, const T* k, const T* v,
                 uint8_t* codes) {
  const int64_t at = (block * store.num_kv + head) * kBlock + slot;
  store.k_scales[at] = quantise<kFormat>(k, store.head_dim, codes);
  store.v_scales[at] = quantise<kFormat>(v, store.head_dim, codes + store.head_dim);
  scatter<uint8_t, 2>(store, block, head, slot, codes, codes + store.head_dim);
}

// Write one token's key and value of one head. `room` holds 2 H elements of any format.
template <typename T>
void write_token(const PageStore& store, int64_t block, int64_t head, int64_t slot, const T* k, const T* v,
                 float* room) {
  const int64_t dim = store.head_dim;
  if (store.format == kKvInt8) {
    write_codes<kKvInt8>(store, block, head, slot, k, v, reinterpret_cast<uint8_t*>(room));
  } else if (store.format == kKvFp8) {
    write_codes<kKvFp8>(store, block, head, slot, k, v, reinterpret_cast<uint8_t*>(room));
  } else if (store.format == kKvBf16) {
    bf16* pair = reinterpret_cast<bf16*>(room);
    for (int64_t h = 0; h < dim; ++h) {
      pair[h] = round_bf16(to_float(k[h]));
      pair[dim + h] = round_bf16(to_float(v[h]));
    }
    scatter<bf16, 2>(store, block, head, slot, pair, pair + dim);
  } else {
    for (int64_t h = 0; h < dim; ++h) {
      room[h] = to_float(k[h]);
      room[dim + h] = to_float(v[h]);
    }
    scatter<float, 1>(store, block, head, slot, room, room + dim);
  }
}

// Pairs (rows, 16 or Hp, 2) of bf16 as fp32 (2 rows, 16 or Hp): the layout of fp32 pages.
LS_INLINE void unpair(const bf16* pairs, int64_t rows, int64_t columns, float* out) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t c = 0; c < columns; ++c) {
      out[2 * row * columns + c] = to_float(pairs[(row * columns + c) * 2]);
      out[(2 * row + 1) * columns + c] = to_float(pairs[(row * columns + c) * 2 + 1]);
    }
  }
}

// One head's page as operands of arithmetic in T: the page itself where it is stored so, else converted into `room`
// (K then V; v_size() bf16 more for T = float).
template <typename T>
struct PageOperands {
  const T *k, *v;
};

LS_INLINE void widen_page(const PageStore& store, int64_t block, int64_t head, bf16* k, bf16* v) {
  if (store.format == kKvInt8) {
    widen_codes<kKvInt8>(store.k_at<uint8_t>(block, head), k, store.k_size());
    widen_codes<kKvInt8>(store.v_at<uint8_t>(block, head), v, store.v_size());
  } else {
    widen_codes<kKvFp8>(store.k_at<uint8_t>(block, head), k, store.k_size());
    widen_codes<kKvFp8>(store.v_at<uint8_t>(block, head), v, store.v_size());
  }
}

LS_INLINE PageOperands<bf16> page_operands(const PageStore& store, int64_t block, int64_t head, bf16* room) {
  if (store.format == kKvBf16) return {store.k_at<bf16>(block, head), store.v_at<bf16>(block, head)};
  widen_page(store, block, head, room, room + store.k_size());
  return {room, room + store.k_size()};
}

LS_INLINE PageOperands<float> page_operands(const PageStore& store, int64_t block, int64_t head, float* room) {
  if (store.format == kKvFp32) return {store.k_at<float>(block, head), store.v_at<float>(block, head)};
  float *k = room, *v = k + store.k_size();
  bf16* narrow = reinterpret_cast<bf16*>(v + store.v_size());
  PageOperands<bf16> pairs{store.k_at<bf16>(block, head), store.v_at<bf16>(block, head)};
  if (store.format != kKvBf16) {
    widen_page(store, block, head, narrow, narrow + store.k_size());
    pairs = {narrow, narrow + store.k_size()};
  }
  unpair(pairs.k, store.head_dim / 2, kBlock, k);
  unpair(pairs.v, kBlock / 2, store.padded_dim, v);
  return {k, v};
}

}  // namespace LOCKSTEP_ISA
}  // namespace ls
