// AdamW in one pass over memory, and the sum of squares that clipping asks for.
//
// Bytes: p, m, v and g read, p, m and v written: 28 a parameter, which bounds it. Element by element, so threads change
// no bit.
#include "vec.h"

namespace ls {
namespace LOCKSTEP_ISA {
namespace {

constexpr int64_t kPiece = 64 * 1024;  // elements handed to a thread, and of one sum of squares
constexpr int64_t kBlock = 1024;       // elements summed in fp32

}  // namespace

// Loshchilov & Hutter 2019, alg. 2, in torch's form: p = decay p - step_size m / (sqrt(v) / root_correction2 + eps),
// with decay = 1 - rate * weight_decay, step_size = rate / (1 - beta1^t), root_correction2 = sqrt(1 - beta2^t) and
// weight1, weight2 = 1 - beta1, 1 - beta2, which fp32 would not give exactly.
void adamw(float* p, float* m, float* v, const float* g, int64_t count, float grad_scale, float decay, float weight1,
           float beta2, float weight2, float step_size, float root_correction2, float eps) {
  parallel((count + kPiece - 1) / kPiece, 1, [&](int64_t begin, int64_t end) {
    const V scale = set1(grad_scale), keep = set1(decay), b2 = set1(beta2), a1 = set1(weight1), a2 = set1(weight2),
            rate = set1(-step_size), root = set1(root_correction2), epsilon = set1(eps);
    const int64_t last = std::min(end * kPiece, count);
    for (int64_t i = begin * kPiece; i < last; i += kLanes) {
      const int64_t n = last - i;
      const bool whole = n >= kLanes;
      const auto read = [&](const float* x) { return whole ? load(x + i) : load_partial(x + i, n, 0.0f); };
      const auto write = [&](float* x, V value) { whole ? store(x + i, value) : store_partial(x + i, value, n); };
      const V grad = mul(read(g), scale), old = read(m);
      const V mean = fma(sub(grad, old), a1, old);
      const V square = fma(mul(grad, grad), a2, mul(read(v), b2));
      const V step = div(mean, add(div(sqrt(square), root), epsilon));
      write(m, mean);
      write(v, square);
      write(p, fma(step, rate, mul(read(p), keep)));
    }
  });
}

// sums[i]: of the squares of elements 65,536 i and on. Blocks of 1,024 are summed in fp32 by the fixed tree over lanes,
// and those in order in fp64.
void sum_of_squares(double* sums, const float* x, int64_t count) {
  parallel((count + kPiece - 1) / kPiece, 1, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t last = std::min((piece + 1) * kPiece, count);
      double total = 0.0;
      for (int64_t block = piece * kPiece; block < last; block += kBlock) {
        const int64_t stop = std::min(block + kBlock, last);
        V sum = zero();
        for (int64_t i = block; i < stop; i += kLanes) {
          const V value = stop - i >= kLanes ? load(x + i) : load_partial(x + i, stop - i, 0.0f);
          sum = fma(value, value, sum);
        }
        total += sum_lanes(sum);
      }
      sums[piece] = total;
    }
  });
}

}  // namespace LOCKSTEP_ISA
}  // namespace ls
