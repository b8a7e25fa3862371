// Gradient of packed causal attention, probabilities recomputed from the saved log-sum-exp.
//
// One unit is one query head of one sequence; it runs alone and in order, so no sum depends on threads. With
// P = exp(scale q k^T - lse), D = rowsum(dO o): dV = P^T dO; dS = scale P (dO V^T - D); dQ = dS K; dK = dS^T Q. K/V
// gradients of the heads of a group are added in head order. Blocks of 64 x 64, fp32 inside (Dao et al. 2022, alg. 4).
#include "vec.h"

namespace ls {
namespace LOCKSTEP_ISA {
namespace {

constexpr int64_t kSide = 64;
constexpr int kRows = 6;

struct Matrix {
  const float* data;
  int64_t row, column;  // strides
};

template <int MR, int NV>
LS_INLINE void tile(Matrix a, const float* b, int64_t ldb, int64_t k, float* c, int64_t ldc, bool accumulate) {
  V acc[MR][NV];
  for (int r = 0; r < MR; ++r) {
    for (int v = 0; v < NV; ++v) acc[r][v] = accumulate ? load(c + r * ldc + v * kLanes) : zero();
  }
  for (int64_t i = 0; i < k; ++i) {
    V bv[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) bv[v] = load(b + i * ldb + v * kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < MR; ++r) {
      const V av = set1(a.data[r * a.row + i * a.column]);
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) acc[r][v] = fma(av, bv[v], acc[r][v]);
    }
  }
  for (int r = 0; r < MR; ++r) {
    for (int v = 0; v < NV; ++v) store(c + r * ldc + v * kLanes, acc[r][v]);
  }
}

template <int MR>
void strip(Matrix a, const float* b, int64_t ldb, int64_t n, int64_t k, float* c, int64_t ldc, bool accumulate) {
  int64_t column = 0;
  for (; kColumnVectors > 1 && column + kColumnVectors * kLanes <= n; column += kColumnVectors * kLanes) {
    tile<MR, kColumnVectors>(a, b + column, ldb, k, c + column, ldc, accumulate);
  }
  for (; column < n; column += kLanes) tile<MR, 1>(a, b + column, ldb, k, c + column, ldc, accumulate);
}

// c (m x n) = or += a (m x k) b (k x n); n a multiple of 16.
void product(Matrix a, const float* b, int64_t ldb, int64_t m, int64_t n, int64_t k, float* c, int64_t ldc,
             bool accumulate) {
  for (int64_t row = 0; row < m; row += kRows) {
    const Matrix part{a.data + row * a.row, a.row, a.column};
    float* out = c + row * ldc;
    switch (std::min<int64_t>(kRows, m - row)) {
      case 1: strip<1>(part, b, ldb, n, k, out, ldc, accumulate); break;
      case 2: strip<2>(part, b, ldb, n, k, out, ldc, accumulate); break;
      case 3: strip<3>(part, b, ldb, n, k, out, ldc, accumulate); break;
      case 4: strip<4>(part, b, ldb, n, k, out, ldc, accumulate); break;
      case 5: strip<5>(part, b, ldb, n, k, out, ldc, accumulate); break;
      default: strip<6>(part, b, ldb, n, k, out, ldc, accumulate); break;
    }
  }
}

// Rows of one head as fp32: out (length x width, zero-padded) and, if asked for, its transpose (dim x stride).
template <typename T>
void unpack(const T* in, int64_t length, int64_t row_stride, int64_t dim, float* out, int64_t width, float* transposed,
            int64_t transposed_stride) {
  for (int64_t i = 0; i < length; ++i) {
    for (int64_t h = 0; h < dim; ++h) out[i * width + h] = to_float(in[i * row_stride + h]);
    for (int64_t h = dim; h < width; ++h) out[i * width + h] = 0.0f;
  }
  if (transposed == nullptr) return;
  for (int64_t h = 0; h < dim; ++h) {
    for (int64_t i = 0; i < length; ++i) transposed[h * transposed_stride + i] = out[i * width + h];
    for (int64_t i = length; i < transposed_stride; ++i) transposed[h * transposed_stride + i] = 0.0f;
  }
}

template <typename T>
struct Problem {
  T *dq, *dk, *dv;
  const T *dout, *q, *k, *v, *o;
  const float* lse;
  int64_t num_heads, num_kv, dim;
  float scale;
  int64_t window;
};

// One query head of tokens [start, start + length). dk_head and dv_head: (length x width) sums of this head alone.
template <typename T>
void one_head(const Problem<T>& p, int64_t start, int64_t length, int64_t head, float* dk_head, float* dv_head,
              float* scratch) {
  const int64_t width = (p.dim + kLanes - 1) / kLanes * kLanes, padded = (length + kSide - 1) / kSide * kSide;
  const int64_t kv_head = head / (p.num_heads / p.num_kv), plane = length * width, turned = p.dim * padded;
  float *q = scratch, *dout = q + plane, *k = dout + plane, *v = k + plane, *dq = v + plane;
  float *k_turned = dq + plane, *v_turned = k_turned + turned, *delta = v_turned + turned, *s = delta + padded;
  float* ds = s + kSide * kSide;
  const int64_t q_stride = p.num_heads * p.dim, kv_stride = p.num_kv * p.dim;
  const int64_t q_at = (start * p.num_heads + head) * p.dim, kv_at = (start * p.num_kv + kv_head) * p.dim;
  unpack(p.q + q_at, length, q_stride, p.dim, q, width, static_cast<float*>(nullptr), 0);
  unpack(p.dout + q_at, length, q_stride, p.dim, dout, width, static_cast<float*>(nullptr), 0);
  unpack(p.k + kv_at, length, kv_stride, p.dim, k, width, k_turned, padded);
  unpack(p.v + kv_at, length, kv_stride, p.dim, v, width, v_turned, padded);
  for (int64_t i = 0; i < length; ++i) {
    V sum = zero();
    for (int64_t h = 0; h < p.dim; h += kLanes) {
      const int64_t count = std::min<int64_t>(kLanes, p.dim - h);
      const T* o = p.o + q_at + i * q_stride + h;
      sum = fma(load(dout + i * width + h), count == kLanes ? load(o) : load_partial(o, count, T(0)), sum);
    }
    delta[i] = sum_lanes(sum);
  }
  std::memset(dq, 0, plane * sizeof(float));
  std::memset(dk_head, 0, plane * sizeof(float));
  std::memset(dv_head, 0, plane * sizeof(float));
  const V scale = set1(p.scale);
  for (int64_t row = 0; row < length; row += kSide) {
    const int64_t rows = std::min(kSide, length - row);
    const int64_t first = p.window > 0 ? std::max<int64_t>(0, row - p.window + 1) / kSide * kSide : 0;
    for (int64_t key = first; key <= row; key += kSide) {
      const int64_t keys = std::min(kSide, length - key);
      product({q + row * width, width, 1}, k_turned + key, padded, rows, kSide, p.dim, s, kSide, false);
      product({dout + row * width, width, 1}, v_turned + key, padded, rows, kSide, p.dim, ds, kSide, false);
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t position = row + r;
        const V shift = set1(p.lse[(start + position) * p.num_heads + head]), d = set1(delta[position]);
        const int64_t begin = p.window > 0 ? std::max<int64_t>(0, position - p.window + 1 - key) : 0;
        const int64_t end = std::min<int64_t>(keys, position + 1 - key);
        float *sr = s + r * kSide, *dsr = ds + r * kSide;
        for (int64_t c = 0; c < kSide; c += kLanes) {
          const V prob = exp(sub(mul(load(sr + c), scale), shift));
          store(sr + c, prob);
          store(dsr + c, mul(mul(prob, scale), sub(load(dsr + c), d)));
        }
        for (int64_t c = 0; c < std::min(begin, kSide); ++c) sr[c] = dsr[c] = 0.0f;
        for (int64_t c = std::max<int64_t>(end, 0); c < kSide; ++c) sr[c] = dsr[c] = 0.0f;
      }
      product({s, 1, kSide}, dout + row * width, width, keys, width, rows, dv_head + key * width, width, true);
      product({ds, 1, kSide}, q + row * width, width, keys, width, rows, dk_head + key * width, width, true);
      product({ds, kSide, 1}, k + key * width, width, rows, width, keys, dq + row * width, width, true);
    }
  }
  for (int64_t i = 0; i < length; ++i) {
    for (int64_t h = 0; h < p.dim; ++h) put(p.dq + q_at + i * q_stride + h, dq[i * width + h]);
  }
}

template <typename T>
void backward_of(const Problem<T>& p, const int32_t* starts, int64_t num_seqs, int64_t num_tokens) {
  const int64_t width = (p.dim + kLanes - 1) / kLanes * kLanes, group = p.num_heads / p.num_kv;
  const int64_t plane = num_tokens * width;  // sums of one query head over all tokens
  auto* sums = static_cast<float*>(std::malloc(std::max<int64_t>(1, 2 * p.num_heads * plane) * sizeof(float)));
  if (sums == nullptr) std::abort();
  float *dk_sums = sums, *dv_sums = sums + p.num_heads * plane;
  parallel(num_seqs * p.num_heads, 1, [&](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t s = unit / p.num_heads, head = unit % p.num_heads;
      const int64_t start = starts[s], length = starts[s + 1] - start;
      const int64_t padded = (length + kSide - 1) / kSide * kSide, at = head * plane + start * width;
      float* room = scratch.get(5 * length * width + 2 * p.dim * padded + padded + 2 * kSide * kSide);
      one_head(p, start, length, head, dk_sums + at, dv_sums + at, room);
    }
  });
  parallel(num_tokens, 8, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      for (int64_t kv = 0; kv < p.num_kv; ++kv) {
        for (int64_t h = 0; h < p.dim; ++h) {
          float dk = 0.0f, dv = 0.0f;
          for (int64_t g = kv * group; g < (kv + 1) * group; ++g) {
            dk += dk_sums[g * plane + token * width + h];
            dv += dv_sums[g * plane + token * width + h];
          }
          put(p.dk + (token * p.num_kv + kv) * p.dim + h, dk);
          put(p.dv + (token * p.num_kv + kv) * p.dim + h, dv);
        }
      }
    }
  });
  std::free(sums);
}

}  // namespace

void attention_backward(void* dq, void* dk, void* dv, const void* dout, const void* q, const void* k, const void* v,
                        const void* o, const float* lse, int dtype, const int32_t* starts, int64_t num_seqs,
                        int64_t num_heads, int64_t num_kv, int64_t head_dim, int64_t num_tokens, float scale,
                        int64_t window) {
  with_dtype(dtype, [&](auto* e) {
    using T = std::remove_pointer_t<decltype(e)>;
    const Problem<T> problem{static_cast<T*>(dq), static_cast<T*>(dk), static_cast<T*>(dv),
                             static_cast<const T*>(dout), static_cast<const T*>(q), static_cast<const T*>(k),
                             static_cast<const T*>(v), static_cast<const T*>(o), lse, num_heads, num_kv, head_dim,
                             scale, window};
    backward_of(problem, starts, num_seqs, num_tokens);
  });
}

}  // namespace LOCKSTEP_ISA
}  // namespace ls
