// Ops that work on one row or one element at a time: norms, rope, gated activation, embedding, column sums.
//
// All compute in fp32 and round once. A tail of fewer than 16 elements goes through the same vector code, padded.
#include "rows.h"

namespace ls {
namespace LOCKSTEP_ISA {
namespace {

constexpr int64_t kElementsPerPiece = 16 * 1024;  // enough work to be worth handing over

int64_t rows_per_piece(int64_t d) { return std::max<int64_t>(1, kElementsPerPiece / std::max<int64_t>(d, 1)); }

template <typename T, typename W>
void rms_norm_rows(T* y, const T* x, const W* w, int64_t t, int64_t d, float eps) {
  parallel(t, rows_per_piece(d), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* in = x + row * d;
      T* out = y + row * d;
      normalise(out, in, w, d, eps);
    }
  });
}

template <typename T, typename W>
void rms_norm_backward_rows(T* dx, float* dw, const T* dy, const T* x, const W* w, const T* added, int64_t t, int64_t d,
                            float eps) {
  auto* scales = static_cast<float*>(std::malloc(std::max<int64_t>(t, 1) * sizeof(float)));
  if (scales == nullptr) std::abort();
  parallel(t, rows_per_piece(d), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T *in = x + row * d, *grad = dy + row * d;
      T* out = dx + row * d;
      scales[row] = normalise_backward(out, grad, in, w, d, eps, added ? added + row * d : nullptr);
    }
  });
  if (dw == nullptr) return std::free(scales);
  // Each thread owns 16 columns or more and sums them down the rows, so the order does not depend on threads.
  parallel((d + kLanes - 1) / kLanes, 1, [&](int64_t begin, int64_t end) {
    for (int64_t v = begin; v < end; ++v) {
      const int64_t i = v * kLanes, count = std::min<int64_t>(kLanes, d - i);
      V sum = zero();
      for (int64_t row = 0; row < t; ++row) {
        const V xr = mul(load_upto(x + row * d + i, count), set1(scales[row]));
        sum = fma(load_upto(dy + row * d + i, count), xr, sum);
      }
      store_upto(dw + i, sum, count);
    }
  });
  std::free(scales);
}

template <typename T>
void rope_rows(T* y, const T* x, const int64_t* positions, const float* cos, const float* sin, int64_t t, int64_t n,
               int64_t h, int64_t stride_t, bool inverse) {
  const int64_t half = h / 2;
  const V sign = set1(inverse ? -1.0f : 1.0f);
  parallel(t, rows_per_piece(n * h), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float *c = cos + positions[row] * half, *s = sin + positions[row] * half;
      for (int64_t head = 0; head < n; ++head) {
        const T* in = x + row * stride_t + head * h;
        T* out = y + (row * n + head) * h;
        rotate(out, in, c, s, half, sign);
      }
    }
  });
}

template <typename T>
void silu_mul_elements(T* y, const T* gate, const T* up, int64_t count) {
  parallel((count + kLanes - 1) / kLanes, kElementsPerPiece / kLanes / 4, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kLanes, last = std::min(end * kLanes, count);
    each_vector(last - first, [&](int64_t i, int64_t n) {
      const V g = load_upto(gate + first + i, n);
      store_upto(y + first + i, silu_times(g, load_upto(up + first + i, n)), n);
    });
  });
}

template <typename T>
void silu_mul_backward_rows(T* dgate, T* dup, T* y, const T* dy, const T* gate, const T* up, int64_t rows,
                            int64_t width, int64_t stride) {
  parallel(rows, rows_per_piece(4 * width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t from = row * width, to = row * stride;
      each_vector(width, [&](int64_t i, int64_t n) {
        const V g = load_upto(gate + from + i, n), u = load_upto(up + from + i, n), d = load_upto(dy + from + i, n);
        const V s = sigmoid(g), silu = mul(g, s), slope = fma(g, sub(set1(1.0f), s), set1(1.0f));
        store_upto(dgate + to + i, mul(mul(d, u), mul(s, slope)), n);
        store_upto(dup + to + i, mul(d, silu), n);
        if (y) store_upto(y + from + i, mul(silu, u), n);
      });
    }
  });
}

template <typename T, typename W>
void embedding_rows(T* y, const W* w, const int64_t* tokens, int64_t t, int64_t d) {
  parallel(t, rows_per_piece(d), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      each_vector(d, [&](int64_t i, int64_t count) {
        store_upto(y + row * d + i, load_upto(w + tokens[row] * d + i, count), count);
      });
    }
  });
}

template <typename T>
void embedding_backward_columns(float* dw, const T* dy, const int64_t* tokens, int64_t t, int64_t d) {
  constexpr int64_t kColumns = 64;
  parallel((d + kColumns - 1) / kColumns, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = 0; row < t; ++row) {
      float* sum = dw + tokens[row] * d + begin * kColumns;
      const T* in = dy + row * d + begin * kColumns;
      each_vector(std::min(end * kColumns, d) - begin * kColumns, [&](int64_t i, int64_t count) {
        store_upto(sum + i, add(load_upto(sum + i, count), load_upto(in + i, count)), count);
      });
    }
  });
}

template <typename T>
void column_sum_of(float* sum, const T* x, int64_t t, int64_t d) {
  parallel((d + kLanes - 1) / kLanes, 1, [&](int64_t begin, int64_t end) {
    for (int64_t v = begin; v < end; ++v) {
      const int64_t i = v * kLanes, count = std::min<int64_t>(kLanes, d - i);
      V total = zero();
      for (int64_t row = 0; row < t; ++row) total = add(total, load_upto(x + row * d + i, count));
      store_upto(sum + i, total, count);
    }
  });
}

template <typename T>
void add_elements(T* y, const T* a, const T* b, int64_t count) {
  parallel((count + kLanes - 1) / kLanes, kElementsPerPiece / kLanes, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kLanes, last = std::min(end * kLanes, count);
    each_vector(last - first, [&](int64_t i, int64_t n) {
      store_upto(y + first + i, add(load_upto(a + first + i, n), load_upto(b + first + i, n)), n);
    });
  });
}

template <typename T>
const T* as(const void* p, T*) {
  return static_cast<const T*>(p);
}
template <typename T>
T* as(void* p, T*) {
  return static_cast<T*>(p);
}

}  // namespace

void rms_norm(void* y, const void* x, const void* w, int dtype, int w_dtype, int64_t t, int64_t d, float eps) {
  with_dtype(dtype, [&](auto* e) {
    with_dtype(w_dtype, [&](auto* we) { rms_norm_rows(as(y, e), as(x, e), as(w, we), t, d, eps); });
  });
}

void rms_norm_backward(void* dx, float* dw, const void* dy, const void* x, const void* w, const void* added, int dtype,
                       int w_dtype, int64_t t, int64_t d, float eps) {
  with_dtype(dtype, [&](auto* e) {
    with_dtype(w_dtype, [&](auto* we) {
      rms_norm_backward_rows(as(dx, e), dw, as(dy, e), as(x, e), as(w, we), as(added, e), t, d, eps);
    });
  });
}

void rope(void* y, const void* x, int dtype, const int64_t* positions, const float* cos, const float* sin, int64_t t,
          int64_t n, int64_t h, int64_t stride_t, int inverse) {
  with_dtype(dtype, [&](auto* e) {
    rope_rows(as(y, e), as(x, e), positions, cos, sin, t, n, h, stride_t, inverse != 0);
  });
}

void silu_mul(void* y, const void* gate, const void* up, int dtype, int64_t count) {
  with_dtype(dtype, [&](auto* e) { silu_mul_elements(as(y, e), as(gate, e), as(up, e), count); });
}

void silu_mul_backward(void* dgate, void* dup, void* y, const void* dy, const void* gate, const void* up, int dtype,
                       int64_t rows, int64_t width, int64_t stride) {
  with_dtype(dtype, [&](auto* e) {
    silu_mul_backward_rows(as(dgate, e), as(dup, e), as(y, e), as(dy, e), as(gate, e), as(up, e), rows, width, stride);
  });
}

void embedding(void* y, int dtype, const void* w, int w_dtype, const int64_t* tokens, int64_t t, int64_t d) {
  with_dtype(dtype, [&](auto* e) {
    with_dtype(w_dtype, [&](auto* we) { embedding_rows(as(y, e), as(w, we), tokens, t, d); });
  });
}

void embedding_backward(float* dw, const void* dy, int dtype, const int64_t* tokens, int64_t t, int64_t d) {
  with_dtype(dtype, [&](auto* e) { embedding_backward_columns(dw, as(dy, e), tokens, t, d); });
}

void add(void* y, const void* a, const void* b, int dtype, int64_t count) {
  with_dtype(dtype, [&](auto* e) { add_elements(as(y, e), as(a, e), as(b, e), count); });
}

void copy_rows(void* dst, const void* src, int64_t rows, int64_t row_bytes, int64_t dst_stride_bytes,
               int64_t src_stride_bytes) {
  parallel(rows, std::max<int64_t>(1, 4 * kElementsPerPiece / std::max<int64_t>(row_bytes, 1)),
           [&](int64_t begin, int64_t end) {
             for (int64_t row = begin; row < end; ++row) {
               std::memcpy(static_cast<char*>(dst) + row * dst_stride_bytes,
                           static_cast<const char*>(src) + row * src_stride_bytes, row_bytes);
             }
           });
}

void column_sum(float* sum, const void* x, int dtype, int64_t t, int64_t d) {
  with_dtype(dtype, [&](auto* e) { column_sum_of(sum, as(x, e), t, d); });
}

}  // namespace LOCKSTEP_ISA
}  // namespace ls
