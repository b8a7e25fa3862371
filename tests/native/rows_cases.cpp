// Cases of simd/rows.cpp.
#include "cases.h"

namespace {
constexpr float kEps = 1e-5f;
constexpr int64_t kVocab = 13;
}  // namespace

void case_rms_norm(Run& run) {
  for (int dtype : kDtypes) {
    for (int w_dtype : kDtypes) {
      for (int64_t d : kWidths) {
        auto x = run.values(3 * d, dtype), w = run.values(d, w_dtype), y = Run::room(3 * d, dtype);
        run.kernels.rms_norm(y.data(), x.data(), w.data(), dtype, w_dtype, 3, d, kEps);
        run.take(y);
      }
    }
  }
}

void case_rms_norm_backward(Run& run) {
  for (int dtype : kDtypes) {
    for (int w_dtype : kDtypes) {
      for (int64_t d : kWidths) {
        auto x = run.values(3 * d, dtype), dy = run.values(3 * d, dtype), w = run.values(d, w_dtype);
        auto dx = Run::room(3 * d, dtype);
        std::vector<float> dw(d);
        auto added = run.values(3 * d, dtype);
        for (bool is_last : {false, true}) {  // of a block: a residual sum's gradient comes in, the weight is frozen
          run.kernels.rms_norm_backward(dx.data(), is_last ? nullptr : dw.data(), dy.data(), x.data(), w.data(),
                                        is_last ? added.data() : nullptr, dtype, w_dtype, 3, d, kEps);
          run.take(dx);
          run.take(dw);
        }
      }
    }
  }
}

void case_rope(Run& run) {
  constexpr int64_t positions = 40, heads = 3;
  for (int dtype : kDtypes) {
    for (int64_t t : kRowCounts) {
      for (int64_t h : {2, 16, 34, 128}) {
        for (int inverse : {0, 1}) {
          const int64_t stride = heads * h + 5;  // tokens lie apart, as slices of one projection do
          auto x = run.values((t - 1) * stride + heads * h, dtype), y = Run::room(t * heads * h, dtype);
          auto cos = run.ordinary(positions * h / 2, -1, 1), sin = run.ordinary(positions * h / 2, -1, 1);
          const auto at = run.integers<int64_t>(t, positions);
          run.kernels.rope(y.data(), x.data(), dtype, at.data(), cos.data(), sin.data(), t, heads, h, stride, inverse);
          run.take(y);
        }
      }
    }
  }
}

void case_silu_mul(Run& run) {
  for (int dtype : kDtypes) {
    for (int64_t count : kWidths) {
      auto gate = run.values(count, dtype, 100), up = run.values(count, dtype), y = Run::room(count, dtype);
      run.kernels.silu_mul(y.data(), gate.data(), up.data(), dtype, count);
      run.take(y);
    }
  }
}

void case_silu_mul_backward(Run& run) {
  for (int dtype : kDtypes) {
    for (int64_t count : kWidths) {
      auto gate = run.values(count, dtype, 100), up = run.values(count, dtype), dy = run.values(count, dtype);
      auto dgate = Run::room(count, dtype), dup = Run::room(count, dtype), y = Run::room(count, dtype);
      run.kernels.silu_mul_backward(dgate.data(), dup.data(), y.data(), dy.data(), gate.data(), up.data(), dtype, 1,
                                    count, count);
      run.take(dgate);
      run.take(dup);
      run.take(y);
    }
  }
}

void case_embedding(Run& run) {
  for (int dtype : kDtypes) {
    for (int w_dtype : kDtypes) {
      for (int64_t d : kWidths) {
        auto w = run.values(kVocab * d, w_dtype), y = Run::room(17 * d, dtype);
        const auto tokens = run.integers<int64_t>(17, kVocab);
        run.kernels.embedding(y.data(), dtype, w.data(), w_dtype, tokens.data(), 17, d);
        run.take(y);
      }
    }
  }
}

void case_embedding_backward(Run& run) {
  for (int dtype : kDtypes) {
    for (int64_t d : kWidths) {
      auto dy = run.values(17 * d, dtype);
      const auto tokens = run.integers<int64_t>(17, kVocab);
      std::vector<float> dw(kVocab * d);
      run.kernels.embedding_backward(dw.data(), dy.data(), dtype, tokens.data(), 17, d);
      run.take(dw);
    }
  }
}

void case_column_sum(Run& run) {
  for (int dtype : kDtypes) {
    for (int64_t d : kWidths) {
      auto x = run.values(17 * d, dtype);
      std::vector<float> sum(d);
      run.kernels.column_sum(sum.data(), x.data(), dtype, 17, d);
      run.take(sum);
    }
  }
}

void case_add(Run& run) {
  for (int dtype : kDtypes) {
    for (int64_t count : kWidths) {
      auto a = run.values(count, dtype), b = run.values(count, dtype), y = Run::room(count, dtype);
      run.kernels.add(y.data(), a.data(), b.data(), dtype, count);
      run.take(y);
    }
  }
}

void case_scale(Run& run) {
  for (int dtype : kDtypes) {
    for (int64_t count : kWidths) {
      auto x = run.values(count, dtype), y = Run::room(count, dtype);
      run.kernels.scale(y.data(), x.data(), dtype, 0.3f, count);
      run.take(y);
    }
  }
}

void case_copy_rows(Run& run) {
  for (int64_t rows : kRowCounts) {
    for (int64_t d : kWidths) {
      constexpr int64_t element = sizeof(float);
      const int64_t from = d + 3, to = d + 5;
      const auto src = run.floats((rows - 1) * from + d);
      auto dst = Run::room((rows - 1) * to + d, ls::kFp32);
      run.kernels.copy_rows(dst.data(), src.data(), rows, d * element, to * element, from * element);
      run.take(dst);
    }
  }
}
