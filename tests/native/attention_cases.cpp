// Cases of simd/attention.cpp, simd/split_qkv.cpp and simd/attention_backward.cpp.
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

constexpr int kFp32Pages = 0, kBf16Pages = 1, kInt8Pages = 2, kFp8Pages = 3;

// Pages whose earlier tokens hold awkward numbers, of exactly the size they need.
struct Pages {
  Values k, v;
  std::vector<uint8_t> k_codes, v_codes;
  std::vector<float> k_scales, v_scales;
  bool is_coded;

  Pages(Run& run, const Batch& batch, int64_t h, int format) : is_coded(format == kInt8Pages || format == kFp8Pages) {
    const int64_t heads = batch.num_blocks * kKvHeads, k_size = heads * h * kBlock;
    const int64_t v_size = heads * ((h + 15) / 16 * 16) * kBlock;
    if (is_coded) {
      k_codes = run.integers<uint8_t>(k_size, 127);  // 127 would be e4m3's NaN, which is never written
      v_codes = run.integers<uint8_t>(v_size, 127);
      k_scales = run.floats(heads * kBlock, 0.01f);
      v_scales = run.floats(heads * kBlock, 0.01f);
    } else {
      k = run.values(k_size, format == kFp32Pages ? ls::kFp32 : ls::kBf16);
      v = run.values(v_size, format == kFp32Pages ? ls::kFp32 : ls::kBf16);
    }
  }
  void* k_data() { return is_coded ? k_codes.data() : k.data(); }
  void* v_data() { return is_coded ? v_codes.data() : v.data(); }
  void take(Run& run) {
    if (is_coded) {
      run.take_integers(k_codes);
      run.take_integers(v_codes);
      run.take(k_scales);
      run.take(v_scales);
    } else {
      run.take(k);
      run.take(v);
    }
  }
};

constexpr int64_t kPositions = 256, kAllHeads = kHeads + 2 * kKvHeads;

struct Rotation {
  std::vector<float> cos, sin;
  std::vector<int64_t> positions;
  Rotation(Run& run, const Batch& batch, int64_t h)
      : cos(run.ordinary(kPositions * h / 2, -1, 1)), sin(run.ordinary(kPositions * h / 2, -1, 1)) {
    for (int64_t s = 0; s < batch.num_seqs; ++s) {
      for (int32_t t = batch.starts[s]; t < batch.starts[s + 1]; ++t) {
        positions.push_back(batch.contexts[s] + t - batch.starts[s]);
      }
    }
  }
};

}  // namespace

void case_attention(Run& run) {
  const Batch batch;
  for (int dtype : kDtypes) {
    for (int format : {kFp32Pages, kBf16Pages, kInt8Pages, kFp8Pages}) {
      if (dtype == ls::kBf16 && format == kFp32Pages) continue;
      for (int64_t h : {2, 16, 34, 128}) {
        for (int64_t window : {0, 20}) {
          Pages pages(run, batch, h, format);
          const Rotation rotation(run, batch, h);
          const int64_t stride = kAllHeads * h + 5, head_bytes = h * (dtype == ls::kBf16 ? 2 : 4);
          auto qkv = run.values(batch.num_tokens * stride, dtype), norms = run.values(2 * h, ls::kFp32);
          auto* q = static_cast<char*>(qkv.data());
          auto o = Run::room(batch.num_tokens * kHeads * h, dtype);
          std::vector<float> lse(window ? 0 : batch.num_tokens * kHeads);
          const float* q_norm = window ? norms.fp32.data() : nullptr;
          const float* k_norm = window ? norms.fp32.data() + h : nullptr;
          run.kernels.attention(o.data(), window ? nullptr : lse.data(), q, q + kHeads * head_bytes,
                                q + (kHeads + kKvHeads) * head_bytes, dtype, stride, stride, pages.k_data(),
                                pages.v_data(), pages.is_coded ? pages.k_scales.data() : nullptr,
                                pages.is_coded ? pages.v_scales.data() : nullptr, format, rotation.positions.data(),
                                rotation.cos.data(), rotation.sin.data(), q_norm, k_norm, ls::kFp32, 1e-5f,
                                batch.tables.data(), batch.table_stride, batch.starts.data(), batch.contexts.data(),
                                batch.num_tokens, batch.num_seqs, kHeads, kKvHeads, h, 0.3f, window);
          run.take(o);
          run.take(lse);
          pages.take(run);
        }
      }
    }
  }
}

void case_split_qkv(Run& run) {
  const Batch batch;
  const int64_t t = batch.num_tokens;
  for (int dtype : kDtypes) {
    for (int64_t h : {2, 34, 128}) {
      for (bool has_norms : {false, true}) {
        const Rotation rotation(run, batch, h);
        auto qkv = run.values(t * kAllHeads * h, dtype), norms = run.values(2 * h, ls::kFp32);
        auto q = Run::room(t * kHeads * h, dtype), k = Run::room(t * kKvHeads * h, dtype);
        auto v = Run::room(t * kKvHeads * h, dtype);
        run.kernels.split_qkv(q.data(), k.data(), v.data(), qkv.data(), dtype, kAllHeads * h,
                              rotation.positions.data(), rotation.cos.data(), rotation.sin.data(),
                              has_norms ? norms.fp32.data() : nullptr, has_norms ? norms.fp32.data() + h : nullptr,
                              ls::kFp32, 1e-5f, t, kHeads, kKvHeads, h);
        run.take(q);
        run.take(k);
        run.take(v);
      }
    }
  }
}

void case_split_qkv_backward(Run& run) {
  const Batch batch;
  const int64_t t = batch.num_tokens;
  for (int dtype : kDtypes) {
    for (int64_t h : {2, 34, 128}) {
      for (bool has_norms : {false, true}) {
        const Rotation rotation(run, batch, h);
        auto qkv = run.values(t * kAllHeads * h, dtype), norms = run.values(2 * h, ls::kFp32);
        auto dq = run.values(t * kHeads * h, dtype), dk = run.values(t * kKvHeads * h, dtype);
        auto dv = run.values(t * kKvHeads * h, dtype), dqkv = Run::room(t * kAllHeads * h, dtype);
        auto turned = Run::room(has_norms ? t * (kHeads + kKvHeads) * h : 0, dtype);
        std::vector<float> dq_norm(has_norms ? h : 0), dk_norm(has_norms ? h : 0);
        run.kernels.split_qkv_backward(dqkv.data(), dq_norm.data(), dk_norm.data(), turned.data(), dq.data(),
                                       dk.data(), dv.data(), qkv.data(), dtype, kAllHeads * h,
                                       rotation.positions.data(), rotation.cos.data(), rotation.sin.data(),
                                       has_norms ? norms.fp32.data() : nullptr,
                                       has_norms ? norms.fp32.data() + h : nullptr, ls::kFp32, 1e-5f, t, kHeads,
                                       kKvHeads, h);
        run.take(dqkv);
        run.take(dq_norm);
        run.take(dk_norm);
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
