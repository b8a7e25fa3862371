// Ops on rows of logits: logprobs with entropy, the softmax gradient, and drawing a token.
//
// The sum of exponentials runs over 8 fixed segments of the vocabulary (four vectors of accumulators in each), joined
// by the tree ((0+1)+(2+3))+((4+5)+(6+7)), so that cutting the vocabulary over tensor-parallel ranks changes no bit.
#include "vec.h"

namespace ls {
namespace LOCKSTEP_ISA {
namespace {

constexpr int kSegments = 8;
constexpr int kStride = 4 * kLanes;
constexpr float kMinusInfinity = -__builtin_inff();
constexpr float kFarBelow = -200.0f;  // exp of it is 0, and 0 times it is not NaN

// Of x = logits * scale: maximum m, s = sum exp(x - m), and t = sum exp(x - m) (x - m).
struct Sums {
  float m, s, t;
  float log_sum() const { return static_cast<float>(std::log(static_cast<double>(s))); }
};

LS_INLINE float tree(const float (&part)[kSegments]) {
  return ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
}

Sums sums_of(const float* logits, float scale, int64_t vocab) {
  const V sv = set1(scale);
  V best = set1(kMinusInfinity);
  int64_t i = 0;
  for (; i + kLanes <= vocab; i += kLanes) best = max(best, mul(load(logits + i), sv));
  if (i < vocab) best = max(best, mul(load_partial(logits + i, vocab - i, kMinusInfinity), sv));
  const float m = max_lanes(best);
  const V shift = set1(m), floor = set1(kFarBelow);
  const int64_t length = (vocab + kSegments * kStride - 1) / (kSegments * kStride) * kStride;
  float s_part[kSegments], t_part[kSegments];
  for (int segment = 0; segment < kSegments; ++segment) {
    V s[4] = {zero(), zero(), zero(), zero()}, t[4] = {zero(), zero(), zero(), zero()};
    const int64_t begin = std::min(segment * length, vocab), end = std::min(begin + length, vocab);
    for (int64_t at = begin; at < end; at += kStride) {
      for (int lane = 0; lane < 4; ++lane) {
        const int64_t first = at + lane * kLanes, count = end - first;
        if (count <= 0) break;
        const V raw = count >= kLanes ? load(logits + first) : load_partial(logits + first, count, kMinusInfinity);
        const V d = max(sub(mul(raw, sv), shift), floor), e = exp(d);
        s[lane] = add(s[lane], e);
        t[lane] = fma(e, d, t[lane]);
      }
    }
    s_part[segment] = sum_lanes(add(add(s[0], s[1]), add(s[2], s[3])));
    t_part[segment] = sum_lanes(add(add(t[0], t[1]), add(t[2], t[3])));
  }
  return {m, tree(s_part), tree(t_part)};
}

// Philox4x32-10 for counters first .. first + 15, words interleaved so that out[i] belongs to token 4 first + i.
void philox(uint64_t seed, uint64_t position, uint32_t first, uint32_t (&out)[4 * kLanes]) {
  uint32_t c0[kLanes], c1[kLanes], c2[kLanes], c3[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    c0[i] = first + i;
    c1[i] = static_cast<uint32_t>(position);
    c2[i] = static_cast<uint32_t>(position >> 32);
    c3[i] = 0;
  }
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < kLanes; ++i) {
      const uint64_t a = static_cast<uint64_t>(c0[i]) * 0xD2511F53u, b = static_cast<uint64_t>(c2[i]) * 0xCD9E8D57u;
      c0[i] = static_cast<uint32_t>(b >> 32) ^ c1[i] ^ key0;
      c1[i] = static_cast<uint32_t>(b);
      c2[i] = static_cast<uint32_t>(a >> 32) ^ c3[i] ^ key1;
      c3[i] = static_cast<uint32_t>(a);
    }
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  for (int i = 0; i < kLanes; ++i) {
    out[4 * i] = c0[i];
    out[4 * i + 1] = c1[i];
    out[4 * i + 2] = c2[i];
    out[4 * i + 3] = c3[i];
  }
}

LS_INLINE float uniform(uint32_t word) { return (static_cast<float>(word >> 9) + 0.5f) * 1.1920929e-7f; }
LS_INLINE float gumbel(float u) {
  return static_cast<float>(-std::log(-std::log(static_cast<double>(u))));
}

int64_t argmax(const float* x, int64_t vocab) {
  int64_t best = 0;
  for (int64_t i = 1; i < vocab; ++i) {
    if (x[i] > x[best]) best = i;
  }
  return best;
}

// argmax of x[v] + g[v], lowest v first. With `lead` the best sum so far, v can win only if g[v] >= lead - x[v], that is
// if 1 - u[v] <= -log u[v] <= exp(x[v] - lead): one exp and one comparison spare nearly all the logarithms.
int64_t gumbel_argmax(const float* x, int64_t vocab, uint64_t seed, uint64_t position) {
  constexpr float kMostNoise = 16.7f, kSlack = 1.0001f;
  uint32_t words[4 * kLanes];
  const int64_t top = argmax(x, vocab);
  philox(seed, position, static_cast<uint32_t>(top / (4 * kLanes) * kLanes), words);
  int64_t winner = top;
  float lead = x[top] + gumbel(uniform(words[top % (4 * kLanes)]));
  for (int64_t first = 0; first < vocab; first += 4 * kLanes) {
    const int64_t count = std::min<int64_t>(4 * kLanes, vocab - first);
    float row[4 * kLanes], bound[4 * kLanes];
    for (int64_t i = 0; i < 4 * kLanes; ++i) row[i] = i < count ? x[first + i] : kMinusInfinity;
    V best = load(row);
    for (int v = 1; v < 4; ++v) best = max(best, load(row + v * kLanes));
    if (max_lanes(best) + kMostNoise < lead) continue;
    philox(seed, position, static_cast<uint32_t>(first / 4), words);
    for (int v = 0; v < 4; ++v) store(bound + v * kLanes, exp(sub(load(row + v * kLanes), set1(lead))));
    for (int64_t i = 0; i < count; ++i) {
      const float u = uniform(words[i]);
      if (1.0f - u > bound[i] * kSlack) continue;
      const float sum = row[i] + gumbel(u);
      if (sum > lead || (sum == lead && first + i < winner)) {
        lead = sum;
        winner = first + i;
      }
    }
  }
  return winner;
}

// Ids of the `wanted` largest x (ties: lower id first), sorted; the whole vocabulary is in `ids`.
void sort_largest(const float* x, int32_t* ids, int64_t vocab, int64_t wanted) {
  const auto before = [x](int32_t a, int32_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); };
  if (wanted < vocab) std::nth_element(ids, ids + wanted, ids + vocab, before);
  std::sort(ids, ids + wanted, before);
}

// Sets x of tokens that top-k, top-p and min-p drop to minus infinity.
void filter(float* x, int32_t* ids, int64_t vocab, int64_t top_k, float top_p, float min_p) {
  for (int64_t i = 0; i < vocab; ++i) ids[i] = static_cast<int32_t>(i);
  const float best = x[argmax(x, vocab)];
  const int64_t kept_by_k = top_k > 0 && top_k < vocab ? top_k : vocab;
  if (kept_by_k < vocab) {
    sort_largest(x, ids, vocab, kept_by_k);
    for (int64_t i = kept_by_k; i < vocab; ++i) x[ids[i]] = kMinusInfinity;
  }
  if (top_p < 1.0f) {
    double total = 0.0;
    for (int64_t i = 0; i < vocab; ++i) total += std::exp(static_cast<double>(x[i]) - best);
    int64_t sorted = std::min<int64_t>(kept_by_k, kept_by_k < vocab ? kept_by_k : 256);
    int64_t kept = 0;
    while (true) {  // sort ever more until the sorted head holds top_p of the mass
      sort_largest(x, ids, vocab, sorted);
      double mass = 0.0;
      for (kept = 0; kept < sorted && mass < top_p * total; ++kept) mass += std::exp(static_cast<double>(x[ids[kept]]) - best);
      if (mass >= top_p * total || sorted == vocab || sorted == kept_by_k) break;
      sorted = std::min(vocab, sorted * 8);
    }
    for (int64_t i = kept; i < vocab; ++i) x[ids[i]] = kMinusInfinity;
  }
  if (min_p > 0.0f) {
    const float least = best + std::log(min_p);
    for (int64_t i = 0; i < vocab; ++i) {
      if (!(x[i] >= least)) x[i] = kMinusInfinity;
    }
  }
}

}  // namespace

void row_logprobs(float* logprobs, float* lse, float* entropy, const float* logits, const int64_t* targets,
                  const float* inverse_temperature, int64_t rows, int64_t vocab) {
  parallel(rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float scale = inverse_temperature[row];
      const float* x = logits + row * vocab;
      const Sums sums = sums_of(x, scale, vocab);
      const float log_sum = sums.log_sum();
      logprobs[row] = (x[targets[row]] * scale - sums.m) - log_sum;
      lse[row] = sums.m + log_sum;
      entropy[row] = log_sum - sums.t / sums.s;
    }
  });
}

void row_softmax_grad(void* dlogits, int dtype, const float* logits, const float* lse, const int64_t* targets,
                      const float* inverse_temperature, const float* dlogprobs, int64_t rows, int64_t vocab) {
  with_dtype(dtype, [&](auto* e) {
    auto* out = static_cast<decltype(e)>(dlogits);
    parallel(rows, 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const float scale = inverse_temperature[row], factor = scale * dlogprobs[row];
        const float* x = logits + row * vocab;
        auto* dx = out + row * vocab;
        const float at_target = 1.0f - exp(x[targets[row]] * scale - lse[row]);
        const V sv = set1(scale), shift = set1(lse[row]), minus = set1(-factor);
        int64_t i = 0;
        for (; i + kLanes <= vocab; i += kLanes) store(dx + i, mul(exp(sub(mul(load(x + i), sv), shift)), minus));
        if (i < vocab) {
          const V tail = load_partial(x + i, vocab - i, 0.0f);
          store_partial(dx + i, mul(exp(sub(mul(tail, sv), shift)), minus), vocab - i);
        }
        put(dx + targets[row], at_target * factor);
      }
    });
  });
}

void sample(int64_t* tokens, float* logprobs, const float* logits, const float* temperature, const int64_t* top_k,
            const float* top_p, const float* min_p, const int64_t* seed, const int64_t* position, int64_t rows,
            int64_t vocab) {
  parallel(rows, 1, [&](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    float* x = scratch.get(2 * vocab);
    auto* ids = reinterpret_cast<int32_t*>(x + vocab);
    for (int64_t row = begin; row < end; ++row) {
      const float* in = logits + row * vocab;
      if (temperature[row] == 0.0f) {
        tokens[row] = argmax(in, vocab);
        logprobs[row] = 0.0f;
        continue;
      }
      const float scale = 1.0f / temperature[row];
      for (int64_t i = 0; i < vocab; ++i) x[i] = in[i] * scale;
      if ((top_k[row] > 0 && top_k[row] < vocab) || top_p[row] < 1.0f || min_p[row] > 0.0f) {
        filter(x, ids, vocab, top_k[row], top_p[row], min_p[row]);
      }
      tokens[row] = gumbel_argmax(x, vocab, static_cast<uint64_t>(seed[row]), static_cast<uint64_t>(position[row]));
      const Sums sums = sums_of(x, 1.0f, vocab);
      logprobs[row] = (x[tokens[row]] - sums.m) - sums.log_sum();
    }
  });
}

}  // namespace LOCKSTEP_ISA
}  // namespace ls
