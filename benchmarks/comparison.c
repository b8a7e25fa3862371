// Kernels for comparison only; nothing of this is in the package. Compiled by compiled.py for this machine.
//
//   read_all     reads a buffer with every thread: what the memory gives
//   free_bf16    y = x B^T with the order of summation free: any number of accumulators along K, K split over threads
//   free_int8    the same for unsigned by signed bytes, sums in int32
//
// B lies in panels of 64 columns, [panel][k / g][64][g] with g elements to 32 bits (2 bf16, 4 bytes), which is the
// layout the contract's kernels read; M, N and K need no edges here (N % 64 == 0, K % (4 g) == 0). What the contract
// forbids and these may do: several accumulators of one output along K (`chains`), and several threads along K
// (`splits`, joined by an addition at the end). The benchmark takes the best combination for each shape.
#include <immintrin.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
enum { kPanel = 64, kLanes = 16, kVectors = 4, kRows = 6 };

static int num_threads = 1;  // not OpenMP's own setting, which torch changes as well

uint64_t read_all(const char* data, int64_t bytes) {
  uint64_t total = 0;
#pragma omp parallel num_threads(num_threads) reduction(^ : total)
  {
    const int64_t lines = bytes / 256, n = omp_get_num_threads(), i = omp_get_thread_num();
    const char* p = data + lines * i / n * 256;
    const char* end = data + lines * (i + 1) / n * 256;
    __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
    for (; p < end; p += 256) {
      a = _mm512_xor_si512(a, _mm512_loadu_si512(p));
      b = _mm512_xor_si512(b, _mm512_loadu_si512(p + 64));
      c = _mm512_xor_si512(c, _mm512_loadu_si512(p + 128));
      d = _mm512_xor_si512(d, _mm512_loadu_si512(p + 192));
    }
    total ^= _mm512_reduce_or_epi64(_mm512_xor_si512(_mm512_xor_si512(a, b), _mm512_xor_si512(c, d)));
  }
  return total;
}

// Sums are held as floats in either kind: gcc 12 spills arrays of __m512i.
INLINE __m512 step(int is_int8, __m512 sum, uint32_t x, const void* b) {
  const __m512i xs = _mm512_set1_epi32((int)x), bs = _mm512_loadu_si512(b);
  if (!is_int8) return _mm512_dpbf16_ps(sum, (__m512bh)xs, (__m512bh)bs);
  return _mm512_castsi512_ps(_mm512_dpbusd_epi32(_mm512_castps_si512(sum), xs, bs));
}

INLINE __m512 join(int is_int8, __m512 a, __m512 b) {
  if (!is_int8) return _mm512_add_ps(a, b);
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
}

// `rows` x (16 `vectors`) outputs over steps [begin, end) of K, in `chains` sums each; written to or added to y.
INLINE void tile(int is_int8, int rows, int vectors, int chains, const uint32_t* x, int64_t ldx, const uint32_t* b,
                 int64_t begin, int64_t end, uint32_t* y, int64_t ldy, int add) {
  __m512 sum[kRows * kVectors];
#pragma GCC unroll 24
  for (int i = 0; i < chains * rows * vectors; ++i) sum[i] = _mm512_setzero_ps();
  for (int64_t s = begin; s < end; s += chains) {
#pragma GCC unroll 4
    for (int c = 0; c < chains; ++c) {
#pragma GCC unroll 6
      for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) {
          const int at = (c * rows + r) * vectors + v;
          const uint32_t word = x[r * ldx + s + c];
          const void* from = b + (s + c) * kPanel + v * kLanes;
          sum[at] = step(is_int8, sum[at], word, from);
        }
      }
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      __m512 total = sum[r * vectors + v];
#pragma GCC unroll 4
      for (int c = 1; c < chains; ++c) total = join(is_int8, total, sum[(c * rows + r) * vectors + v]);
      uint32_t* to = y + r * ldy + v * kLanes;
      if (add) total = join(is_int8, total, _mm512_loadu_ps(to));
      _mm512_storeu_ps(to, total);
    }
  }
}

typedef void (*Tile)(const uint32_t*, int64_t, const uint32_t*, int64_t, int64_t, uint32_t*, int64_t, int);

#define TILE(type, is_int8, rows, chains)                                                                        \
  static void tile_##type##_##rows##_##chains(const uint32_t* x, int64_t ldx, const uint32_t* b, int64_t begin, \
                                              int64_t end, uint32_t* y, int64_t ldy, int add) {                 \
    tile(is_int8, rows, kVectors, chains, x, ldx, b, begin, end, y, ldy, add);                                  \
  }
#define TILES(type, is_int8)                                                                               \
  TILE(type, is_int8, 1, 1) TILE(type, is_int8, 2, 1) TILE(type, is_int8, 3, 1) TILE(type, is_int8, 4, 1)  \
  TILE(type, is_int8, 5, 1) TILE(type, is_int8, 6, 1) TILE(type, is_int8, 1, 4) TILE(type, is_int8, 2, 2) \
  TILE(type, is_int8, 1, 2) TILE(type, is_int8, 3, 2)
#define TABLE(type)                                                                                             \
  {{tile_##type##_1_1, tile_##type##_2_1, tile_##type##_3_1, tile_##type##_4_1, tile_##type##_5_1,              \
    tile_##type##_6_1},                                                                                         \
   {tile_##type##_1_2, tile_##type##_2_2, tile_##type##_3_2, tile_##type##_4_1, tile_##type##_5_1,              \
    tile_##type##_6_1},                                                                                         \
   {tile_##type##_1_4, tile_##type##_2_2, tile_##type##_3_2, tile_##type##_4_1, tile_##type##_5_1,              \
    tile_##type##_6_1}}

TILES(bf16, 0)
TILES(int8, 1)
static const Tile kTiles[2][3][kRows] = {TABLE(bf16), TABLE(int8)};

// All of C. Rows are cut into blocks of `row_block`, K into blocks of `k_block` steps (the innermost stay in cache) and
// into `splits` parts that different threads sum into buffers of their own.
static void multiply(int is_int8, const uint32_t* x, const uint32_t* b, uint32_t* y, int64_t m, int64_t n, int64_t steps,
                     int chains, int splits, int64_t row_block, int64_t k_block, uint32_t* partial) {
  const Tile* tiles = kTiles[is_int8][chains == 4 ? 2 : chains - 1];
  const int64_t panels = n / kPanel, row_blocks = (m + row_block - 1) / row_block;
  const int64_t units = row_blocks * panels * splits;
#pragma omp parallel num_threads(num_threads)
  {
#pragma omp for schedule(dynamic, 1)
    for (int64_t unit = 0; unit < units; ++unit) {
      const int64_t split = unit % splits, panel = unit / splits % panels, rows_at = unit / splits / panels;
      const int64_t first = rows_at * m / row_blocks, last = (rows_at + 1) * m / row_blocks;
      const int64_t quads = steps / 4, from = quads * split / splits * 4, to = quads * (split + 1) / splits * 4;
      uint32_t* out = (split ? partial + (split - 1) * m * n : y) + panel * kPanel;
      for (int64_t begin = from; begin < to; begin += k_block) {
        const int64_t end = begin + k_block < to ? begin + k_block : to;
        const int64_t count = (last - first + kRows - 1) / kRows;
        for (int64_t i = 0; i < count; ++i) {
          const int64_t row = first + (last - first) * i / count, next = first + (last - first) * (i + 1) / count;
          tiles[next - row - 1](x + row * steps, steps, b + panel * steps * kPanel, begin, end, out + row * n, n,
                                begin > from);
        }
      }
    }
    for (int split = 1; split < splits; ++split) {
#pragma omp for schedule(static)
      for (int64_t i = 0; i < m * n / kLanes; ++i) {
        uint32_t* to = y + i * kLanes;
        const void* more = partial + (split - 1) * m * n + i * kLanes;
        _mm512_storeu_ps(to, join(is_int8, _mm512_loadu_ps(to), _mm512_loadu_ps(more)));
      }
    }
  }
}

// `count` products of the same x (M, K) with the matrices in `b`, into the same y (M, N); both dense. `partial` has room
// for (splits - 1) M N sums. `chains` is 1, 2 or 4; K is a multiple of 32.
void free_bf16(const void* x, const void* const* b, int64_t count, void* y, int64_t m, int64_t n, int64_t k,
               int64_t chains, int64_t splits, int64_t row_block, int64_t k_block, void* partial) {
  for (int64_t i = 0; i < count; ++i) multiply(0, x, b[i], y, m, n, k / 2, chains, splits, row_block, k_block, partial);
}

void free_int8(const void* x, const void* const* b, int64_t count, void* y, int64_t m, int64_t n, int64_t k,
               int64_t chains, int64_t splits, int64_t row_block, int64_t k_block, void* partial) {
  for (int64_t i = 0; i < count; ++i) multiply(1, x, b[i], y, m, n, k / 4, chains, splits, row_block, k_block, partial);
}

void set_threads(int count) { num_threads = count; }
