// Ops on rows of logits: logprobs with entropy, the softmax gradient, and drawing a token.
//
// The sum of exponentials runs over 8 fixed segments of the vocabulary (four vectors of accumulators in each), joined
// by the tree ((0+1)+(2+3))+((4+5)+(6+7)), so that cutting the vocabulary over tensor-parallel ranks changes no bit.
#include <functional>

#include "vec.h"

namespace ls {
namespace LOCKSTEP_ISA {
namespace {

constexpr int kSegments = 8;
constexpr int kStride = 4 * kLanes;
constexpr float kMinusInfinity = -__builtin_inff();
constexpr float kNan = __builtin_nanf("");
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
  bool has_nan = false;
  const auto look = [&](V raw) {
    const V x = mul(raw, sv);
    has_nan |= any_nan(x, x);
    best = max(best, x);
  };
  int64_t i = 0;
  for (; i + kLanes <= vocab; i += kLanes) look(load(logits + i));
  if (i < vocab) look(load_partial(logits + i, vocab - i, kMinusInfinity));
  if (has_nan) return {kNan, kNan, kNan};  // max and exp below would swallow it
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

// Philox4x32-10 for counters first .. first + 15, words interleaved so that out[i] belongs to token 4 first + i. Loops
// over lanes must not be unrolled before the compiler vectorises them, hence the pragmas.
void philox(uint64_t seed, uint64_t position, uint32_t first, uint32_t (&out)[4 * kLanes]) {
  uint32_t c0[kLanes], c1[kLanes], c2[kLanes], c3[kLanes];
#pragma GCC unroll 1
  for (int i = 0; i < kLanes; ++i) {
    c0[i] = first + i;
    c1[i] = static_cast<uint32_t>(position);
    c2[i] = static_cast<uint32_t>(position >> 32);
    c3[i] = 0;
  }
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
#pragma GCC unroll 1
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
#pragma GCC unroll 1
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

// The largest x, where it first stands, and whether any x is NaN (then the rest means nothing).
struct Peak {
  int64_t at;
  float value;
  bool has_nan;
};

Peak peak_of(const float* x, int64_t vocab) {
  V best[4] = {set1(kMinusInfinity), set1(kMinusInfinity), set1(kMinusInfinity), set1(kMinusInfinity)};
  bool has_nan = false;
  int64_t i = 0;
  for (; i + kStride <= vocab; i += kStride) {
    V v[4];
    for (int lane = 0; lane < 4; ++lane) {
      v[lane] = load(x + i + lane * kLanes);
      best[lane] = max(best[lane], v[lane]);
    }
    has_nan |= any_nan(v[0], v[1]) | any_nan(v[2], v[3]);
  }
  for (; i < vocab; i += kLanes) {
    const int64_t count = std::min<int64_t>(kLanes, vocab - i);
    const V v = count == kLanes ? load(x + i) : load_partial(x + i, count, kMinusInfinity);
    best[0] = max(best[0], v);
    has_nan |= any_nan(v, v);
  }
  const float value = max_lanes(max(max(best[0], best[1]), max(best[2], best[3])));
  if (has_nan) return {0, kNan, true};
  const V wanted = set1(value);
  for (i = 0; i + kLanes <= vocab; i += kLanes) {
    const uint32_t found = equal_lanes(load(x + i), wanted);
    if (found != 0) return {i + __builtin_ctz(found), value, false};
  }
  while (x[i] != value) ++i;
  return {i, value, false};
}

// argmax of x[v] + g[v], lowest v first. With `lead` the best sum so far, v can win only if g[v] >= lead - x[v], that is
// if 1 - u[v] <= -log u[v] <= exp(x[v] - lead): one exp and one comparison spare nearly all the logarithms.
int64_t gumbel_argmax(const float* x, int64_t vocab, int64_t top, uint64_t seed, uint64_t position) {
  constexpr float kMostNoise = 16.7f, kSlack = 1.0001f;
  uint32_t words[kStride];
  philox(seed, position, static_cast<uint32_t>(top / kStride * kLanes), words);
  int64_t winner = top;
  float lead = x[top] + gumbel(uniform(words[top % kStride]));
  for (int64_t first = 0; first < vocab; first += kStride) {
    const int64_t count = std::min<int64_t>(kStride, vocab - first);
    float padded[kStride];
    const float* row = x + first;
    if (count < kStride) {
      for (int64_t i = 0; i < kStride; ++i) padded[i] = i < count ? row[i] : kMinusInfinity;
      row = padded;
    }
    const V best = max(max(load(row), load(row + kLanes)), max(load(row + 2 * kLanes), load(row + 3 * kLanes)));
    if (max_lanes(best) + kMostNoise < lead) continue;
    philox(seed, position, static_cast<uint32_t>(first / 4), words);
    float u[kStride];
    for (int64_t i = 0; i < kStride; ++i) u[i] = uniform(words[i]);
    const V lead_then = set1(lead);
    for (int v = 0; v < 4; ++v) {
      const V bound = mul(exp(sub(load(row + v * kLanes), lead_then)), set1(kSlack));
      uint32_t can_win = at_least_lanes(bound, sub(set1(1.0f), load(u + v * kLanes)));
      for (; can_win != 0; can_win &= can_win - 1) {
        const int64_t i = v * kLanes + __builtin_ctz(can_win);
        const float sum = row[i] + gumbel(u[i]);
        if (i < count && (sum > lead || (sum == lead && first + i < winner))) {
          lead = sum;
          winner = first + i;
        }
      }
    }
  }
  return winner;
}

// Ids of the `wanted` largest x, sorted (ties: lower id first), at the front of `ids`. The `wanted`th largest of the
// maxima of 64 neighbours each is a bound that at least `wanted` elements reach, and few others: only those are sorted.
void sort_largest(const float* x, int32_t* ids, float* maxima, int64_t vocab, int64_t wanted) {
  const auto before = [x](int32_t a, int32_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); };
  float limit = kMinusInfinity;
  const int64_t whole = vocab / kStride;
  if (wanted <= whole) {
    for (int64_t i = 0; i < whole; ++i) {
      const float* p = x + i * kStride;
      maxima[i] = max_lanes(max(max(load(p), load(p + kLanes)), max(load(p + 2 * kLanes), load(p + 3 * kLanes))));
    }
    // A lambda, not std::greater: its type is this variant's own, so the instantiation cannot be shared.
    std::nth_element(maxima, maxima + wanted - 1, maxima + whole, [](float a, float b) { return a > b; });
    limit = maxima[wanted - 1];
  }
  const V at_least = set1(limit);
  int64_t found = 0, i = 0;
  for (; i + kLanes <= vocab; i += kLanes) {
    for (uint32_t lanes = at_least_lanes(load(x + i), at_least); lanes != 0; lanes &= lanes - 1) {
      ids[found++] = static_cast<int32_t>(i + __builtin_ctz(lanes));
    }
  }
  for (; i < vocab; ++i) {
    if (x[i] >= limit) ids[found++] = static_cast<int32_t>(i);
  }
  if (wanted < found) std::nth_element(ids, ids + wanted, ids + found, before);
  std::sort(ids, ids + wanted, before);
}

// e^x for x <= 0 in fp64, error below 2e-15 of it, 0 below -700: plain arithmetic that compilers vectorise.
LS_INLINE double exp64(double x) {
  constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer
  const double clamped = x > -700.0 ? x : -700.0;
  const double shifted = clamped * 1.4426950408889634 + kRound;
  const double n = shifted - kRound;
  const double r = (clamped - n * 6.93145751953125e-1) - n * 1.42860682030941723212e-6;
  double p = 1.0 / 39916800;
  p = p * r + 1.0 / 3628800;
  p = p * r + 1.0 / 362880;
  p = p * r + 1.0 / 40320;
  p = p * r + 1.0 / 5040;
  p = p * r + 1.0 / 720;
  p = p * r + 1.0 / 120;
  p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  int64_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = static_cast<int64_t>(static_cast<uint64_t>(bits + 1023) << 52);
  double power;
  std::memcpy(&power, &bits, sizeof power);
  return x > -700.0 ? p * power : 0.0;
}

// sum of exp(x - best) in fp64, sixteen running sums joined in order.
double mass_of(const float* x, int64_t vocab, double best) {
  double sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= vocab; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) sums[lane] += exp64(static_cast<double>(x[i + lane]) - best);
  }
  for (int lane = 0; i < vocab; ++i, ++lane) sums[lane] += exp64(static_cast<double>(x[i]) - best);
  double total = 0.0;
  for (const double sum : sums) total += sum;
  return total;
}

// Sets x to minus infinity but for the `kept` tokens at the front of `ids`.
void keep_only(float* x, const int32_t* ids, float* values, int64_t vocab, int64_t kept) {
  for (int64_t i = 0; i < kept; ++i) values[i] = x[ids[i]];
  std::fill(x, x + vocab, kMinusInfinity);
  for (int64_t i = 0; i < kept; ++i) x[ids[i]] = values[i];
}

// Ids of the most likely tokens that together hold `wanted` of the mass, at the front of `ids`; how many they are.
// Tokens fall into bins by logit; only the bin in which the mass is reached has to be sorted.
int64_t gather_nucleus(const float* x, int32_t* ids, int64_t vocab, float best, double wanted) {
  constexpr int kBins = 1024, kBinsPerUnit = 16;
  double mass[kBins] = {};
  const auto bin_of = [&](float v) { return static_cast<int>(std::min((best - v) * kBinsPerUnit, kBins - 1.0f)); };
  for (int64_t i = 0; i < vocab; ++i) mass[bin_of(x[i])] += exp64(static_cast<double>(x[i]) - best);
  int last = 0;
  double reached = 0.0;
  while (last < kBins - 1 && reached + mass[last] < wanted) reached += mass[last++];
  int64_t kept = 0;
  for (int64_t i = 0; i < vocab; ++i) {
    if (bin_of(x[i]) < last) ids[kept++] = static_cast<int32_t>(i);
  }
  int64_t end = kept;
  for (int64_t i = 0; i < vocab; ++i) {
    if (bin_of(x[i]) == last) ids[end++] = static_cast<int32_t>(i);
  }
  std::sort(ids + kept, ids + end, [x](int32_t a, int32_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); });
  for (; kept < end && reached < wanted; ++kept) reached += exp64(static_cast<double>(x[ids[kept]]) - best);
  return kept;
}

// Sets x of tokens that top-k, top-p and min-p drop to minus infinity. `spare` holds `vocab` floats.
void filter(float* x, int32_t* ids, float* spare, int64_t vocab, float best, int64_t top_k, float top_p, float min_p) {
  constexpr int64_t kHead = 256;  // mostly holds the nucleus
  const int64_t kept_by_k = top_k > 0 && top_k < vocab ? top_k : vocab;
  if (kept_by_k < vocab) {
    sort_largest(x, ids, spare, vocab, kept_by_k);
    keep_only(x, ids, spare, vocab, kept_by_k);
  }
  if (top_p < 1.0f) {
    const double wanted = top_p * mass_of(x, vocab, best);
    const int64_t sorted = std::min(kept_by_k < vocab ? kept_by_k : kHead, vocab);
    if (kept_by_k == vocab) sort_largest(x, ids, spare, vocab, sorted);
    double mass = 0.0;
    int64_t kept = 0;
    for (; kept < sorted && mass < wanted; ++kept) mass += exp64(static_cast<double>(x[ids[kept]]) - best);
    if (mass < wanted && kept_by_k == vocab) kept = gather_nucleus(x, ids, vocab, best, wanted);
    keep_only(x, ids, spare, vocab, kept);
  }
  if (min_p > 0.0f) {
    const float least = best + std::log(min_p);
    for (int64_t i = 0; i < vocab; ++i) x[i] = x[i] >= least ? x[i] : kMinusInfinity;
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
    float *x = scratch.get(3 * vocab), *spare = x + vocab;
    auto* ids = reinterpret_cast<int32_t*>(spare + vocab);
    for (int64_t row = begin; row < end; ++row) {
      const float* in = logits + row * vocab;
      const Peak peak = peak_of(in, vocab);
      if (!std::isfinite(peak.value)) {  // nothing can be drawn from it, and whoever asked must hear of it
        tokens[row] = 0;
        logprobs[row] = kNan;
        continue;
      }
      if (temperature[row] == 0.0f) {
        tokens[row] = peak.at;
        logprobs[row] = 0.0f;
        continue;
      }
      const float scale = 1.0f / temperature[row], best = peak.value * scale;
      for (int64_t i = 0; i < vocab; ++i) x[i] = in[i] * scale;
      if ((top_k[row] > 0 && top_k[row] < vocab) || top_p[row] < 1.0f || min_p[row] > 0.0f) {
        filter(x, ids, spare, vocab, best, top_k[row], top_p[row], min_p[row]);
      }
      // Scaling can make equals of neighbours, and top-k then keeps the first.
      const int64_t top = x[peak.at] == best ? peak.at : peak_of(x, vocab).at;
      tokens[row] = gumbel_argmax(x, vocab, top, static_cast<uint64_t>(seed[row]), static_cast<uint64_t>(position[row]));
      const Sums sums = sums_of(x, 1.0f, vocab);
      logprobs[row] = (x[tokens[row]] - sums.m) - sums.log_sum();
    }
  });
}

}  // namespace LOCKSTEP_ISA
}  // namespace ls
