// Gradient of packed causal attention, probabilities recomputed from the saved log-sum-exp.
//
// One unit is one query head of one sequence; it runs alone and in order, so no sum depends on threads. With
// P = exp(scale q k^T - lse), D = rowsum(dO o): dV = P^T dO; dS = scale P (dO V^T - D); dQ = dS K; dK = dS^T Q. K/V
// gradients of the heads of a group are added in head order. Blocks of 64 x 64, sums in fp32; in bf16 the products take
// pairs, for which P and dS are rounded to bf16 (Dao et al. 2022, alg. 4). Bound by arithmetic: five products a block.
#include "pair_product.h"

namespace ls {
namespace LOCKSTEP_ISA {
namespace {

constexpr int64_t kSide = 64;

template <typename T>
struct Problem {
  T *dq, *dk, *dv;
  const T *dout, *q, *k, *v, *o;
  const float* lse;
  int64_t num_heads, num_kv, dim;
  float scale;
  int64_t window;

  int64_t width() const { return (dim + kLanes - 1) / kLanes * kLanes; }
  int64_t steps() const { return (dim + kPair<T> - 1) / kPair<T>; }
};

int64_t padded(int64_t length) { return (length + kSide - 1) / kSide * kSide; }

// What one head keeps at hand, in words; *_turned: [dim step][token], *_joined: [token step][dim], *_rows: [token][dim step].
struct Room {
  float *k_turned, *v_turned, *k_joined;                  // of the whole sequence
  float *q_rows, *dout_rows, *q_joined, *dout_joined;     // of 64 queries
  float *dq, *s, *ds, *p_joined, *ds_joined, *ds_rows;
  float* delta;

  static int64_t size(int64_t length, int64_t width) {
    return 3 * padded(length) * width + 5 * kSide * width + 5 * kSide * kSide + kSide;
  }
  Room(float* at, int64_t length, int64_t width) {
    const auto cut = [&](int64_t words) { return (at += words) - words; };
    const int64_t whole = padded(length) * width, part = kSide * width, square = kSide * kSide;
    k_turned = cut(whole), v_turned = cut(whole), k_joined = cut(whole);
    q_rows = cut(part), dout_rows = cut(part), q_joined = cut(part), dout_joined = cut(part), dq = cut(part);
    s = cut(square), ds = cut(square), p_joined = cut(square), ds_joined = cut(square), ds_rows = cut(square);
    delta = cut(kSide);
  }
};

// Rows of one head as words along the head dim, zero-padded.
template <typename T>
void copy_rows(const T* in, int64_t count, int64_t stride, int64_t dim, float* out, int64_t steps) {
  for (int64_t i = 0; i < count; ++i) {
    out[(i + 1) * steps - 1] = 0.0f;
    std::memcpy(out + i * steps, in + i * stride, dim * sizeof(T));
  }
}

template <typename T>
void turn(const T* in, int64_t length, int64_t stride, int64_t dim, float* out, int64_t steps) {
  const int64_t columns = padded(length), whole = dim / kPair<T>;
  for (int64_t i = 0; i < length; ++i) {
    const auto* row = reinterpret_cast<const char*>(in + i * stride);
    for (int64_t s = 0; s < whole; ++s) std::memcpy(out + s * columns + i, row + 4 * s, 4);
    for (int64_t s = whole; s < steps; ++s) {
      out[s * columns + i] = 0.0f;
      std::memcpy(out + s * columns + i, row + 4 * s, sizeof(T));
    }
  }
  for (int64_t s = 0; s < steps; ++s) {
    for (int64_t i = length; i < columns; ++i) out[s * columns + i] = 0.0f;
  }
}

template <typename T>
void join(const T* in, int64_t count, int64_t stride, int64_t dim, float* out, int64_t width) {
  for (int64_t i = 0; i < count; i += kPair<T>) {
    const T* second = i + 1 < count ? in + (i + 1) * stride : nullptr;
    join_rows(in + i * stride, second, dim, width, out + i / kPair<T> * width);
  }
}

// Words of the probabilities and of dS, from fp32 rows that are zero where nothing is seen.
void pair_squares(const Room& room, int64_t rows, const bf16*) {
  alignas(64) bf16 p[2][kSide];
  auto* ds_rows = reinterpret_cast<bf16*>(room.ds_rows);
  for (int64_t r = 0; r < rows; r += 2) {
    bf16* ds = ds_rows + r * kSide;
    for (int64_t half = 0; half < 2; ++half) {
      for (int64_t c = 0; c < kSide; c += kLanes) {
        const bool is_row = r + half < rows;
        store(p[half] + c, is_row ? load(room.s + (r + half) * kSide + c) : zero());
        store(ds + half * kSide + c, is_row ? load(room.ds + (r + half) * kSide + c) : zero());
      }
    }
    join_rows(p[0], p[1], kSide, kSide, room.p_joined + r / 2 * kSide);
    join_rows(ds, ds + kSide, kSide, kSide, room.ds_joined + r / 2 * kSide);
  }
}
void pair_squares(Room& room, int64_t, const float*) {
  room.p_joined = room.s;
  room.ds_joined = room.ds_rows = room.ds;
}

// One query head of tokens [start, start + length). dk_head and dv_head: (length x width) sums of this head alone.
template <typename T>
void one_head(const Problem<T>& p, int64_t start, int64_t length, int64_t head, float* dk_head, float* dv_head,
              float* scratch) {
  constexpr bool kIsBf16 = kPair<T> == 2;
  const int64_t width = p.width(), steps = p.steps(), columns = padded(length);
  const int64_t kv_head = head / (p.num_heads / p.num_kv);
  const int64_t q_stride = p.num_heads * p.dim, kv_stride = p.num_kv * p.dim;
  const int64_t q_at = (start * p.num_heads + head) * p.dim, kv_at = (start * p.num_kv + kv_head) * p.dim;
  Room room(scratch, length, width);
  turn(p.k + kv_at, length, kv_stride, p.dim, room.k_turned, steps);
  turn(p.v + kv_at, length, kv_stride, p.dim, room.v_turned, steps);
  join(p.k + kv_at, length, kv_stride, p.dim, room.k_joined, width);
  std::memset(dk_head, 0, length * width * sizeof(float));
  std::memset(dv_head, 0, length * width * sizeof(float));
  const V scale = set1(p.scale);
  for (int64_t row = 0; row < length; row += kSide) {
    const int64_t rows = std::min(kSide, length - row), row_steps = (rows + kPair<T> - 1) / kPair<T>;
    const T *q = p.q + q_at + row * q_stride, *dout = p.dout + q_at + row * q_stride, *o = p.o + q_at + row * q_stride;
    copy_rows(q, rows, q_stride, p.dim, room.q_rows, steps);
    copy_rows(dout, rows, q_stride, p.dim, room.dout_rows, steps);
    join(q, rows, q_stride, p.dim, room.q_joined, width);
    join(dout, rows, q_stride, p.dim, room.dout_joined, width);
    std::memset(room.dq, 0, rows * width * sizeof(float));
    for (int64_t r = 0; r < rows; ++r) {
      V sum = zero();
      for (int64_t h = 0; h < p.dim; h += kLanes) {
        const int64_t count = std::min<int64_t>(kLanes, p.dim - h), at = r * q_stride + h;
        const bool whole = count == kLanes;
        sum = fma(whole ? load(dout + at) : load_partial(dout + at, count, T(0)),
                  whole ? load(o + at) : load_partial(o + at, count, T(0)), sum);
      }
      room.delta[r] = sum_lanes(sum);
    }
    const int64_t first = p.window > 0 ? std::max<int64_t>(0, row - p.window + 1) / kSide * kSide : 0;
    for (int64_t key = first; key <= row; key += kSide) {
      const int64_t keys = std::min(kSide, length - key), key_steps = (keys + kPair<T> - 1) / kPair<T>;
      pair_product<kIsBf16>({room.q_rows, steps, 1}, room.k_turned + key, columns, rows, kSide, steps, room.s, kSide,
                            false);
      pair_product<kIsBf16>({room.dout_rows, steps, 1}, room.v_turned + key, columns, rows, kSide, steps, room.ds,
                            kSide, false);
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t position = row + r;
        const V shift = set1(p.lse[(start + position) * p.num_heads + head]), d = set1(room.delta[r]);
        const int64_t begin = p.window > 0 ? std::max<int64_t>(0, position - p.window + 1 - key) : 0;
        const int64_t end = std::min<int64_t>(keys, position + 1 - key);
        float *sr = room.s + r * kSide, *dsr = room.ds + r * kSide;
        for (int64_t c = 0; c < kSide; c += kLanes) {
          const V prob = exp(sub(mul(load(sr + c), scale), shift));
          store(sr + c, prob);
          store(dsr + c, mul(mul(prob, scale), sub(load(dsr + c), d)));
        }
        for (int64_t c = 0; c < std::min(begin, kSide); ++c) sr[c] = dsr[c] = 0.0f;
        for (int64_t c = std::max<int64_t>(end, 0); c < kSide; ++c) sr[c] = dsr[c] = 0.0f;
      }
      pair_squares(room, rows, static_cast<const T*>(nullptr));
      pair_product<kIsBf16>({room.p_joined, 1, kSide}, room.dout_joined, width, keys, width, row_steps,
                            dv_head + key * width, width, true);
      pair_product<kIsBf16>({room.ds_joined, 1, kSide}, room.q_joined, width, keys, width, row_steps,
                            dk_head + key * width, width, true);
      pair_product<kIsBf16>({room.ds_rows, kSide / kPair<T>, 1}, room.k_joined + key / kPair<T> * width, width, rows,
                            width, key_steps, room.dq, width, true);
    }
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t h = 0; h < p.dim; ++h) put(p.dq + q_at + (row + r) * q_stride + h, room.dq[r * width + h]);
    }
  }
}

template <typename T>
void backward_of(const Problem<T>& p, const int32_t* starts, int64_t num_seqs, int64_t num_tokens) {
  const int64_t width = p.width(), group = p.num_heads / p.num_kv;
  const int64_t plane = num_tokens * width;  // sums of one query head over all tokens
  auto* sums = static_cast<float*>(std::malloc(std::max<int64_t>(1, 2 * p.num_heads * plane) * sizeof(float)));
  if (sums == nullptr) std::abort();
  float *dk_sums = sums, *dv_sums = sums + p.num_heads * plane;
  parallel(num_seqs * p.num_heads, 1, [&](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t s = unit / p.num_heads, head = unit % p.num_heads;
      const int64_t start = starts[s], length = starts[s + 1] - start, at = head * plane + start * width;
      one_head(p, start, length, head, dk_sums + at, dv_sums + at, scratch.get(Room::size(length, width)));
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
