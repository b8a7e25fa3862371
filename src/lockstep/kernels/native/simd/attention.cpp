// Causal attention over pages of 16 tokens, and the writing of pages.
//
// A row is one query head of one token. Up to six rows that share a K/V head run together, so each K/V load serves them
// all, but each row's arithmetic is its own and fixed: key tiles of 128 from position 0 (or from the tile where its
// window starts) upwards; a score sums over H ascending; a tile's maximum, then p = exp(s - m) and its sum by the fixed
// lane tree; then values are added key by key, ascending. Online softmax: Milakov & Gimelshein 2018, alg. 3.
#include "vec.h"

namespace ls {
namespace LOCKSTEP_ISA {
namespace {

constexpr int kBlock = 16, kTile = 128, kTileBlocks = kTile / kBlock, kRows = 6;
constexpr float kMinusInfinity = -__builtin_inff();

template <typename T>
struct Pages {
  const T *k, *v;
  const int32_t* table;
  int64_t kv_head, num_kv, head_dim, padded_dim;
  const T* k_block(int64_t index) const { return k + (table[index] * num_kv + kv_head) * head_dim * kBlock; }
  const T* v_block(int64_t index) const { return v + (table[index] * num_kv + kv_head) * kBlock * padded_dim; }
};

// s[r][16 b ..] = scale * q[r] . k for NB blocks of 16 keys.
template <typename T, int R, int NB>
LS_INLINE void scores(const float* q, const T* const* blocks, int64_t head_dim, float scale, float* s) {
  V acc[R][NB];
  for (auto& line : acc) {
    for (auto& value : line) value = zero();
  }
  for (int64_t h = 0; h < head_dim; ++h) {
    V kv[NB];
#pragma GCC unroll 4
    for (int b = 0; b < NB; ++b) kv[b] = load(blocks[b] + h * kBlock);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const V qv = set1(q[r * head_dim + h]);
#pragma GCC unroll 4
      for (int b = 0; b < NB; ++b) acc[r][b] = fma(qv, kv[b], acc[r][b]);
    }
  }
  const V sv = set1(scale);
  for (int r = 0; r < R; ++r) {
    for (int b = 0; b < NB; ++b) store(s + r * kTile + b * kBlock, mul(acc[r][b], sv));
  }
}

// o[r][0 .. 16 NC) += sum over keys [begin, end) of the tile of p[r][key] * v[key].
template <typename T, int R, int NC>
LS_INLINE void add_values(const float* p, const T* const* blocks, int64_t padded_dim, int64_t begin, int64_t end,
                          float* o) {
  V acc[R][NC];
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < NC; ++c) acc[r][c] = load(o + r * padded_dim + c * kLanes);
  }
  for (int64_t key = begin; key < end; ++key) {
    const T* row = blocks[key / kBlock] + key % kBlock * padded_dim;
    V vv[NC];
#pragma GCC unroll 4
    for (int c = 0; c < NC; ++c) vv[c] = load(row + c * kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const V pv = set1(p[r * kTile + key]);
#pragma GCC unroll 4
      for (int c = 0; c < NC; ++c) acc[r][c] = fma(pv, vv[c], acc[r][c]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < NC; ++c) store(o + r * padded_dim + c * kLanes, acc[r][c]);
  }
}

template <typename T, int R>
void add_values_all(const float* p, const T* const* blocks, int64_t padded_dim, int64_t begin, int64_t end, float* o) {
  if (begin >= end) return;
  for (int64_t column = 0; column < padded_dim;) {
    const T* shifted[kTileBlocks];
    for (int64_t b = begin / kBlock; b <= (end - 1) / kBlock; ++b) shifted[b] = blocks[b] + column;
    if (kColumnVectors > 1 && padded_dim - column >= kColumnVectors * kLanes) {
      add_values<T, R, kColumnVectors>(p, shifted, padded_dim, begin, end, o + column);
      column += kColumnVectors * kLanes;
    } else {
      add_values<T, R, 1>(p, shifted, padded_dim, begin, end, o + column);
      column += kLanes;
    }
  }
}

struct Row {
  int64_t position;  // of its token
  int64_t first;     // first key it sees
};

// R rows of one K/V head: q (R x H), o (R x padded), m and l per row.
template <typename T, int R>
void attend(const Pages<T>& pages, const float* q, const Row* rows, float scale, float* o, float* m, float* l) {
  alignas(64) float s[R * kTile];
  int64_t first = rows[0].first, last = rows[0].position;
  for (int r = 0; r < R; ++r) {
    first = std::min(first, rows[r].first);
    last = std::max(last, rows[r].position);
    m[r] = kMinusInfinity;
    l[r] = 0.0f;
    std::memset(o + r * pages.padded_dim, 0, pages.padded_dim * sizeof(float));
  }
  for (int64_t tile = first / kTile * kTile; tile <= last; tile += kTile) {
    const int64_t blocks = std::min<int64_t>(kTileBlocks, (last - tile) / kBlock + 1);
    const T *k_blocks[kTileBlocks], *v_blocks[kTileBlocks];
    for (int64_t b = 0; b < blocks; ++b) {
      k_blocks[b] = pages.k_block(tile / kBlock + b);
      v_blocks[b] = pages.v_block(tile / kBlock + b);
    }
    for (int64_t b = 0; b < blocks;) {
      if (kColumnVectors > 1 && blocks - b >= kColumnVectors) {
        scores<T, R, kColumnVectors>(q, k_blocks + b, pages.head_dim, scale, s + b * kBlock);
        b += kColumnVectors;
      } else {
        scores<T, R, 1>(q, k_blocks + b, pages.head_dim, scale, s + b * kBlock);
        ++b;
      }
    }
    int64_t begins[R], ends[R];
    int64_t joint_begin = 0, joint_end = kTile;
    for (int r = 0; r < R; ++r) {
      float* line = s + r * kTile;
      const int64_t begin = std::min<int64_t>(std::max<int64_t>(rows[r].first - tile, 0), kTile);
      const int64_t end = std::min<int64_t>(rows[r].position - tile + 1, kTile);
      begins[r] = begin;
      ends[r] = std::max(begin, end);
      joint_begin = std::max(joint_begin, begins[r]);
      joint_end = std::min(joint_end, ends[r]);
      if (begin >= end) continue;  // the row sees nothing of this tile: leave it untouched
      for (int64_t i = 0; i < begin; ++i) line[i] = kMinusInfinity;
      for (int64_t i = end; i < blocks * kBlock; ++i) line[i] = kMinusInfinity;
      V best = load(line);
      for (int64_t b = 1; b < blocks; ++b) best = max(best, load(line + b * kBlock));
      const float m_new = std::max(m[r], max_lanes(best));
      const float alpha = exp(m[r] - m_new);
      V sum = zero();
      const V shift = set1(m_new);
      for (int64_t b = 0; b < blocks; ++b) {
        const V p = exp(sub(load(line + b * kBlock), shift));
        store(line + b * kBlock, p);
        sum = add(sum, p);
      }
      l[r] = __builtin_fmaf(l[r], alpha, sum_lanes(sum));
      m[r] = m_new;
      float* out = o + r * pages.padded_dim;
      const V scale_old = set1(alpha);
      for (int64_t c = 0; c < pages.padded_dim; c += kLanes) store(out + c, mul(load(out + c), scale_old));
    }
    if (joint_begin < joint_end) {
      for (int r = 0; r < R; ++r) {
        add_values_all<T, 1>(s + r * kTile, v_blocks, pages.padded_dim, begins[r], joint_begin,
                             o + r * pages.padded_dim);
      }
      add_values_all<T, R>(s, v_blocks, pages.padded_dim, joint_begin, joint_end, o);
      for (int r = 0; r < R; ++r) begins[r] = joint_end;
    }
    for (int r = 0; r < R; ++r) {
      add_values_all<T, 1>(s + r * kTile, v_blocks, pages.padded_dim, begins[r], ends[r], o + r * pages.padded_dim);
    }
  }
}

template <typename T>
void attend_rows(int rows, const Pages<T>& pages, const float* q, const Row* row, float scale, float* o, float* m,
                 float* l) {
  switch (rows) {
    case 1: return attend<T, 1>(pages, q, row, scale, o, m, l);
    case 2: return attend<T, 2>(pages, q, row, scale, o, m, l);
    case 3: return attend<T, 3>(pages, q, row, scale, o, m, l);
    case 4: return attend<T, 4>(pages, q, row, scale, o, m, l);
    case 5: return attend<T, 5>(pages, q, row, scale, o, m, l);
    default: return attend<T, 6>(pages, q, row, scale, o, m, l);
  }
}

template <typename T>
void attention_of(T* o, float* lse, const T* q, const T* k_pages, const T* v_pages, const int32_t* tables,
                  const int32_t* starts, const int32_t* contexts, int64_t num_seqs, int64_t num_heads, int64_t num_kv,
                  int64_t head_dim, int64_t padded_dim, int64_t table_stride, float scale, int64_t window) {
  const int64_t group = num_heads / num_kv;
  const int64_t tokens_per_unit = std::max<int64_t>(1, kRows / group);
  // unit_starts[s]: first unit of sequence s; its units are (kv head, run of tokens).
  auto* unit_starts = static_cast<int64_t*>(std::malloc((num_seqs + 1) * sizeof(int64_t)));
  if (unit_starts == nullptr) std::abort();
  unit_starts[0] = 0;
  for (int64_t s = 0; s < num_seqs; ++s) {
    const int64_t runs = (starts[s + 1] - starts[s] + tokens_per_unit - 1) / tokens_per_unit;
    unit_starts[s + 1] = unit_starts[s] + runs * num_kv;
  }
  parallel(unit_starts[num_seqs], 1, [&](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    float* q_rows = scratch.get(kRows * (head_dim + padded_dim));
    float* o_rows = q_rows + kRows * head_dim;
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t s = std::upper_bound(unit_starts, unit_starts + num_seqs + 1, unit) - unit_starts - 1;
      const int64_t runs = (unit_starts[s + 1] - unit_starts[s]) / num_kv;
      const int64_t kv_head = (unit - unit_starts[s]) / runs, run = (unit - unit_starts[s]) % runs;
      const int64_t first_token = starts[s] + run * tokens_per_unit;
      const int64_t tokens = std::min<int64_t>(tokens_per_unit, starts[s + 1] - first_token);
      const Pages<T> pages{k_pages, v_pages, tables + s * table_stride, kv_head, num_kv, head_dim, padded_dim};
      for (int64_t done = 0; done < tokens * group;) {
        const int rows = static_cast<int>(std::min<int64_t>(kRows, tokens * group - done));
        Row row[kRows];
        int64_t at[kRows];
        float m[kRows], l[kRows];
        for (int r = 0; r < rows; ++r) {
          const int64_t token = first_token + (done + r) / group, head = kv_head * group + (done + r) % group;
          const int64_t position = contexts[s] + token - starts[s];
          row[r] = {position, window > 0 ? std::max<int64_t>(0, position - window + 1) : 0};
          at[r] = token * num_heads + head;
          for (int64_t h = 0; h < head_dim; ++h) q_rows[r * head_dim + h] = to_float(q[at[r] * head_dim + h]);
        }
        attend_rows(rows, pages, q_rows, row, scale, o_rows, m, l);
        for (int r = 0; r < rows; ++r) {
          for (int64_t h = 0; h < head_dim; ++h) put(o + at[r] * head_dim + h, o_rows[r * padded_dim + h] / l[r]);
          if (lse) lse[at[r]] = m[r] + static_cast<float>(std::log(static_cast<double>(l[r])));
        }
        done += rows;
      }
    }
  });
  std::free(unit_starts);
}

template <typename T>
void kv_write_of(T* k_pages, T* v_pages, const T* k, const T* v, const int32_t* tables, const int32_t* starts,
                 const int32_t* contexts, int64_t num_seqs, int64_t num_kv, int64_t head_dim, int64_t padded_dim,
                 int64_t table_stride, int64_t num_tokens) {
  parallel(num_tokens, 16, [&](int64_t begin, int64_t end) {
    int64_t s = std::upper_bound(starts, starts + num_seqs + 1, static_cast<int32_t>(begin)) - starts - 1;
    for (int64_t token = begin; token < end; ++token) {
      while (token >= starts[s + 1]) ++s;
      const int64_t position = contexts[s] + token - starts[s];
      const int64_t page = tables[s * table_stride + position / kBlock], slot = position % kBlock;
      for (int64_t head = 0; head < num_kv; ++head) {
        T* k_out = k_pages + (page * num_kv + head) * head_dim * kBlock + slot;
        T* v_out = v_pages + ((page * num_kv + head) * kBlock + slot) * padded_dim;
        const T *k_in = k + (token * num_kv + head) * head_dim, *v_in = v + (token * num_kv + head) * head_dim;
        for (int64_t h = 0; h < head_dim; ++h) k_out[h * kBlock] = k_in[h];
        std::memcpy(v_out, v_in, head_dim * sizeof(T));
        if (padded_dim > head_dim) std::memset(v_out + head_dim, 0, (padded_dim - head_dim) * sizeof(T));
      }
    }
  });
}

}  // namespace

void kv_write(void* k_pages, void* v_pages, const void* k, const void* v, int dtype, const int32_t* tables,
              const int32_t* starts, const int32_t* contexts, int64_t num_seqs, int64_t num_kv, int64_t head_dim,
              int64_t padded_dim, int64_t table_stride, int64_t num_tokens) {
  with_dtype(dtype, [&](auto* e) {
    using T = std::remove_pointer_t<decltype(e)>;
    kv_write_of(static_cast<T*>(k_pages), static_cast<T*>(v_pages), static_cast<const T*>(k), static_cast<const T*>(v),
                tables, starts, contexts, num_seqs, num_kv, head_dim, padded_dim, table_stride, num_tokens);
  });
}

void attention(void* o, float* lse, const void* q, const void* k_pages, const void* v_pages, int dtype,
               const int32_t* tables, const int32_t* starts, const int32_t* contexts, int64_t num_seqs,
               int64_t num_heads, int64_t num_kv, int64_t head_dim, int64_t padded_dim, int64_t table_stride,
               float scale, int64_t window) {
  with_dtype(dtype, [&](auto* e) {
    using T = std::remove_pointer_t<decltype(e)>;
    attention_of(static_cast<T*>(o), lse, static_cast<const T*>(q), static_cast<const T*>(k_pages),
                 static_cast<const T*>(v_pages), tables, starts, contexts, num_seqs, num_heads, num_kv, head_dim,
                 padded_dim, table_stride, scale, window);
  });
}

}  // namespace LOCKSTEP_ISA
}  // namespace ls
