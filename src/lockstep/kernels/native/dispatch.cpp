// Chooses the instruction set when the library loads and forwards the C ABI to its function table.
#include <cstring>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <initializer_list>

#include "lockstep_native.h"

namespace ls {

const Kernels* kernels_portable();
#if defined(LOCKSTEP_HAVE_X86)
const Kernels* kernels_avx2();
const Kernels* kernels_avx512();
const Kernels* kernels_avx512bf16();
#endif

namespace {

struct Choice {
  const char* name;
  const Kernels* kernels;
};

bool supported(const char* name) {
  if (!std::strcmp(name, "portable")) return true;
#if defined(LOCKSTEP_HAVE_X86)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (!std::strcmp(name, "avx2")) return avx2;
  if (!std::strcmp(name, "avx512")) return avx512;
  if (!std::strcmp(name, "avx512bf16")) {
    return avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
  }
#endif
  return false;
}

const Kernels* table_of(const char* name) {
#if defined(LOCKSTEP_HAVE_X86)
  if (!std::strcmp(name, "avx512bf16")) return kernels_avx512bf16();
  if (!std::strcmp(name, "avx512")) return kernels_avx512();
  if (!std::strcmp(name, "avx2")) return kernels_avx2();
#endif
  return kernels_portable();
}

Choice best() {
  for (const char* name : {"avx512bf16", "avx512", "avx2"}) {
    if (supported(name)) return {name, table_of(name)};
  }
  return {"portable", table_of("portable")};
}

Choice& chosen() {
  static Choice choice = best();
  return choice;
}

const Kernels& kernels() { return *chosen().kernels; }

}  // namespace
}  // namespace ls

LS_EXPORT int ls_abi_version() { return 1; }
LS_EXPORT const char* ls_isa() { return ls::chosen().name; }

// 0 when the CPU has it, 1 when not (nothing changes then).
LS_EXPORT int ls_force_isa(const char* name) {
  for (const char* known : {"avx512bf16", "avx512", "avx2", "portable"}) {
    if (std::strcmp(name, known) == 0 && ls::supported(known)) {
      ls::chosen() = {known, ls::table_of(known)};
      return 0;
    }
  }
  return 1;
}

// Asks for 2 MiB pages for the aligned part of a buffer that has not been touched yet; a refusal does no harm.
LS_EXPORT void ls_advise_huge_pages(void* data, int64_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / kHugePage * kHugePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

// Each exported ls_<op> takes exactly what the table's <op> takes.
#define LS_FORWARD(op, parameters, arguments) \
  LS_EXPORT void ls_##op parameters { ls::kernels().op arguments; }

LS_FORWARD(pack,
           (void* dst, int dst_dtype, const void* src, int src_dtype, int64_t n, int64_t k, int64_t stride_n,
            int64_t stride_k),
           (dst, dst_dtype, src, src_dtype, n, k, stride_n, stride_k))
LS_FORWARD(gemm,
           (void* c, int c_dtype, const void* a, int dtype, const void* packed, const float* bias, int64_t m,
            int64_t n, int64_t k, int64_t lda, int64_t ldc, int segments, int accumulate),
           (c, c_dtype, a, dtype, packed, bias, m, n, k, lda, ldc, segments, accumulate))
LS_FORWARD(rms_norm,
           (void* y, const void* x, const void* w, int dtype, int w_dtype, int64_t t, int64_t d, float eps),
           (y, x, w, dtype, w_dtype, t, d, eps))
LS_FORWARD(rms_norm_backward,
           (void* dx, float* dw, const void* dy, const void* x, const void* w, int dtype, int w_dtype, int64_t t,
            int64_t d, float eps),
           (dx, dw, dy, x, w, dtype, w_dtype, t, d, eps))
LS_FORWARD(rope,
           (void* y, const void* x, int dtype, const int64_t* positions, const float* cos, const float* sin, int64_t t,
            int64_t n, int64_t h, int64_t stride_t, int inverse),
           (y, x, dtype, positions, cos, sin, t, n, h, stride_t, inverse))
LS_FORWARD(silu_mul, (void* y, const void* gate, const void* up, int dtype, int64_t count),
           (y, gate, up, dtype, count))
LS_FORWARD(silu_mul_backward,
           (void* dgate, void* dup, const void* dy, const void* gate, const void* up, int dtype, int64_t count),
           (dgate, dup, dy, gate, up, dtype, count))
LS_FORWARD(embedding,
           (void* y, int dtype, const void* w, int w_dtype, const int64_t* tokens, int64_t t, int64_t d),
           (y, dtype, w, w_dtype, tokens, t, d))
LS_FORWARD(embedding_backward,
           (float* dw, const void* dy, int dtype, const int64_t* tokens, int64_t t, int64_t d),
           (dw, dy, dtype, tokens, t, d))
LS_FORWARD(column_sum, (float* sum, const void* x, int dtype, int64_t t, int64_t d), (sum, x, dtype, t, d))
LS_FORWARD(kv_write,
           (void* k_pages, void* v_pages, const void* k, const void* v, int dtype, const int32_t* tables,
            const int32_t* starts, const int32_t* contexts, int64_t num_seqs, int64_t num_kv, int64_t head_dim,
            int64_t padded_dim, int64_t table_stride, int64_t num_tokens),
           (k_pages, v_pages, k, v, dtype, tables, starts, contexts, num_seqs, num_kv, head_dim, padded_dim,
            table_stride, num_tokens))
LS_FORWARD(attention,
           (void* o, float* lse, const void* q, const void* k_pages, const void* v_pages, int dtype,
            const int32_t* tables, const int32_t* starts, const int32_t* contexts, int64_t num_seqs,
            int64_t num_heads, int64_t num_kv, int64_t head_dim, int64_t padded_dim, int64_t table_stride, float scale,
            int64_t window),
           (o, lse, q, k_pages, v_pages, dtype, tables, starts, contexts, num_seqs, num_heads, num_kv, head_dim,
            padded_dim, table_stride, scale, window))
LS_FORWARD(attention_backward,
           (void* dq, void* dk, void* dv, const void* dout, const void* q, const void* k, const void* v, const void* o,
            const float* lse, int dtype, const int32_t* starts, int64_t num_seqs, int64_t num_heads, int64_t num_kv,
            int64_t head_dim, int64_t num_tokens, float scale, int64_t window),
           (dq, dk, dv, dout, q, k, v, o, lse, dtype, starts, num_seqs, num_heads, num_kv, head_dim, num_tokens,
            scale, window))
LS_FORWARD(row_logprobs,
           (float* logprobs, float* lse, float* entropy, const float* logits, const int64_t* targets,
            const float* inverse_temperature, int64_t rows, int64_t vocab),
           (logprobs, lse, entropy, logits, targets, inverse_temperature, rows, vocab))
LS_FORWARD(row_softmax_grad,
           (void* dlogits, int dtype, const float* logits, const float* lse, const int64_t* targets,
            const float* inverse_temperature, const float* dlogprobs, int64_t rows, int64_t vocab),
           (dlogits, dtype, logits, lse, targets, inverse_temperature, dlogprobs, rows, vocab))
LS_FORWARD(sample,
           (int64_t* tokens, float* logprobs, const float* logits, const float* temperature, const int64_t* top_k,
            const float* top_p, const float* min_p, const int64_t* seed, const int64_t* position, int64_t rows,
            int64_t vocab),
           (tokens, logprobs, logits, temperature, top_k, top_p, min_p, seed, position, rows, vocab))
