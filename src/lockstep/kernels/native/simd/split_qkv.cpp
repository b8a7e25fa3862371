// q, k and v heads out of one product: RMS norm of q and k heads where the architecture has one, rotation, and the
// gradient of all that. Each step rounds to the compute dtype, as the steps do alone.
#include "rows.h"

namespace ls {
namespace LOCKSTEP_ISA {
namespace {

constexpr int64_t kElementsPerPiece = 16 * 1024;

template <typename T>
struct Heads {
  const int64_t* positions;
  const float *cos, *sin;
  const void *q_norm, *k_norm;
  int norm_dtype;
  float eps;
  int64_t num_tokens, num_heads, num_kv, dim;

  int64_t all() const { return num_heads + 2 * num_kv; }
  int64_t tokens_per_piece() const { return std::max<int64_t>(1, kElementsPerPiece / (all() * dim)); }
  // Row of head h (q's, then k's, then v's) of one token, in three tensors that hold them apart.
  template <typename E>
  E* row(E* q, E* k, E* v, int64_t token, int64_t h) const {
    if (h < num_heads) return q + (token * num_heads + h) * dim;
    if (h < num_heads + num_kv) return k + (token * num_kv + h - num_heads) * dim;
    return v + (token * num_kv + h - num_heads - num_kv) * dim;
  }
  bool is_rotated(int64_t h) const { return h < num_heads + num_kv; }
  void turn(T* y, const T* x, int64_t token, float direction) const {
    const int64_t at = positions[token] * (dim / 2);
    rotate(y, x, cos + at, sin + at, dim / 2, set1(direction));
  }
  const void* norm(int64_t h) const { return h < num_heads ? q_norm : h < num_heads + num_kv ? k_norm : nullptr; }
  // The norm's weights rounded to T.
  void weights(int64_t h, T* w) const {
    with_dtype(norm_dtype, [&](auto* e) {
      const auto* in = static_cast<const std::remove_pointer_t<decltype(e)>*>(norm(h));
      for (int64_t i = 0; i < dim; ++i) put(w + i, to_float(in[i]));
    });
  }
};

template <typename T>
void split_of(T* q, T* k, T* v, const T* qkv, int64_t stride, const Heads<T>& heads) {
  parallel(heads.num_tokens, heads.tokens_per_piece(), [&](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    T* w = reinterpret_cast<T*>(scratch.get(heads.dim));
    for (int64_t h = 0; h < heads.all(); ++h) {
      if (heads.norm(h)) heads.weights(h, w);
      for (int64_t token = begin; token < end; ++token) {
        const T* in = qkv + token * stride + h * heads.dim;
        T* out = heads.row(q, k, v, token, h);
        if (heads.norm(h)) {
          normalise(out, in, w, heads.dim, heads.eps);
          in = out;
        }
        if (heads.is_rotated(h)) {
          heads.turn(out, in, token, 1.0f);
        } else {
          std::memcpy(out, in, heads.dim * sizeof(T));
        }
      }
    }
  });
}

// `turned` holds the gradients of q and k heads between norm and rotation; needed where there are norms.
template <typename T>
void split_backward_of(T* dqkv, float* dq_norm, float* dk_norm, T* turned, const T* dq, const T* dk, const T* dv,
                       const T* qkv, int64_t stride, const Heads<T>& heads) {
  const int64_t dim = heads.dim, width = heads.all() * dim, turned_width = (heads.num_heads + heads.num_kv) * dim;
  parallel(heads.num_tokens, heads.tokens_per_piece(), [&](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    T* w = reinterpret_cast<T*>(scratch.get(dim));
    for (int64_t h = 0; h < heads.all(); ++h) {
      if (heads.norm(h)) heads.weights(h, w);
      for (int64_t token = begin; token < end; ++token) {
        const T* grad = heads.row(dq, dk, dv, token, h);
        T* out = dqkv + token * width + h * dim;
        if (heads.norm(h)) {
          T* between = turned + token * turned_width + h * dim;
          heads.turn(between, grad, token, -1.0f);
          normalise_backward(out, between, qkv + token * stride + h * dim, w, dim, heads.eps);
        } else if (heads.is_rotated(h)) {
          heads.turn(out, grad, token, -1.0f);
        } else {
          std::memcpy(out, grad, dim * sizeof(T));
        }
      }
    }
  });
  if (heads.q_norm == nullptr) return;
  // Sums run down all rows in order, 16 columns a piece, so they do not depend on threads.
  const int64_t columns = (dim + kLanes - 1) / kLanes;
  parallel(2 * columns, 1, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) {
      const bool is_q = piece < columns;
      const int64_t i = piece % columns * kLanes, lanes = std::min<int64_t>(kLanes, dim - i);
      const int64_t first = is_q ? 0 : heads.num_heads, last = first + (is_q ? heads.num_heads : heads.num_kv);
      V sum = zero();
      for (int64_t token = 0; token < heads.num_tokens; ++token) {
        for (int64_t h = first; h < last; ++h) {
          const T* x = qkv + token * stride + h * dim;
          const V xr = mul(load_upto(x + i, lanes), set1(inverse_rms(x, dim, heads.eps)));
          sum = fma(load_upto(turned + token * turned_width + h * dim + i, lanes), xr, sum);
        }
      }
      store_upto((is_q ? dq_norm : dk_norm) + i, sum, lanes);
    }
  });
}

}  // namespace

void split_qkv(void* q, void* k, void* v, const void* qkv, int dtype, int64_t stride, const int64_t* positions,
               const float* cos, const float* sin, const void* q_norm, const void* k_norm, int norm_dtype, float eps,
               int64_t num_tokens, int64_t num_heads, int64_t num_kv, int64_t head_dim) {
  with_dtype(dtype, [&](auto* e) {
    using T = std::remove_pointer_t<decltype(e)>;
    const Heads<T> heads{positions,  cos,       sin,    q_norm,  k_norm, norm_dtype, eps,
                         num_tokens, num_heads, num_kv, head_dim};
    split_of(static_cast<T*>(q), static_cast<T*>(k), static_cast<T*>(v), static_cast<const T*>(qkv), stride, heads);
  });
}

void split_qkv_backward(void* dqkv, float* dq_norm, float* dk_norm, void* turned, const void* dq, const void* dk,
                        const void* dv, const void* qkv, int dtype, int64_t stride, const int64_t* positions, const float* cos,
                        const float* sin, const void* q_norm, const void* k_norm, int norm_dtype, float eps,
                        int64_t num_tokens, int64_t num_heads, int64_t num_kv, int64_t head_dim) {
  with_dtype(dtype, [&](auto* e) {
    using T = std::remove_pointer_t<decltype(e)>;
    const Heads<T> heads{positions,  cos,       sin,    q_norm,  k_norm, norm_dtype, eps,
                         num_tokens, num_heads, num_kv, head_dim};
    split_backward_of(static_cast<T*>(dqkv), dq_norm, dk_norm, static_cast<T*>(turned), static_cast<const T*>(dq),
                      static_cast<const T*>(dk), static_cast<const T*>(dv), static_cast<const T*>(qkv), stride, heads);
  });
}

}  // namespace LOCKSTEP_ISA
}  // namespace ls
