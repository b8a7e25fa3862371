// Causal attention over pages: norms and rotates heads, writes keys and values, attends. Training and serving alike.
//
// Keys are taken in ranges of 1,024 from position 0, each in tiles of 128 (attention_tiles.h), and what the ranges give
// is joined in ascending order, whether one thread runs through them all or many take one each: a row's bits never
// depend on that, nor on the rows that share its call. Bytes moved: every visible page once for each 48 rows that share
// a K/V head; in decode, once.
#include "attention_tiles.h"
#include "rows.h"

namespace ls {
namespace LOCKSTEP_ISA {
namespace {

constexpr int64_t kRange = 1024, kUnitRows = 48;
constexpr float kNothing = -1.0f;  // sum of weights of a row that sees no key of a range

template <typename T>
struct Problem {
  T* o;
  float* lse;  // or null
  const T *q, *k, *v;
  int64_t q_stride, kv_stride;  // from token to token
  PageStore store;
  const int64_t* positions;
  const float *cos, *sin;       // null: heads come rotated
  const T *q_norm, *k_norm;     // null: no norm
  float eps;
  const int32_t* tables;  // null: sequence s has the blocks from starts[s] / 16 + s on
  int64_t table_stride;
  const int32_t *starts, *contexts;  // contexts null: all 0
  int64_t num_seqs, num_heads, group;
  float c;  // scale log2(e)
  int64_t window;

  int64_t context(int64_t s) const { return contexts ? contexts[s] : 0; }
  int64_t chunk(int64_t s) const { return starts[s + 1] - starts[s]; }
  int64_t block(int64_t s, int64_t index) const {
    return tables ? tables[s * table_stride + index] : starts[s] / kBlock + s + index;
  }
  int64_t first_key(int64_t position) const { return window > 0 ? std::max<int64_t>(0, position - window + 1) : 0; }
  int64_t tokens_per_unit() const { return std::max<int64_t>(1, kUnitRows / group); }

  void prepare(T* out, const T* in, int64_t token, const T* norm) const {
    const int64_t dim = store.head_dim;
    if (norm) {
      normalise(out, in, norm, dim, eps);
      in = out;
    }
    if (cos) {
      const int64_t at = positions[token] * (dim / 2);
      rotate(out, in, cos + at, sin + at, dim / 2, set1(1.0f));
    } else if (in != out) {
      std::memcpy(out, in, dim * sizeof(T));
    }
  }

  // Its key and value into the page of its position. `room`: 3 H floats.
  void write(int64_t s, int64_t token, int64_t head, float* room) const {
    const int64_t position = context(s) + token - starts[s], dim = store.head_dim;
    T* key = reinterpret_cast<T*>(room + 2 * dim);
    prepare(key, k + token * kv_stride + head * dim, token, k_norm);
    write_token(store, block(s, position / kBlock), head, position % kBlock, key, v + token * kv_stride + head * dim, room);
  }
};

// A row's sums over some ranges, joined with those over the next.
template <typename Math>
void join(float* o, float* m, float* l, const float* next_o, float next_m, float next_l, int64_t padded_dim) {
  if (next_l == kNothing) return;
  if (*l == kNothing) {
    std::memcpy(o, next_o, padded_dim * sizeof(float));
    *m = next_m;
    *l = next_l;
    return;
  }
  const float m_new = std::max(*m, next_m), shift = finite_shift(m_new);
  alignas(64) float factors[kLanes] = {*m - shift, next_m - shift};
  store(factors, Math::exp2(load(factors)));
  const V a = set1(factors[0]), b = set1(factors[1]);
  for (int64_t h = 0; h < padded_dim; h += kLanes) store(o + h, fma(load(next_o + h), b, mul(load(o + h), a)));
  *l = __builtin_fmaf(next_l, factors[1], *l * factors[0]);
  *m = m_new;
}

// The rows of a few tokens of one sequence that share a K/V head, and what they need of this thread's memory.
template <typename T>
struct Unit {
  using Math = MathOf<T>;
  const Problem<T>& p;
  int64_t s, kv_head, first_token, num_rows;
  T *q, *weights, *room;
  float *o, *m, *l, *alpha, *joined_o, *joined_m, *joined_l, *write_room;
  RowBounds* bounds;

  static int64_t page_floats(const PageStore& store) {
    const int64_t numbers = store.k_size() + store.v_size();
    return sizeof(T) == 4 ? numbers + numbers / 2 : numbers / 2;
  }
  static int64_t floats(const Problem<T>& p) {
    const int64_t rows = p.tokens_per_unit() * p.group, dim = p.store.head_dim, padded = p.store.padded_dim;
    return rows * (2 * padded + dim + kTile + kLanes + 4 + 4) + 3 * dim + kTileBlocks * page_floats(p.store) + 256;
  }

  Unit(const Problem<T>& problem, float* memory, int64_t sequence, int64_t head, int64_t run)
      : p(problem), s(sequence), kv_head(head), first_token(p.starts[s] + run * p.tokens_per_unit()) {
    const int64_t tokens = std::min<int64_t>(p.tokens_per_unit(), p.starts[s + 1] - first_token);
    const int64_t dim = p.store.head_dim, padded = p.store.padded_dim, most = p.tokens_per_unit() * p.group;
    num_rows = tokens * p.group;
    const auto take = [&](int64_t count) {
      float* piece = memory;
      memory += (count + kLanes - 1) / kLanes * kLanes;
      return piece;
    };
    o = take(most * padded);
    joined_o = take(most * padded);
    l = take(most * kLanes);
    room = reinterpret_cast<T*>(take(kTileBlocks * page_floats(p.store)));
    q = reinterpret_cast<T*>(take(most * dim));
    weights = reinterpret_cast<T*>(take(most * kTile));
    m = take(most);
    alpha = take(most);
    joined_m = take(most);
    joined_l = take(most);
    bounds = reinterpret_cast<RowBounds*>(take(most * 4));
    write_room = take(3 * dim);
    for (int64_t r = 0; r < num_rows; ++r) {  // all on their way before the first is needed
      const auto* row = reinterpret_cast<const char*>(p.q + token(r) * p.q_stride + q_head(r) * dim);
      for (int64_t byte = 0; byte < dim * static_cast<int64_t>(sizeof(T)); byte += 64) __builtin_prefetch(row + byte);
    }
    for (int64_t r = 0; r < num_rows; ++r) {
      const int64_t position = p.context(s) + token(r) - p.starts[s];
      bounds[r] = {p.first_key(position), position};
      p.prepare(q + r * dim, p.q + token(r) * p.q_stride + q_head(r) * dim, token(r), p.q_norm);
      joined_l[r] = kNothing;
    }
  }

  int64_t token(int64_t r) const { return first_token + r / p.group; }
  int64_t q_head(int64_t r) const { return kv_head * p.group + r % p.group; }
  int64_t first_range() const { return bounds[0].first / kRange; }
  int64_t last_range() const { return bounds[num_rows - 1].last / kRange; }

  // A chunk of one token brings its own key; longer chunks were written before.
  void write_own_key(int64_t range) const {
    if (p.chunk(s) == 1 && range == last_range()) p.write(s, first_token, kv_head, write_room);
  }

  void load_tile(KeyTile<T>* tile, int64_t first, int64_t last) const {
    tile->first = first;
    const int64_t page = page_floats(p.store) * static_cast<int64_t>(sizeof(float) / sizeof(T));
    for (int64_t b = 0; first + b * kBlock <= last && b < kTileBlocks; ++b) {
      const int64_t block = p.block(s, first / kBlock + b);
      const PageOperands<T> operands = page_operands(p.store, block, kv_head, room + b * page);
      tile->k[b] = operands.k;
      tile->v[b] = operands.v;
      if (!tile->is_scaled) continue;
      tile->k_scales[b] = p.store.k_scales + (block * p.store.num_kv + kv_head) * kBlock;
      tile->v_scales[b] = p.store.v_scales + (block * p.store.num_kv + kv_head) * kBlock;
    }
  }

  // Sums over the keys of one range: o, m, and l by lane.
  void attend_range(int64_t range) const {
    const int64_t dim = p.store.head_dim, padded = p.store.padded_dim;
    std::fill(o, o + num_rows * padded, 0.0f);
    std::fill(l, l + num_rows * kLanes, 0.0f);
    std::fill(m, m + num_rows, kMinusInfinity);
    KeyTile<T> tile;
    tile.is_scaled = p.store.k_scales != nullptr;
    tile.head_dim = dim;
    tile.padded_dim = padded;
    const int64_t last = std::min(bounds[num_rows - 1].last, (range + 1) * kRange - 1);
    const RowStates<T> states{q, bounds, o, m, l, alpha, weights};
    for (int64_t key = std::max(bounds[0].first / kTile * kTile, range * kRange); key <= last; key += kTile) {
      load_tile(&tile, key, last);
      const auto each_rows = [&](const auto& body) {
        for (int64_t r = 0; r < num_rows; r += kRows) {
          with_rows(static_cast<int>(std::min<int64_t>(kRows, num_rows - r)),
                    [&](auto count) { body(count, states.from(r, dim, padded)); });
        }
      };
      each_rows([&](auto count, const RowStates<T>& rows) { weigh_rows<T, decltype(count)::value>(tile, rows, p.c); });
      each_rows([&](auto count, const RowStates<T>& rows) { add_rows<T, decltype(count)::value>(tile, rows); });
    }
  }

  float weight_of(int64_t r, int64_t range) const {
    const bool sees = bounds[r].first < (range + 1) * kRange && bounds[r].last >= range * kRange;
    return sees ? sum_lanes(load(l + r * kLanes)) : kNothing;
  }

  __attribute__((noinline)) void attend_all() {
    const FlushSubnormalsIf<T> flush;
    if (first_range() == last_range()) {  // nothing to join
      attend_range(first_range());
      for (int64_t r = 0; r < num_rows; ++r) joined_l[r] = weight_of(r, first_range());
      joined_o = o;
      joined_m = m;
      return finish();
    }
    for (int64_t range = first_range(); range <= last_range(); ++range) {
      attend_range(range);
      for (int64_t r = 0; r < num_rows; ++r) {
        join_row(r, o + r * p.store.padded_dim, m[r], weight_of(r, range));
      }
    }
    finish();
  }

  // One range alone; its rows' sums go to `part`: (rows, Hp) of values, then maxima, then weights.
  __attribute__((noinline)) void attend_part(int64_t range, float* part) const {
    const FlushSubnormalsIf<T> flush;
    attend_range(range);
    std::memcpy(part, o, num_rows * p.store.padded_dim * sizeof(float));
    part += num_rows * p.store.padded_dim;
    for (int64_t r = 0; r < num_rows; ++r) {
      part[r] = m[r];
      part[num_rows + r] = weight_of(r, range);
    }
  }

  __attribute__((noinline)) void join_parts(const float* parts, int64_t floats_per_part) const {
    const FlushSubnormalsIf<T> flush;
    for (int64_t range = first_range(); range <= last_range(); ++range) {
      const float *part = parts + range * floats_per_part, *maxima = part + num_rows * p.store.padded_dim;
      for (int64_t r = 0; r < num_rows; ++r) {
        join_row(r, part + r * p.store.padded_dim, maxima[r], maxima[num_rows + r]);
      }
    }
    finish();
  }

  void join_row(int64_t r, const float* next_o, float next_m, float next_l) const {
    join<Math>(joined_o + r * p.store.padded_dim, joined_m + r, joined_l + r, next_o, next_m, next_l,
               p.store.padded_dim);
  }

  void finish() const {
    constexpr double kLog2 = 0.693147180559945309;
    for (int64_t r = 0; r < num_rows; ++r) {
      const int64_t at = token(r) * p.num_heads + q_head(r);
      const V sum = set1(joined_l[r]);
      each_vector(p.store.head_dim, [&](int64_t h, int64_t count) {
        store_upto(p.o + at * p.store.head_dim + h, div(load(joined_o + r * p.store.padded_dim + h), sum), count);
      });
      if (!p.lse) continue;
      p.lse[at] = static_cast<float>((static_cast<double>(joined_m[r]) + std::log2(static_cast<double>(joined_l[r]))) *
                                     kLog2);
    }
  }
};

// Where the items of each sequence begin when all sequences' items are numbered through.
struct Numbering {
  const int64_t* starts;  // one more than sequences
  int64_t num_seqs;
  struct Place {
    int64_t s, item, items;
  };
  int64_t total() const { return starts[num_seqs]; }
  Place operator[](int64_t number) const {
    const int64_t s = std::upper_bound(starts, starts + num_seqs + 1, number) - starts - 1;
    return {s, number - starts[s], starts[s + 1] - starts[s]};
  }
};

template <typename Count>
Numbering number(int64_t* starts, int64_t num_seqs, const Count& count) {
  starts[0] = 0;
  for (int64_t s = 0; s < num_seqs; ++s) starts[s + 1] = starts[s] + count(s);
  return {starts, num_seqs};
}

// Keys and values of chunks longer than one token, page by page.
template <typename T>
void write_chunks(const Problem<T>& p, int64_t* starts) {
  const Numbering pages = number(starts, p.num_seqs, [&](int64_t s) {
    const int64_t context = p.context(s), length = p.chunk(s);
    return length > 1 ? (context + length - 1) / kBlock - context / kBlock + 1 : 0;
  });
  parallel(pages.total(), 1, [&](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    float* room = scratch.get(3 * p.store.head_dim);
    for (int64_t number = begin; number < end; ++number) {
      const Numbering::Place place = pages[number];
      const int64_t context = p.context(place.s), start = p.starts[place.s];
      const int64_t page = (context / kBlock + place.item) * kBlock;  // its first position
      const int64_t first = start + std::max<int64_t>(0, page - context);
      const int64_t last = std::min<int64_t>(p.starts[place.s + 1], start + page + kBlock - context);
      for (int64_t token = first; token < last; ++token) {
        for (int64_t head = 0; head < p.store.num_kv; ++head) p.write(place.s, token, head, room);
      }
    }
  });
}

template <typename T>
void attend_chunks(const Problem<T>& p, int64_t* starts, Scratch* parts_memory) {
  const int64_t tokens_per_unit = p.tokens_per_unit(), num_kv = p.store.num_kv;
  const auto runs_of = [&](int64_t s) { return (p.chunk(s) + tokens_per_unit - 1) / tokens_per_unit; };
  const auto ranges_of = [&](int64_t s) { return (p.context(s) + p.chunk(s) - 1) / kRange + 1; };
  const Numbering units = number(starts, p.num_seqs, [&](int64_t s) { return runs_of(s) * num_kv; });
  int64_t most_ranges = 1;
  for (int64_t s = 0; s < p.num_seqs; ++s) {
    if (p.chunk(s) > 0) most_ranges = std::max(most_ranges, ranges_of(s));
  }
  const auto with_unit = [&](int64_t number, const auto& body) {
    static thread_local Scratch scratch;
    const Numbering::Place place = units[number];
    const int64_t runs = place.items / num_kv;
    // The last tokens, which see the most keys, first: the threads end together.
    Unit<T> unit(p, scratch.get(Unit<T>::floats(p)), place.s, place.item % num_kv, runs - 1 - place.item / num_kv);
    body(unit);
  };
  if (most_ranges == 1 || units.total() >= 8 * num_threads()) {
    parallel(units.total(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t number = begin; number < end; ++number) {
        with_unit(number, [](Unit<T>& unit) {
          unit.write_own_key(unit.last_range());
          unit.attend_all();
        });
      }
    });
    return;
  }
  const int64_t floats_per_part = tokens_per_unit * p.group * (p.store.padded_dim + 2);
  float* parts = parts_memory->get(units.total() * most_ranges * floats_per_part);
  parallel(units.total() * most_ranges, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      with_unit(item / most_ranges, [&](const Unit<T>& unit) {
        const int64_t range = item % most_ranges;
        if (range < unit.first_range() || range > unit.last_range()) return;
        unit.write_own_key(range);
        unit.attend_part(range, parts + item * floats_per_part);
      });
    }
  });
  parallel(units.total(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t number = begin; number < end; ++number) {
      with_unit(number, [&](const Unit<T>& unit) {
        unit.join_parts(parts + number * most_ranges * floats_per_part, floats_per_part);
      });
    }
  });
}

// A norm's weights in the compute dtype, as norms alone round them.
template <typename T>
const T* rounded(const void* weights, int dtype, int64_t dim, T* out) {
  if (weights == nullptr) return nullptr;
  with_dtype(dtype, [&](auto* e) {
    const auto* in = static_cast<const std::remove_pointer_t<decltype(e)>*>(weights);
    for (int64_t h = 0; h < dim; ++h) put(out + h, to_float(in[h]));
  });
  return out;
}

}  // namespace

void attention(void* o, float* lse, const void* q, const void* k, const void* v, int dtype, int64_t q_stride,
               int64_t kv_stride, void* k_pages, void* v_pages, float* k_scales, float* v_scales, int kv_format,
               const int64_t* positions, const float* cos, const float* sin, const void* q_norm, const void* k_norm,
               int norm_dtype, float eps, const int32_t* tables, int64_t table_stride, const int32_t* starts,
               const int32_t* contexts, int64_t num_tokens, int64_t num_seqs, int64_t num_heads, int64_t num_kv,
               int64_t head_dim, float scale, int64_t window) {
  static thread_local Scratch memory, parts;
  constexpr float kLog2e = 1.44269504f;
  float* room = memory.get(2 * (num_seqs + 1) + 2 * head_dim);
  auto* numbers = reinterpret_cast<int64_t*>(room);
  float* weights = room + 2 * (num_seqs + 1);
  const int64_t padded_dim = (head_dim + kLanes - 1) / kLanes * kLanes;
  with_dtype(dtype, [&](auto* e) {
    using T = std::remove_pointer_t<decltype(e)>;
    T* norms = reinterpret_cast<T*>(weights);
    const Problem<T> problem{static_cast<T*>(o),
                             lse,
                             static_cast<const T*>(q),
                             static_cast<const T*>(k),
                             static_cast<const T*>(v),
                             q_stride,
                             kv_stride,
                             {k_pages, v_pages, k_scales, v_scales, kv_format, num_kv, head_dim, padded_dim},
                             positions,
                             cos,
                             sin,
                             rounded(q_norm, norm_dtype, head_dim, norms),
                             rounded(k_norm, norm_dtype, head_dim, norms + head_dim),
                             eps,
                             tables,
                             table_stride,
                             starts,
                             contexts,
                             num_seqs,
                             num_heads,
                             num_heads / num_kv,
                             scale * kLog2e,
                             window};
    write_chunks(problem, numbers);
    attend_chunks(problem, numbers, &parts);
    // Rows of no sequence, which a step of fixed shape may hold.
    const int64_t used = starts[num_seqs], width = num_heads * head_dim;
    std::memset(problem.o + used * width, 0, (num_tokens - used) * width * sizeof(T));
    if (lse) std::memset(lse + used * num_heads, 0, (num_tokens - used) * num_heads * sizeof(float));
  });
}

}  // namespace LOCKSTEP_ISA
}  // namespace ls
