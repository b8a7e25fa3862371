// Cases of simd/logits.cpp.
#include "cases.h"

void case_row_logprobs(Run& run) {
  for (int64_t rows : kRowCounts) {
    for (int64_t vocab : kWidths) {
      const auto logits = run.floats(rows * vocab, 20), scale = run.ordinary(rows, 0.5f, 2.0f);
      const auto targets = run.integers<int64_t>(rows, vocab);
      std::vector<float> logprobs(rows), lse(rows), entropy(rows);
      run.kernels.row_logprobs(logprobs.data(), lse.data(), entropy.data(), logits.data(), targets.data(), scale.data(),
                               rows, vocab);
      run.take(logprobs);
      run.take(lse);
      run.take(entropy);
    }
  }
}

void case_row_softmax_grad(Run& run) {
  for (int dtype : kDtypes) {
    for (int64_t rows : kRowCounts) {
      for (int64_t vocab : kWidths) {
        const auto logits = run.floats(rows * vocab, 20), scale = run.ordinary(rows, 0.5f, 2.0f);
        const auto lse = run.ordinary(rows, 20, 60), dlogprobs = run.floats(rows);
        const auto targets = run.integers<int64_t>(rows, vocab);
        auto dlogits = Run::room(rows * vocab, dtype);
        run.kernels.row_softmax_grad(dlogits.data(), dtype, logits.data(), lse.data(), targets.data(), scale.data(),
                                     dlogprobs.data(), rows, vocab);
        run.take(dlogits);
      }
    }
  }
}

void case_sample(Run& run) {
  constexpr int64_t rows = 12;
  for (int64_t vocab : kWidths) {
    const auto logits = run.floats(rows * vocab, 20);
    std::vector<float> temperature(rows), top_p(rows), min_p(rows);
    std::vector<int64_t> top_k(rows);
    for (int64_t row = 0; row < rows; ++row) {
      temperature[row] = static_cast<float>(row % 3) * 0.6f;
      top_k[row] = row % 4 == 1 ? 7 : row % 4 == 2 ? vocab + 5 : 0;
      top_p[row] = row % 2 ? 0.9f : 1.0f;
      min_p[row] = row % 5 == 4 ? 0.05f : 0.0f;
    }
    const auto seed = run.integers<int64_t>(rows, int64_t{1} << 62), position = run.integers<int64_t>(rows, 1 << 20);
    std::vector<int64_t> tokens(rows);
    std::vector<float> logprobs(rows);
    run.kernels.sample(tokens.data(), logprobs.data(), logits.data(), temperature.data(), top_k.data(), top_p.data(),
                       min_p.data(), seed.data(), position.data(), rows, vocab);
    run.take_integers(tokens);
    run.take(logprobs);
  }
}
