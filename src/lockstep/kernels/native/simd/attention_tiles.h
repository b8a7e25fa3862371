// One tile of 128 keys against a few rows: scores, online softmax, values.
//
// A row is one query head of one token; up to six that share a K/V head run together, so that each load of K and V
// serves them all, but a row's arithmetic is its own: a score sums over H ascending; the tile's maximum joins the row's;
// p = 2^(c s - c m), c = scale log2(e), is summed lane by lane and rounded to the compute dtype; values are added key by
// key (bf16: pair by pair), ascending. Online softmax: Milakov & Gimelshein 2018, alg. 3.
#pragma once
#include <utility>

#include "attention_math.h"
#include "kv_pages.h"

namespace ls {
namespace LOCKSTEP_ISA {

constexpr int kTile = 128, kTileBlocks = kTile / kBlock, kRows = 6;
constexpr float kMinusInfinity = -__builtin_inff();

template <typename T>
struct KeyTile {
  int64_t first;  // position of its first key
  const T *k[kTileBlocks], *v[kTileBlocks];
  const float *k_scales[kTileBlocks], *v_scales[kTileBlocks];  // of quantised pages
  bool is_scaled;
  int64_t head_dim, padded_dim;
};

struct RowBounds {
  int64_t first, last;  // keys it sees, both included
};

// Rows side by side: queries (rows, H), sums of values (rows, Hp), maxima c m, sums of weights by lane (rows, 16); and of
// the tile at hand weights (rows, 128) and what the new maximum leaves of the old sums.
template <typename T>
struct RowStates {
  const T* q;
  const RowBounds* bounds;
  float *o, *m, *l, *alpha;
  T* p;

  RowStates from(int64_t row, int64_t head_dim, int64_t padded_dim) const {
    return {q + row * head_dim, bounds + row, o + row * padded_dim, m + row,
            l + row * kLanes,   alpha + row,  p + row * kTile};
  }
};

// The keys [begin, end) of the tile that each of R rows sees, and how many blocks hold all of them.
template <int R>
struct Visible {
  int64_t begin[R], end[R], blocks = 0;

  template <typename T>
  Visible(const KeyTile<T>& tile, const RowBounds* bounds) {
    for (int r = 0; r < R; ++r) {
      begin[r] = std::min<int64_t>(std::max<int64_t>(bounds[r].first - tile.first, 0), kTile);
      end[r] = std::max(begin[r], std::min<int64_t>(bounds[r].last - tile.first + 1, kTile));
      if (begin[r] < end[r]) blocks = std::max(blocks, (end[r] - 1) / kBlock + 1);
    }
  }
};

// What is taken from exponents whose maximum is m: with nothing but -inf so far, weights are 0 and not NaN.
LS_INLINE float finite_shift(float m) { return m == kMinusInfinity ? 0.0f : m; }

// s[r][16 b ..] = q[r] . k for NB blocks of 16 keys; best[r] takes in their maxima by lane.
template <typename T, int R, int NB>
LS_INLINE void scores(const T* q, const T* const* blocks, const float* const* scales, int64_t head_dim, float* s,
                      V* best) {
  using Math = MathOf<T>;
  V acc[R][NB];
  for (auto& line : acc) {
    for (auto& value : line) value = zero();
  }
  for (int64_t h = 0; h < head_dim; h += Math::kPack) {
    V kv[NB];
#pragma GCC unroll 4
    for (int b = 0; b < NB; ++b) kv[b] = Math::vector(blocks[b] + h * kBlock);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const V qv = Math::broadcast(q + r * head_dim + h);
#pragma GCC unroll 4
      for (int b = 0; b < NB; ++b) acc[r][b] = Math::dot(acc[r][b], qv, kv[b]);
    }
  }
#pragma GCC unroll 4
  for (int b = 0; b < NB; ++b) {
    const V scale = scales ? load(scales[b]) : set1(1.0f);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const V value = scales ? mul(acc[r][b], scale) : acc[r][b];
      store(s + r * kTile + b * kBlock, value);
      best[r] = max(value, best[r]);
    }
  }
}

// o[r][0 .. 16 NC) = o[r] alpha[r] + p[r] v over steps [begin, end) of kPack keys; without alpha, o[r] + p[r] v. `mask`
// picks the keys of a pair.
template <typename T, int R, int NC, bool kMasked>
LS_INLINE void values(const T* p, const T* const* blocks, int64_t padded_dim, int64_t begin, int64_t end, float* o,
                      const float* alpha, uint32_t mask) {
  using Math = MathOf<T>;
  constexpr int kSteps = kBlock / Math::kPack;
  V acc[R][NC];
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < NC; ++c) {
      acc[r][c] = load(o + r * padded_dim + c * kLanes);
      if (alpha) acc[r][c] = mul(acc[r][c], set1(alpha[r]));
    }
  }
  while (begin < end) {
    const int64_t in_block = begin % kSteps, stop = std::min<int64_t>(end, begin - in_block + kSteps);
    const T* row = blocks[begin / kSteps] + in_block * Math::kPack * padded_dim;
    for (; begin < stop; ++begin, row += Math::kPack * padded_dim) {
      V vv[NC];
#pragma GCC unroll 4
      for (int c = 0; c < NC; ++c) {
        vv[c] = Math::vector(row + c * kLanes * Math::kPack);
        if (kMasked) vv[c] = and_bits(vv[c], mask);
      }
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const V pv = Math::broadcast(p + r * kTile + begin * Math::kPack);
#pragma GCC unroll 4
        for (int c = 0; c < NC; ++c) acc[r][c] = Math::dot(acc[r][c], pv, vv[c]);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < NC; ++c) store(o + r * padded_dim + c * kLanes, acc[r][c]);
  }
}

template <typename T, int R, bool kMasked>
void all_columns(const T* p, const KeyTile<T>& tile, int64_t begin, int64_t end, float* o, const float* alpha,
                 uint32_t mask) {
  if (begin >= end) return;
  constexpr int kPack = MathOf<T>::kPack, kSteps = kBlock / kPack;
  for (int64_t column = 0; column < tile.padded_dim;) {
    const T* shifted[kTileBlocks];
    for (int64_t b = begin / kSteps; b <= (end - 1) / kSteps; ++b) shifted[b] = tile.v[b] + column * kPack;
    const int64_t left = (tile.padded_dim - column) / kLanes;
    if (kColumnVectors > 1 && left >= kColumnVectors) {
      values<T, R, kColumnVectors, kMasked>(p, shifted, tile.padded_dim, begin, end, o + column, alpha, mask);
      column += kColumnVectors * kLanes;
    } else if (kColumnVectors > 1 && left >= 2) {
      values<T, R, 2, kMasked>(p, shifted, tile.padded_dim, begin, end, o + column, alpha, mask);
      column += 2 * kLanes;
    } else {
      values<T, R, 1, kMasked>(p, shifted, tile.padded_dim, begin, end, o + column, alpha, mask);
      column += kLanes;
    }
  }
}

// Calls f with the number of rows, 1 .. 6, as a constant.
template <typename F>
LS_INLINE void with_rows(int rows, const F& f) {
  switch (rows) {
    case 1: return f(std::integral_constant<int, 1>{});
    case 2: return f(std::integral_constant<int, 2>{});
    case 3: return f(std::integral_constant<int, 3>{});
    case 4: return f(std::integral_constant<int, 4>{});
    case 5: return f(std::integral_constant<int, 5>{});
    default: return f(std::integral_constant<int, 6>{});
  }
}

// Values of keys [begin, end) of the tile for `rows` rows that see them all, where half pairs stand at the ends.
template <typename T>
void add_values(const T* p, const KeyTile<T>& tile, int rows, int64_t begin, int64_t end, float* o) {
  if (begin >= end) return;
  with_rows(rows, [&](auto count) {
    constexpr int R = decltype(count)::value;
    if constexpr (MathOf<T>::kPack == 1) {
      all_columns<T, R, false>(p, tile, begin, end, o, nullptr, 0);
    } else {
      if (begin % 2 == 1) all_columns<T, R, true>(p, tile, begin / 2, begin / 2 + 1, o, nullptr, 0xFFFF0000u);
      all_columns<T, R, false>(p, tile, (begin + 1) / 2, end / 2, o, nullptr, 0);
      if (end % 2 == 1) all_columns<T, R, true>(p, tile, end / 2, end / 2 + 1, o, nullptr, 0x0000FFFFu);
    }
  });
}

// Weights of one row from its scores, -inf where it does not see; l, by lane, becomes alpha l + their sum.
template <typename T>
LS_INLINE void weigh(const float* s, int64_t blocks, float c, float shift, float alpha, float* l, T* p) {
  using Math = MathOf<T>;
  const V factor = set1(c), minus = set1(-shift);
  V sum = mul(load(l), set1(alpha));
#pragma GCC unroll 8
  for (int64_t b = 0; b < kTileBlocks; ++b) {  // of constant length, to be unrolled
    if (b == blocks) break;
    const V weight = Math::exp2(fma(load(s + b * kBlock), factor, minus));
    sum = add(sum, weight);
    Math::store_weights(p + b * kBlock, weight);
  }
  store(l, sum);
}

// The same for quantised pages of which the row sees keys [begin, end): p takes in the scales of the values, and a hidden
// key's may be anything, NaN too.
template <typename T>
LS_INLINE void weigh_scaled(const float* s, const KeyTile<T>& tile, int64_t begin, int64_t end, int64_t blocks, float c,
                            float shift, float alpha, float* l, T* p) {
  using Math = MathOf<T>;
  V sum = mul(load(l), set1(alpha));
  for (int64_t b = 0; b < blocks; ++b) {
    V weight = Math::exp2(fma(load(s + b * kBlock), set1(c), set1(-shift)));
    sum = add(sum, weight);
    weight = mul(weight, load(tile.v_scales[b]));
    if (begin > b * kBlock || end < (b + 1) * kBlock) {
      float lanes[kLanes];
      store(lanes, weight);
      for (int i = 0; i < kLanes; ++i) {
        const int64_t key = b * kBlock + i;
        if (key < begin || key >= end) lanes[i] = 0.0f;
      }
      weight = load(lanes);
    }
    Math::store_weights(p + b * kBlock, weight);
  }
  store(l, sum);
}

// Weights of R rows over one tile, their sums, the new maxima, and what these leave of the old sums.
template <typename T, int R>
void weigh_rows(const KeyTile<T>& tile, const RowStates<T>& rows, float c) {
  const Visible<R> visible(tile, rows.bounds);
  const int64_t blocks = visible.blocks;
  alignas(64) float s[R * kTile];
  alignas(64) float shift[R], alpha[kLanes] = {};
  V best[R];
  for (auto& lane_best : best) lane_best = set1(kMinusInfinity);
  for (int64_t b = 0; b < blocks;) {
    const float* const* scales = tile.is_scaled ? tile.k_scales + b : nullptr;
    if (kColumnVectors > 1 && blocks - b >= kColumnVectors) {
      scores<T, R, kColumnVectors>(rows.q, tile.k + b, scales, tile.head_dim, s + b * kBlock, best);
      b += kColumnVectors;
    } else if (kColumnVectors > 1 && blocks - b >= 2) {
      scores<T, R, 2>(rows.q, tile.k + b, scales, tile.head_dim, s + b * kBlock, best);
      b += 2;
    } else {
      scores<T, R, 1>(rows.q, tile.k + b, scales, tile.head_dim, s + b * kBlock, best);
      ++b;
    }
  }
  for (int r = 0; r < R; ++r) {
    if (visible.begin[r] > 0 || visible.end[r] < blocks * kBlock) {
      float* line = s + r * kTile;
      for (int64_t i = 0; i < std::min(visible.begin[r], blocks * kBlock); ++i) line[i] = kMinusInfinity;
      for (int64_t i = visible.end[r]; i < blocks * kBlock; ++i) line[i] = kMinusInfinity;
      best[r] = set1(kMinusInfinity);
      for (int64_t b = 0; b < blocks; ++b) best[r] = max(load(line + b * kBlock), best[r]);
    }
    const float old_m = rows.m[r];
    rows.m[r] = std::max(old_m, largest(best[r]) * c);
    shift[r] = finite_shift(rows.m[r]);
    alpha[r] = old_m - shift[r];
  }
  store(alpha, MathOf<T>::exp2(load(alpha)));
  for (int r = 0; r < R; ++r) {
    float *line = s + r * kTile, *l = rows.l + r * kLanes;
    rows.alpha[r] = alpha[r];
    if (tile.is_scaled) {
      weigh_scaled(line, tile, visible.begin[r], visible.end[r], blocks, c, shift[r], alpha[r], l, rows.p + r * kTile);
    } else {
      weigh(line, blocks, c, shift[r], alpha[r], l, rows.p + r * kTile);
    }
  }
}

// The tile's values, weighted, into the sums of R rows.
template <typename T, int R>
void add_rows(const KeyTile<T>& tile, const RowStates<T>& rows) {
  constexpr int kPack = MathOf<T>::kPack;
  const Visible<R> visible(tile, rows.bounds);
  int64_t joint_begin = 0, joint_end = kTile;
  for (int r = 0; r < R; ++r) {
    joint_begin = std::max(joint_begin, (visible.begin[r] + kPack - 1) / kPack * kPack);
    joint_end = std::min(joint_end, visible.end[r] / kPack * kPack);
  }
  const auto add_joint = [&](const float* alpha) {
    all_columns<T, R, false>(rows.p, tile, joint_begin / kPack, joint_end / kPack, rows.o, alpha, 0);
  };
  const auto one_by_one = [&](auto range) {  // rows that see alike, as those of one token do, together
    for (int r = 0; r < R;) {
      int alike = 1;
      while (r + alike < R && visible.begin[r + alike] == visible.begin[r] && visible.end[r + alike] == visible.end[r]) {
        ++alike;
      }
      const auto [begin, end] = range(visible.begin[r], visible.end[r]);
      add_values(rows.p + r * kTile, tile, alike, begin, end, rows.o + r * tile.padded_dim);
      r += alike;
    }
  };
  using Range = std::pair<int64_t, int64_t>;
  const auto tails = [&] { one_by_one([&](int64_t, int64_t end) { return Range{joint_end, end}; }); };
  if (joint_begin == 0 && joint_end > 0) {
    add_joint(rows.alpha);
    return tails();
  }
  for (int r = 0; r < R; ++r) {
    float* out = rows.o + r * tile.padded_dim;
    for (int64_t h = 0; h < tile.padded_dim; h += kLanes) store(out + h, mul(load(out + h), set1(rows.alpha[r])));
  }
  if (joint_begin >= joint_end) return one_by_one([](int64_t begin, int64_t end) { return Range{begin, end}; });
  one_by_one([&](int64_t begin, int64_t) { return Range{begin, joint_begin}; });
  add_joint(nullptr);
  tails();
}

}  // namespace LOCKSTEP_ISA
}  // namespace ls
