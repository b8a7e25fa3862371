// Arithmetic of one row, shared by the kernels that do it alone and those that fuse it.
#pragma once
#include "vec.h"

namespace ls {
namespace LOCKSTEP_ISA {

// Calls body(offset, count) for 16 elements at a time; count < 16 only for the last.
template <typename Body>
LS_INLINE void each_vector(int64_t count, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) body(i, static_cast<int64_t>(kLanes));
  if (i < count) body(i, count - i);
}
template <typename T>
LS_INLINE V load_upto(const T* p, int64_t count) {
  return count == kLanes ? load(p) : load_partial(p, count, T(0));
}
template <typename T>
LS_INLINE void store_upto(T* p, V v, int64_t count) {
  if (count == kLanes) {
    store(p, v);
  } else {
    store_partial(p, v, count);
  }
}

template <typename T>
LS_INLINE float inverse_rms(const T* x, int64_t d, float eps) {
  V squares = zero();
  each_vector(d, [&](int64_t i, int64_t count) {
    const V v = load_upto(x + i, count);
    squares = fma(v, v, squares);
  });
  return 1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(d) + eps);
}

// y = x / rms(x) * w
template <typename T, typename W>
LS_INLINE void normalise(T* y, const T* x, const W* w, int64_t d, float eps) {
  const V r = set1(inverse_rms(x, d, eps));
  each_vector(d, [&](int64_t i, int64_t count) {
    store_upto(y + i, mul(mul(load_upto(x + i, count), r), load_upto(w + i, count)), count);
  });
}

// dx = r (w dy - x r^2 mean(w dy x)) [+ added]; returns r = 1 / rms(x).
template <typename T, typename W>
LS_INLINE float normalise_backward(T* dx, const T* dy, const T* x, const W* w, int64_t d, float eps,
                                   const T* added = nullptr) {
  const float r = inverse_rms(x, d, eps);
  V dots = zero();
  each_vector(d, [&](int64_t i, int64_t count) {
    dots = fma(mul(load_upto(w + i, count), load_upto(dy + i, count)), load_upto(x + i, count), dots);
  });
  const float mean = sum_lanes(dots) / static_cast<float>(d);
  const V rv = set1(r), correction = set1(-(r * r * mean));
  each_vector(d, [&](int64_t i, int64_t count) {
    const V wdy = mul(load_upto(w + i, count), load_upto(dy + i, count));
    const V value = fma(load_upto(x + i, count), correction, wdy);
    store_upto(dx + i, added ? fma(rv, value, load_upto(added + i, count)) : mul(rv, value), count);
  });
  return r;
}

// One head of 2 `half` elements by its position's angles; y may be x. `sign` -1 turns it back.
template <typename T>
LS_INLINE void rotate(T* y, const T* x, const float* cos, const float* sin, int64_t half, V sign) {
  each_vector(half, [&](int64_t i, int64_t count) {
    const V x1 = load_upto(x + i, count), x2 = load_upto(x + half + i, count);
    const V c = load_upto(cos + i, count), s = mul(sign, load_upto(sin + i, count));
    store_upto(y + i, sub(mul(x1, c), mul(x2, s)), count);
    store_upto(y + half + i, add(mul(x2, c), mul(x1, s)), count);
  });
}

LS_INLINE V sigmoid(V g) { return div(set1(1.0f), add(set1(1.0f), exp(sub(zero(), g)))); }
LS_INLINE V silu_times(V gate, V up) { return mul(mul(gate, sigmoid(gate)), up); }

}  // namespace LOCKSTEP_ISA
}  // namespace ls
