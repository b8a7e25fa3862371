// C = A B^T with a fixed order of summation, and the packing of B.
//
// B (N x K) lies in panels of 64 columns: fp32 as [panel][k][64], bf16 as [panel][k/2][64][2]; either way 64 32-bit words
// a step, a step being one k (fp32) or two (bf16). Each output has one accumulator that runs over the steps in
// ascending order; where segments = 8 it runs over each of 8 fixed pieces of K, and the pieces are joined by the tree
// ((0+1)+(2+3))+((4+5)+(6+7)). Blocking K for the cache saves and reloads accumulators, which changes no bit.
// Bytes: B once for each block of rows; at one row the product is bound by reading B.
#include "vec.h"

namespace ls {
namespace LOCKSTEP_ISA {
namespace {

constexpr int kPanel = 64;
constexpr int kRows = 6;               // rows of a register tile
constexpr int64_t kStepsInCache = 1024;  // steps of a panel that stay in L2: 256 KiB
constexpr int64_t kRowBytesInCache = 384 * 1024;

struct Operands {
  const char* a;
  int64_t lda_bytes;
  const float* packed;
  int64_t steps;       // of the whole K
  int64_t segment_steps;  // of each segment but the last
  int segments;
  void* c;
  int c_dtype;
  int64_t ldc, n;
  const float* bias;
  bool accumulate;
};

// acc[r][v] += sum over steps of a[r][step] * b[step][16 v ...], r < MR, v < NV.
template <bool kIsBf16, int MR, int NV>
LS_INLINE void multiply(const char* a, int64_t lda_bytes, const float* b, int64_t steps, V (&acc)[MR][NV]) {
  for (int64_t s = 0; s < steps; ++s) {
    V bv[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) bv[v] = load(b + s * kPanel + v * kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < MR; ++r) {
      uint32_t word;
      std::memcpy(&word, a + r * lda_bytes + s * 4, 4);
      const V av = set1_bits(word);
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) acc[r][v] = kIsBf16 ? dot_bf16(acc[r][v], av, bv[v]) : fma(av, bv[v], acc[r][v]);
    }
  }
}

template <typename T>
LS_INLINE void emit(T* c, V value, int64_t columns, bool accumulate) {
  if (columns >= kLanes) {
    store(c, accumulate ? add(load(c), value) : value);
  } else if (columns > 0) {
    store_partial(c, accumulate ? add(load_partial(c, columns, T(0)), value) : value, columns);
  }
}

// Adds the bias and writes a tile of sums, `rows` x 16 `vectors`, to rows `row`.. and columns
// `column`.. of C. Loops rather than unrolled code for each tile shape: the cases of edge, dtype and
// accumulation would be multiplied by every register of every shape, and gcc takes minutes over it.
__attribute__((noinline)) void emit_tile(const Operands& o, int64_t row, int64_t column, const float* sums, int rows,
                                         int vectors) {
  for (int v = 0; v < vectors; ++v) {
    const int64_t first = column + v * kLanes, columns = o.n - first;
    V bias = zero();
    if (o.bias) bias = columns >= kLanes ? load(o.bias + first) : columns > 0 ? load_partial(o.bias + first, columns, 0.0f) : zero();
    for (int r = 0; r < rows; ++r) {
      const V sum = load(sums + (r * vectors + v) * kLanes);
      const V value = o.bias ? add(sum, bias) : sum;
      const int64_t at = (row + r) * o.ldc + first;
      if (o.c_dtype == kBf16) {
        emit(static_cast<bf16*>(o.c) + at, value, columns, o.accumulate);
      } else {
        emit(static_cast<float*>(o.c) + at, value, columns, o.accumulate);
      }
    }
  }
}

template <int MR, int NV>
LS_INLINE void finish(const Operands& o, int64_t row, int64_t column, V (&acc)[MR][NV]) {
  alignas(64) float sums[MR * NV * kLanes];
#pragma GCC unroll 6
  for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) store(sums + (r * NV + v) * kLanes, acc[r][v]);
  }
  emit_tile(o, row, column, sums, MR, NV);
}

// One register tile over the whole of K, when a panel of it fits in cache and there is one segment.
template <bool kIsBf16, int MR, int NV>
void tile_whole(const Operands& o, int64_t row, const float* b, int64_t column) {
  V acc[MR][NV];
  for (auto& line : acc) {
    for (auto& value : line) value = zero();
  }
  multiply<kIsBf16, MR, NV>(o.a + row * o.lda_bytes, o.lda_bytes, b, o.steps, acc);
  finish<MR, NV>(o, row, column, acc);
}

// One register tile over steps [begin, end), continuing from `sums` (MR x 64 floats).
template <bool kIsBf16, int MR, int NV>
void tile_part(const Operands& o, int64_t row, const float* b, int64_t begin, int64_t end, float* sums) {
  V acc[MR][NV];
  for (int r = 0; r < MR; ++r) {
    for (int v = 0; v < NV; ++v) acc[r][v] = load(sums + r * kPanel + v * kLanes);
  }
  multiply<kIsBf16, MR, NV>(o.a + row * o.lda_bytes + begin * 4, o.lda_bytes, b + begin * kPanel, end - begin, acc);
  for (int r = 0; r < MR; ++r) {
    for (int v = 0; v < NV; ++v) store(sums + r * kPanel + v * kLanes, acc[r][v]);
  }
}

template <int MR, int NV>
void tile_finish(const Operands& o, int64_t row, int64_t column, const float* sums) {
  V acc[MR][NV];
  for (int r = 0; r < MR; ++r) {
    for (int v = 0; v < NV; ++v) acc[r][v] = load(sums + r * kPanel + v * kLanes);
  }
  finish<MR, NV>(o, row, column, acc);
}

// Calls f with the number of rows as a constant.
template <typename F>
LS_INLINE void with_rows(int rows, const F& f) {
  switch (rows) {
    case 1: return f(std::integral_constant<int, 1>());
    case 2: return f(std::integral_constant<int, 2>());
    case 3: return f(std::integral_constant<int, 3>());
    case 4: return f(std::integral_constant<int, 4>());
    case 5: return f(std::integral_constant<int, 5>());
    default: return f(std::integral_constant<int, 6>());
  }
}

// Splits rows [begin, end) into tiles of near-equal height and calls f(first row, height).
template <typename F>
LS_INLINE void each_tile(int64_t begin, int64_t end, const F& f) {
  const int64_t rows = end - begin, tiles = (rows + kRows - 1) / kRows;
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t first = begin + rows * i / tiles, last = begin + rows * (i + 1) / tiles;
    f(first, static_cast<int>(last - first));
  }
}

// Rows [row_begin, row_end) by `vectors` x 16 columns from `column` on.
template <bool kIsBf16>
void block(const Operands& o, int64_t row_begin, int64_t row_end, int64_t column, int vectors, float* scratch) {
  const float* panel = o.packed + column / kPanel * kPanel * o.steps + column % kPanel;
  const bool whole = o.segments == 1 && o.steps <= kStepsInCache;
  for (int done = 0; done < vectors; done += kColumnVectors) {
    const float* b = panel + done * kLanes;
    const int64_t first_column = column + done * kLanes;
    const bool full = kColumnVectors > 1 && vectors - done >= kColumnVectors;
    const auto each_width = [&](const auto& f) {
      if (full) return f(std::integral_constant<int, kColumnVectors>());
      for (int v = 0; v < std::min(kColumnVectors, vectors - done); ++v) {
        b = panel + (done + v) * kLanes;
        f(std::integral_constant<int, 1>());
      }
    };
    const auto column_of = [&] { return first_column + (b - (panel + done * kLanes)); };
    if (whole) {
      each_tile(row_begin, row_end, [&](int64_t row, int rows) {
        b = panel + done * kLanes;
        each_width([&](auto nv) {
          with_rows(rows, [&](auto mr) { tile_whole<kIsBf16, mr.value, nv.value>(o, row, b, column_of()); });
        });
      });
      continue;
    }
    each_width([&](auto nv) {
      const int64_t rows_total = row_end - row_begin, plane = rows_total * kPanel;
      float* sums = scratch;
      float* stack = scratch + plane;
      int depth = 0;
      for (int segment = 0; segment < o.segments; ++segment) {
        const int64_t from = std::min(segment * o.segment_steps, o.steps);
        const int64_t to = segment + 1 == o.segments ? o.steps : std::min(from + o.segment_steps, o.steps);
        std::memset(sums, 0, plane * sizeof(float));
        for (int64_t begin = from; begin < to; begin += kStepsInCache) {
          const int64_t end = std::min(begin + kStepsInCache, to);
          each_tile(row_begin, row_end, [&](int64_t row, int rows) {
            with_rows(rows, [&](auto mr) {
              tile_part<kIsBf16, mr.value, nv.value>(o, row, b, begin, end, sums + (row - row_begin) * kPanel);
            });
          });
        }
        if (o.segments == 1) break;
        for (int bits = segment; bits & 1; bits >>= 1) {
          const float* left = stack + --depth * plane;
          for (int64_t i = 0; i < plane; i += kLanes) store(sums + i, add(load(left + i), load(sums + i)));
        }
        std::memcpy(stack + depth++ * plane, sums, plane * sizeof(float));
      }
      each_tile(row_begin, row_end, [&](int64_t row, int rows) {
        with_rows(rows, [&](auto mr) {
          tile_finish<mr.value, nv.value>(o, row, column_of(), sums + (row - row_begin) * kPanel);
        });
      });
    });
  }
}

constexpr int kBand = 32;  // steps packed at a time, so that what is read and what is written stay in L1

// Steps of a panel from a matrix whose columns lie together: in[i * stride + column].
template <typename Dst, typename Src>
void join_steps(Dst* out, const Src* in, int64_t width, int64_t ks, int64_t stride) {
  constexpr int pair = sizeof(Dst) == 2 ? 2 : 1;
  alignas(64) Dst rows[2][kPanel] = {};
  for (int64_t i = 0; i < ks; i += pair) {
    for (int64_t half = 0; half < pair; ++half) {
      const bool is_there = i + half < ks;
      for (int64_t c = 0; c < kPanel; c += kLanes) {
        const Src* at = in + (i + half) * stride + c;
        const int64_t left = is_there ? width - c : 0;
        store(rows[half] + c, left >= kLanes ? load(at) : left > 0 ? load_partial(at, left, Src(0)) : zero());
      }
    }
    auto* words = reinterpret_cast<float*>(out + i * kPanel);
    if (pair == 1) {
      std::memcpy(words, rows[0], kPanel * sizeof(float));
    } else {
      for (int64_t c = 0; c < kPanel; c += kLanes) store(words + c, pair_bf16(load(rows[0] + c), load(rows[1] + c)));
    }
  }
}

// Steps of a panel from a matrix whose rows lie together: in[column * stride + i].
template <typename Dst, typename Src>
void turn_rows(Dst* out, const Src* in, int64_t width, int64_t ks, int64_t stride) {
  constexpr int pair = sizeof(Dst) == 2 ? 2 : 1;
  alignas(64) uint32_t words[kPanel][kBand];
  for (int64_t c = 0; c < width; ++c) {
    auto* line = reinterpret_cast<Dst*>(words[c]);
    const Src* row = in + c * stride;
    int64_t i = 0;
    for (; i + kLanes <= ks; i += kLanes) store(line + i, load(row + i));
    if (i < ks) store(line + i, load_partial(row + i, ks - i, Src(0)));
  }
  auto* to = reinterpret_cast<uint32_t*>(out);
  for (int64_t s = 0; s < (ks + pair - 1) / pair; ++s) {
    for (int64_t c = 0; c < width; ++c) to[s * kPanel + c] = words[c][s];
  }
}

template <typename Dst, typename Src>
void pack_as(Dst* dst, const Src* src, int64_t n, int64_t k, int64_t stride_n, int64_t stride_k) {
  constexpr int pair = sizeof(Dst) == 2 ? 2 : 1;
  const int64_t steps = (k + pair - 1) / pair, panels = (n + kPanel - 1) / kPanel;
  const int64_t bands = (steps + kBand - 1) / kBand;
  parallel(panels * bands, 4, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t panel = unit / bands, first = unit % bands * kBand, last = std::min(first + kBand, steps);
      const int64_t width = std::min<int64_t>(kPanel, n - panel * kPanel);
      Dst* out = dst + (panel * steps + first) * kPanel * pair;
      const Src* in = src + panel * kPanel * stride_n + first * pair * stride_k;
      const int64_t ks = std::min(last * pair, k) - first * pair;
      if (width < kPanel || ks < (last - first) * pair) std::memset(out, 0, (last - first) * kPanel * pair * sizeof(Dst));
      if (stride_n == 1) {
        join_steps(out, in, width, ks, stride_k);
      } else if (stride_k == 1) {
        turn_rows(out, in, width, ks, stride_n);
      } else {
        for (int64_t c = 0; c < width; ++c) {
          for (int64_t i = 0; i < ks; ++i) {
            put(out + (i / pair * kPanel + c) * pair + i % pair, to_float(in[c * stride_n + i * stride_k]));
          }
        }
      }
    }
  });
}

}  // namespace

void pack(void* dst, int dst_dtype, const void* src, int src_dtype, int64_t n, int64_t k, int64_t stride_n,
          int64_t stride_k) {
  with_dtype(dst_dtype, [&](auto* d) {
    with_dtype(src_dtype, [&](auto* s) {
      pack_as(static_cast<decltype(d)>(dst), static_cast<decltype(s)>(const_cast<void*>(src)), n, k, stride_n, stride_k);
    });
  });
}

void gemm(void* c, int c_dtype, const void* a, int dtype, const void* packed, const float* bias, int64_t m, int64_t n,
          int64_t k, int64_t lda, int64_t ldc, int segments, int accumulate) {
  const int pair = dtype == kBf16 ? 2 : 1;
  const int element = dtype == kBf16 ? 2 : 4;
  bf16* padded = nullptr;
  if (k % pair) {  // a pair must not reach into the next row: its garbage times the packed zero could be NaN
    padded = static_cast<bf16*>(std::calloc(m * (k + 1), sizeof(bf16)));
    if (padded == nullptr) std::abort();
    for (int64_t i = 0; i < m; ++i) std::memcpy(padded + i * (k + 1), static_cast<const bf16*>(a) + i * lda, k * 2);
    a = padded;
    lda = k + 1;
  }
  Operands o{static_cast<const char*>(a), lda * element, static_cast<const float*>(packed), (k + pair - 1) / pair, 0,
             segments, c, c_dtype, ldc, n, bias, accumulate != 0};
  o.segment_steps = segments == 1 ? o.steps : (k + 2 * segments - 1) / (2 * segments) * 2 / pair;
  const bool whole = segments == 1 && o.steps <= kStepsInCache;
  int64_t rows = whole ? kRowBytesInCache / (o.steps * 4 + 1) : kRows * 16;
  rows = std::max<int64_t>(kRows * 4, std::min<int64_t>(rows, kRows * 40)) / kRows * kRows;
  const int64_t row_blocks = (m + rows - 1) / rows;
  const int64_t panels = (n + kPanel - 1) / kPanel;
  // Narrow products are cut finer than a panel so that every thread has work.
  const int split = row_blocks * panels < 4 * num_threads() ? 4 : 1;
  const int64_t columns = kPanel / split, strips = (n + columns - 1) / columns;
  const int64_t units = row_blocks * strips;
  const int64_t grain = std::max<int64_t>(1, units / (num_threads() * 8));
  parallel(units, grain, [&](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    float* buffer = whole ? nullptr : scratch.get(5 * rows * kPanel);
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t row = unit / strips * m / row_blocks, row_end = (unit / strips + 1) * m / row_blocks;
      const int64_t column = unit % strips * columns;
      const int vectors = columns / kLanes;
      if (dtype == kBf16) {
        block<true>(o, row, row_end, column, vectors, buffer);
      } else {
        block<false>(o, row, row_end, column, vectors, buffer);
      }
    }
  });
  std::free(padded);
}

}  // namespace LOCKSTEP_ISA
}  // namespace ls
