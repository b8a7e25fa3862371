// y = epilogue(norm?(x) W^T + b) with a fixed order of summation, for weights of every format, M from 1 to thousands.
//
// A unit of work is a panel of 64 columns (or half of one) and a block of rows. At few rows each thread prepares all of
// them for itself (norm, quantisation: no barrier) and reads one long run of panels, the weights once; only the last
// panels are shared out. At many rows they are prepared once and a panel stays in cache for all their tiles. Sums
// between tiles lie in memory, so blocking changes no bit. Bytes: the packed weight once for each block of rows.
#include <atomic>

#include "gemm.h"
#include "rows.h"

namespace ls {
namespace LOCKSTEP_ISA {
namespace {

constexpr int kHalf = 32;               // columns of half a panel: the finest unit
constexpr int64_t kFewRows = 64;        // up to here weights are streamed, not kept
constexpr int64_t kRowsTogether = 96;   // rows that share a chunk of a panel too long for the cache
constexpr int64_t kRowBytesInCache = 384 * 1024;
constexpr int64_t kPanelBytesInCache = 256 * 1024;
constexpr int64_t kChunkBytes = 8 * 1024;  // of a panel, so that it stays in L1 for the tiles of a few rows
constexpr int64_t kPreparedByEach = 16 * 1024;  // elements that each thread prepares for itself

enum Epilogue : int { kStore = 0, kAccumulate = 1, kResidual = 2, kSiluMul = 3 };

struct Product {
  void* y;
  int y_dtype;
  int64_t ldy;
  const char* x;
  int dtype;
  int64_t x_stride;  // bytes
  const void* norm_weight;
  float eps;
  const char* packed;
  Format format;
  const float* bias;
  const void* residual;
  int64_t ld_residual;
  int64_t m, n, k;
  int segments, epilogue;

  // Derived. A step is a row of 64 words of a float panel, or a block of a quantised one.
  QuantLayout quant;
  QuantRows quant_rows;
  int64_t columns;  // of the packed weight
  int64_t steps, segment_steps, step_bytes, panel_bytes;
  int64_t row_stride;  // of a prepared row, bytes
  bool prepares, prefetches, takes_nibbles;
  int64_t rows_together, tile_rows, chunk_steps;

  int pair() const { return dtype == kBf16 ? 2 : 1; }
  int element() const { return dtype == kBf16 ? 2 : 4; }
  int64_t float_steps_of_block() const { return kBlock / pair(); }
};

// What a thread keeps between calls.
struct Buffers {
  Scratch rows, normed, sums, unpacked;
};
Buffers& buffers() {
  static thread_local Buffers instance;
  return instance;
}

template <typename T>
void prepare_row(const Product& p, int64_t row, char* out) {
  const T* x = reinterpret_cast<const T*>(p.x + row * p.x_stride);
  if (!p.format.int_activations) {
    T* floats = reinterpret_cast<T*>(out);
    if (p.norm_weight) {
      normalise(floats, x, static_cast<const T*>(p.norm_weight), p.k, p.eps);
    } else {
      std::memcpy(floats, x, p.k * sizeof(T));
    }
    std::memset(floats + p.k, 0, p.row_stride - p.k * sizeof(T));
    return;
  }
  if (p.norm_weight) {
    T* normed = reinterpret_cast<T*>(buffers().normed.get(p.k));
    normalise(normed, x, static_cast<const T*>(p.norm_weight), p.k, p.eps);
    x = normed;
  }
  const QuantRows& to = p.quant_rows;
  auto* q = reinterpret_cast<int8_t*>(out);
  quantise_row(x, p.dtype, p.k, q, reinterpret_cast<float*>(out + to.scales_at));
  auto* starts = reinterpret_cast<int32_t*>(out + to.starts_at);
  auto* sums = reinterpret_cast<float*>(out + to.sums_at);
  const int pieces = p.quant.pieces, quads = kLanes / pieces;
  const V ones = set1_bits(0x01010101);
  for (int64_t block = 0; block < p.quant.blocks; ++block) {
    int32_t of_quads[kLanes];
    store_words(of_quads, dot_bytes(zero(), ones, load_words(q + block * kBlock)));
    for (int piece = 0; piece < pieces; ++piece) {
      int32_t sum = 0;
      for (int i = 0; i < quads; ++i) sum += of_quads[piece * quads + i];
      starts[block * pieces + piece] = p.format.shift == Shift::kOffset ? -p.format.offset * sum : 0;
      sums[block * pieces + piece] = static_cast<float>(sum);
    }
  }
}

void prepare_rows(const Product& p, int64_t begin, int64_t end, char* out) {
  for (int64_t row = begin; row < end; ++row) {
    with_dtype(p.dtype, [&](auto* e) {
      prepare_row<std::remove_pointer_t<decltype(e)>>(p, row, out + row * p.row_stride);
    });
  }
}

// The rows as tiles read them.
struct Rows {
  const char* data;
  int64_t stride;
};

// Splits `rows` rows into tiles of near-equal height and calls f(first row, height).
template <typename F>
LS_INLINE void each_tile(int64_t rows, int64_t height, const F& f) {
  const int64_t tiles = (rows + height - 1) / height;
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t first = rows * i / tiles, last = rows * (i + 1) / tiles;
    f(first, static_cast<int>(last - first));
  }
}

// The weights of one unit: a panel, or half of one.
struct Strip {
  const char* panel;
  int first_vector, vectors;
  Unpacked whole;  // all blocks, where they were unpacked at once
};

Unpacked unpack_strip(const Product& p, const char* panel, int64_t begin, int64_t end) {
  float* buffer = buffers().unpacked.get((end - begin) * unpacked_floats(p.format, p.quant));
  return unpack(p.format, p.quant, panel, begin, end, p.dtype == kBf16, buffer);
}

Unpacked advance(const Unpacked& from, int64_t blocks, int pieces) {
  const int64_t floats = blocks * pieces * kPanel;
  return {from.values + blocks * from.value_stride, from.value_stride, from.scales ? from.scales + floats : nullptr,
          from.shifts ? from.shifts + floats : nullptr};
}

// sums += scale * tile, and minimum * (sum of the row's activations), one piece of a block at a time.
void add_pieces(const Product& p, const char* a, int64_t a_stride, int rows, const Unpacked& w, int64_t blocks,
                const Strip& strip, float* sums) {
  const int pieces = p.quant.pieces;
  const int64_t piece_steps = p.float_steps_of_block() / pieces;
  const FloatTile tile = float_tile(p.dtype == kBf16, rows, strip.vectors);
  alignas(64) float part[kRows * kPanel];
  for (int64_t i = 0; i < blocks * pieces; ++i) {
    const char* at = a + i * piece_steps * 4;
    const auto* b = reinterpret_cast<const float*>(w.values + i / pieces * w.value_stride) +
                    i % pieces * piece_steps * kPanel + strip.first_vector * kLanes;
    std::memset(part, 0, rows * kPanel * sizeof(float));
    tile(at, a_stride, b, piece_steps, part);
    for (int r = 0; r < rows; ++r) {
      V of_row = zero();
      if (w.shifts) {
        V lanes = zero();
        with_dtype(p.dtype, [&](auto* e) {
          const auto* floats = reinterpret_cast<decltype(e)>(const_cast<char*>(at + r * a_stride));
          for (int64_t j = 0; j < kBlock / pieces; j += kLanes) lanes = add(lanes, load(floats + j));
        });
        of_row = set1(sum_lanes(lanes));
      }
      for (int v = 0; v < strip.vectors; ++v) {
        const int64_t column = (strip.first_vector + v) * kLanes;
        float* to = sums + r * kPanel + v * kLanes;
        V sum = fma(load(w.scales + i * kPanel + column), load(part + r * kPanel + v * kLanes), load(to));
        if (w.shifts) sum = fma(load(w.shifts + i * kPanel + column), of_row, sum);
        store(to, sum);
      }
    }
  }
}

// Asks for part `i` of `parts` of the chunk that comes next, so that memory is read while tiles compute.
LS_INLINE void prefetch_part(const char* next, int64_t bytes, int64_t i, int64_t parts) {
  for (int64_t at = bytes * i / parts / 64 * 64; at < bytes * (i + 1) / parts; at += 64) __builtin_prefetch(next + at, 0, 2);
}

// sums (rows x 64) += rows * the strip, over steps [begin, end).
void multiply(const Product& p, const Rows& rows, int64_t first_row, int64_t num_rows, const Strip& strip,
              int64_t begin, int64_t end, float* sums) {
  const char* a = rows.data + first_row * rows.stride;
  const int64_t packed_step = p.format.is_float() ? p.step_bytes : p.quant.record_bytes;
  const int64_t tiles = (num_rows + p.tile_rows - 1) / p.tile_rows, ahead = p.prefetches ? (end - begin) * packed_step : 0;
  const char* next = strip.panel + end * packed_step;
  int64_t tile = 0;
  if (p.format.is_float()) {
    const float* b = reinterpret_cast<const float*>(strip.panel) + begin * kPanel + strip.first_vector * kLanes;
    each_tile(num_rows, p.tile_rows, [&](int64_t row, int height) {
      prefetch_part(next, ahead, tile++, tiles);
      float_tile(p.dtype == kBf16, height, strip.vectors)(a + row * rows.stride + begin * 4, rows.stride, b,
                                                          end - begin, sums + row * kPanel);
    });
    return;
  }
  if (p.takes_nibbles) {
    each_tile(num_rows, p.tile_rows, [&](int64_t row, int height) {
      prefetch_part(next, ahead, tile++, tiles);
      nibble_tile({a + row * rows.stride, &p.quant_rows, begin, end - begin, &p.format, &p.quant,
                   strip.panel + begin * p.quant.record_bytes, strip.first_vector, sums + row * kPanel},
                  height, strip.vectors);
    });
    return;
  }
  const Unpacked w = strip.whole.values ? advance(strip.whole, begin, p.quant.pieces)
                                        : unpack_strip(p, strip.panel, begin, end);
  const int64_t first_column = strip.first_vector * kLanes;
  each_tile(num_rows, p.tile_rows, [&](int64_t row, int height) {
    prefetch_part(next, ahead, tile++, tiles);
    const char* at = a + row * rows.stride;
    float* to = sums + row * kPanel;
    if (p.format.int_activations) {
      Unpacked of_strip = w;
      of_strip.values += first_column * 4;
      if (w.scales) of_strip.scales += first_column;
      if (w.shifts) of_strip.shifts += first_column;
      quant_tile(height, strip.vectors)({at, &p.quant_rows, begin, end - begin, p.quant.pieces,
                                         p.format.shift == Shift::kZeroPoint, of_strip, to});
      return;
    }
    at += begin * p.float_steps_of_block() * 4;
    if (w.scales) return add_pieces(p, at, rows.stride, height, w, end - begin, strip, to);
    for (int64_t i = 0; i < end - begin; ++i) {
      float_tile(p.dtype == kBf16, height, strip.vectors)(
          at + i * p.float_steps_of_block() * 4, rows.stride,
          reinterpret_cast<const float*>(w.values + i * w.value_stride) + first_column, p.float_steps_of_block(), to);
    }
  });
}

template <typename T>
LS_INLINE V rounded(V v) {
  if constexpr (std::is_same_v<T, float>) return v;
  T lanes[kLanes];
  store(lanes, v);
  return load(lanes);
}

// Finishes rows of sums (64 apart) and writes them: channel scales, bias, epilogue.
template <typename T>
void emit(const Product& p, int64_t row, int64_t num_rows, int64_t column, const Strip& strip, float* sums) {
  const bool gated = p.epilogue == kSiluMul;
  const auto* channel = p.format.scales == Scales::kChannel
                            ? reinterpret_cast<const float*>(strip.panel + p.quant.blocks * p.quant.record_bytes)
                            : nullptr;
  const auto sum_of = [&](int64_t r, int v) {
    V sum = load(sums + r * kPanel + v * kLanes);
    if (channel) sum = mul(load(channel + (strip.first_vector + v) * kLanes), sum);
    if (p.bias) sum = add(sum, load_upto(p.bias + column + v * kLanes, std::min<int64_t>(kLanes, p.columns - column - v * kLanes)));
    return sum;
  };
  for (int v = 0; v < strip.vectors; v += gated ? 2 : 1) {
    const int64_t first = gated ? (column + v * kLanes) / 2 : column + v * kLanes;
    const int64_t count = std::min<int64_t>(kLanes, p.n - first);
    if (count <= 0) return;
    for (int64_t r = 0; r < num_rows; ++r) {
      T* y = static_cast<T*>(p.y) + (row + r) * p.ldy + first;
      V value = sum_of(r, v);
      if (gated) {
        value = silu_times(rounded<T>(value), rounded<T>(sum_of(r, v + 1)));
      } else if (p.epilogue == kResidual) {
        const T* residual = static_cast<const T*>(p.residual) + (row + r) * p.ld_residual + first;
        value = add(rounded<T>(value), load_upto(residual, count));
      } else if (p.epilogue == kAccumulate) {
        value = add(load_upto(y, count), value);
      }
      store_upto(y, value, count);
    }
  }
}

// Rows [row_begin, row_end) by `vectors` x 16 columns from `column` on.
void run_unit(const Product& p, const Rows& rows, int64_t row_begin, int64_t row_end, int64_t column, int vectors) {
  Strip strip{p.packed + column / kPanel * p.panel_bytes, static_cast<int>(column % kPanel / kLanes), vectors, {}};
  if (!p.format.is_float() && p.m > kFewRows && p.steps * kPanel * kBlock <= kPanelBytesInCache) {
    strip.whole = unpack_strip(p, strip.panel, 0, p.steps);
  }
  const int64_t plane = p.rows_together * kPanel;
  float* sums = buffers().sums.get(5 * plane);
  float* stack = sums + plane;
  for (int64_t row = row_begin; row < row_end; row += p.rows_together) {
    const int64_t num_rows = std::min(p.rows_together, row_end - row), floats = num_rows * kPanel;
    int depth = 0;
    for (int segment = 0; segment < p.segments; ++segment) {
      const int64_t from = std::min(segment * p.segment_steps, p.steps);
      const int64_t to = segment + 1 == p.segments ? p.steps : std::min(from + p.segment_steps, p.steps);
      std::memset(sums, 0, floats * sizeof(float));
      const int64_t chunks = (to - from + p.chunk_steps - 1) / p.chunk_steps;
      for (int64_t i = 0; i < chunks; ++i) {
        const int64_t begin = from + (to - from) * i / chunks, end = from + (to - from) * (i + 1) / chunks;
        multiply(p, rows, row, num_rows, strip, begin, end, sums);
      }
      if (p.segments == 1) break;
      for (int bits = segment; bits & 1; bits >>= 1) {
        const float* left = stack + --depth * plane;
        for (int64_t i = 0; i < floats; i += kLanes) store(sums + i, add(load(left + i), load(sums + i)));
      }
      if (segment + 1 < p.segments) std::memcpy(stack + depth++ * plane, sums, floats * sizeof(float));
    }
    with_dtype(p.y_dtype, [&](auto* e) {
      emit<std::remove_pointer_t<decltype(e)>>(p, row, num_rows, column, strip, sums);
    });
  }
}

// Runs work(start(), begin, end) on [0, units): each thread a long run of whole panels, and what is left in small steps
// to whoever is free. `at_once`: all of it is cut among the threads, for less work than handing out would cost.
template <typename Start, typename Work>
void share(int64_t units, bool at_once, const Start& start, const Work& work) {
  const int64_t threads = num_threads(), grain = units < 32 * threads ? 1 : 2, panels = 2 * threads;
  const int64_t own = at_once || threads == 1 ? units : (units - units / 8) / panels * panels;
  std::atomic<int64_t> next{own};
  parallel(threads, 1, [&](int64_t begin, int64_t end) {
    const auto started = start();
    work(started, own * begin / threads, own * end / threads);
    for (int64_t unit; (unit = next.fetch_add(grain)) < units;) work(started, unit, std::min(unit + grain, units));
  });
}

void plan(Product& p) {
  const bool is_float = p.format.is_float();
  p.columns = p.epilogue == kSiluMul ? (p.n + kLanes - 1) / kLanes * 2 * kLanes : p.n;
  if (is_float) {
    p.steps = (p.k + p.pair() - 1) / p.pair();
    p.segment_steps = p.segments == 1 ? p.steps : (p.k + 2 * p.segments - 1) / (2 * p.segments) * 2 / p.pair();
    p.step_bytes = kPanel * 4;
    p.panel_bytes = p.steps * p.step_bytes;
  } else {
    p.steps = p.quant.blocks;
    p.segment_steps = (p.steps + p.segments - 1) / p.segments;
    p.step_bytes = kPanel * kBlock;
    p.panel_bytes = p.quant.panel_bytes;
  }
  const int64_t padded = is_float ? p.steps * p.pair() : p.steps * kBlock;
  const bool collides = p.m > kRows && p.x_stride != apart(p.x_stride);
  p.prepares = p.norm_weight || p.format.int_activations || padded != p.k || collides;
  p.row_stride = p.format.int_activations ? p.quant_rows.stride : apart((padded * p.element() + 63) / 64 * 64);
  const bool fits = p.steps * p.step_bytes <= kPanelBytesInCache;
  p.takes_nibbles = p.m <= kNibbleRows && p.format.values == Values::kU4 && p.format.int_activations;
  // Three rows take all 64 columns at once: cold weights are then read in one pass.
  p.tile_rows = p.format.int_activations && p.m <= (p.format.is_grouped() ? 4 : kFewRows) ? 3 : kRows;
  if (p.m <= kFewRows) {
    p.rows_together = p.m;
    const bool streams = p.m <= kRows && (is_float || p.takes_nibbles ||
                                          (p.format.values == Values::kU8 && p.format.int_activations));
    p.chunk_steps = streams ? p.steps : std::max<int64_t>(1, (is_float && p.m <= 32 ? 1 : 2) * kChunkBytes / p.step_bytes);
    p.prefetches = !streams;
  } else {
    p.rows_together = fits ? kRows : kRowsTogether;
    p.chunk_steps = std::max<int64_t>(1, kPanelBytesInCache / p.step_bytes);
  }
}

}  // namespace

void gemm(void* y, int y_dtype, int64_t ldy, const void* x, int dtype, int64_t ldx, const void* norm_weight, float eps,
          const void* packed, int64_t format, const float* bias, const void* residual, int64_t ld_residual, int64_t m,
          int64_t n, int64_t k, int segments, int epilogue) {
  const Format decoded = Format::of(format);
  const QuantLayout quant(decoded, k);
  Product p{y, y_dtype, ldy, static_cast<const char*>(x), dtype, ldx * (dtype == kBf16 ? 2 : 4), norm_weight, eps,
            static_cast<const char*>(packed), decoded, bias, residual, ld_residual, m, n, k, segments, epilogue,
            quant, QuantRows(quant.blocks, quant.pieces), 0, 0, 0, 0, 0, 0, false, false, false, 0, 0, 0};
  if (m == 0 || n == 0) return;
  plan(p);
  const bool each_prepares = m * k <= kPreparedByEach;
  Rows rows{p.x, p.x_stride};
  if (p.prepares && !each_prepares) {
    auto* prepared = reinterpret_cast<char*>(buffers().rows.get(m * p.row_stride / 4));
    parallel(m, std::max<int64_t>(1, kPreparedByEach / k),
             [&](int64_t begin, int64_t end) { prepare_rows(p, begin, end, prepared); });
    rows = {prepared, p.row_stride};
  }
  int64_t block = kRowBytesInCache / p.row_stride / kRows * kRows;
  block = std::max<int64_t>(kRows * 4, std::min<int64_t>(block, kRows * 40));
  const int64_t row_blocks = (m + block - 1) / block;
  const int64_t halves = (p.columns + kHalf - 1) / kHalf;
  const int64_t units = row_blocks * halves;
  const auto start = [&] {
    if (!p.prepares || !each_prepares) return rows;
    auto* prepared = reinterpret_cast<char*>(buffers().rows.get(m * p.row_stride / 4));
    prepare_rows(p, 0, m, prepared);
    return Rows{prepared, p.row_stride};
  };
  share(units, m <= kRows && units < 32 * num_threads(), start, [&](const Rows& mine, int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end;) {
      const int64_t row = unit / halves * m / row_blocks, row_end = (unit / halves + 1) * m / row_blocks;
      const int64_t half = unit % halves;
      const bool whole = half % 2 == 0 && half + 1 < halves && unit + 1 < end;
      run_unit(p, mine, row, row_end, half * kHalf, whole ? 4 : 2);
      unit += whole ? 2 : 1;
    }
  });
}

}  // namespace LOCKSTEP_ISA
}  // namespace ls
