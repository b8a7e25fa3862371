// Cases of simd/attention.cpp and simd/attention_backward.cpp.
#include <algorithm>

#include "cases.h"

namespace {

constexpr int64_t kBlock = 16, kHeads = 6, kKvHeads = 2;

// Three sequences: a first token, a chunk behind a context that ends inside a block, and one across two tiles.
struct Batch {
  std::vector<int32_t> starts{0, 1, 18, 145};
  std::vector<int32_t> contexts{0, 37, 128};
  int64_t num_seqs = 3, num_tokens = 145, table_stride = 17;
  int64_t num_blocks = 1 + 4 + 16;
  std::vector<int32_t> tables = std::vector<int32_t>(num_seqs * table_stride, -1);

  Batch() {
    int32_t next = 0;
    for (int64_t s = 0; s < num_seqs; ++s) {
      const int64_t length = contexts[s] + starts[s + 1] - starts[s];
      for (int64_t b = 0; b < (length + kBlock - 1) / kBlock; ++b) {
        tables[s * table_stride + b] = static_cast<int32_t>((next++ * 8) % num_blocks);  // 8 and 21 have no divisor
      }
    }
  }
};

struct Pages {
  int64_t padded;
  Values k, v;
  Pages(Run& run, const Batch& batch, int64_t h, int dtype)
      : padded((h + 15) / 16 * 16),
        k(run.values(batch.num_blocks * kKvHeads * h * kBlock, dtype)),
        v(run.values(batch.num_blocks * kKvHeads * padded * kBlock, dtype)) {}
};

}  // namespace

void case_kv_write(Run& run) {
  const Batch batch;
  for (int dtype : kDtypes) {
    for (int64_t h : {3, 16, 34, 128}) {
      Pages pages(run, batch, h, dtype);
      auto k = run.values(batch.num_tokens * kKvHeads * h, dtype), v = run.values(batch.num_tokens * kKvHeads * h, dtype);
      run.kernels.kv_write(pages.k.data(), pages.v.data(), k.data(), v.data(), dtype, batch.tables.data(),
                           batch.starts.data(), batch.contexts.data(), batch.num_seqs, kKvHeads, h, pages.padded,
                           batch.table_stride, batch.num_tokens);
      run.take(pages.k);
      run.take(pages.v);
    }
  }
}

void case_attention(Run& run) {
  const Batch batch;
  for (int dtype : kDtypes) {
    for (int64_t h : {3, 16, 34, 128}) {
      for (int64_t window : {0, 20}) {
        Pages pages(run, batch, h, dtype);
        auto q = run.values(batch.num_tokens * kHeads * h, dtype), o = Run::room(batch.num_tokens * kHeads * h, dtype);
        std::vector<float> lse(window ? 0 : batch.num_tokens * kHeads);
        run.kernels.attention(o.data(), window ? nullptr : lse.data(), q.data(), pages.k.data(), pages.v.data(), dtype,
                              batch.tables.data(), batch.starts.data(), batch.contexts.data(), batch.num_seqs, kHeads,
                              kKvHeads, h, pages.padded, batch.table_stride, 0.3f, window);
        run.take(o);
        run.take(lse);
      }
    }
  }
}

void case_attention_backward(Run& run) {
  const Batch batch;
  const int64_t t = batch.num_tokens;
  for (int dtype : kDtypes) {
    // vdpbf16ps flushes denormals, other instruction sets do not.
    if (dtype == ls::kBf16 && run.numbers == Numbers::denormal) continue;
    for (int64_t h : {3, 34, 128}) {
      for (int64_t window : {0, 20}) {
        auto q = run.values(t * kHeads * h, dtype), k = run.values(t * kKvHeads * h, dtype);
        auto v = run.values(t * kKvHeads * h, dtype), o = run.values(t * kHeads * h, dtype);
        auto dout = run.values(t * kHeads * h, dtype);
        const auto lse = run.ordinary(t * kHeads, 1, 8);
        auto dq = Run::room(t * kHeads * h, dtype), dk = Run::room(t * kKvHeads * h, dtype);
        auto dv = Run::room(t * kKvHeads * h, dtype);
        run.kernels.attention_backward(dq.data(), dk.data(), dv.data(), dout.data(), q.data(), k.data(), v.data(),
                                       o.data(), lse.data(), dtype, batch.starts.data(), batch.num_seqs, kHeads,
                                       kKvHeads, h, t, 0.3f, window);
        run.take(dq);
        run.take(dk);
        run.take(dv);
      }
    }
  }
}
