// C ABI of Lockstep's native CPU kernels: pointers, sizes and strides; no torch, no Python.
//
// dtype codes: 0 fp32, 1 bf16 (as uint16_t). Sizes and strides count elements, not bytes. Every row's result depends on
// that row alone: not on the number of rows, their order, or the number of threads.
#pragma once
#include <cstdint>

#define LS_EXPORT extern "C" __attribute__((visibility("default")))

namespace ls {

enum Dtype : int { kFp32 = 0, kBf16 = 1 };

// One function table for each instruction set. A new kernel is a field here, a name in LS_KERNELS, a definition in
// simd/ and a prototype in native_library.py.
struct Kernels {
  // Weights into panels for `gemm`. A piece fills columns from first_column on: n of them, or every other 16 when
  // interleaved (gate at 0 and up at 16 of a gated product); and inputs first_input (even) to first_input + k of
  // num_inputs. pack_quantised: values are bytes (n, k); scales and shifts (zero points or minimums) are (n, groups) in
  // the format's types, one fp32 a row per channel.
  void (*pack)(void* dst, int dst_dtype, const void* src, int src_dtype, int64_t n, int64_t k, int64_t stride_n,
               int64_t stride_k, int64_t first_column, int interleaved, int64_t first_input, int64_t num_inputs);
  void (*pack_quantised)(void* dst, int64_t format, const void* values, const void* scales, const void* shifts,
                         const void* super_scales, const void* super_minimums, int64_t n, int64_t k,
                         int64_t first_column, int interleaved);
  // y (m, n) = epilogue(norm?(x) W^T + bias). norm_weight (k, x's dtype) or null; format: simd/gemm.h; bias: fp32, one
  // a packed column, or null; epilogue: 0 store, 1 add to y, 2 add the residual (y's dtype), 3 silu(gate) * up.
  void (*gemm)(void* y, int y_dtype, int64_t ldy, const void* x, int dtype, int64_t ldx, const void* norm_weight,
               float eps, const void* packed, int64_t format, const float* bias, const void* residual,
               int64_t ld_residual, int64_t m, int64_t n, int64_t k, int segments, int epilogue);
  void (*quantise_rows)(void* q, float* scales, const void* x, int dtype, int64_t t, int64_t k, int64_t stride);
  void (*rms_norm)(void* y, const void* x, const void* w, int dtype, int w_dtype, int64_t t, int64_t d, float eps);
  // dx = gradient + added (null: nothing); dw null: not wanted.
  void (*rms_norm_backward)(void* dx, float* dw, const void* dy, const void* x, const void* w, const void* added,
                            int dtype, int w_dtype, int64_t t, int64_t d, float eps);
  void (*rope)(void* y, const void* x, int dtype, const int64_t* positions, const float* cos, const float* sin,
               int64_t t, int64_t n, int64_t h, int64_t stride_t, int inverse);
  void (*silu_mul)(void* y, const void* gate, const void* up, int dtype, int64_t count);
  // Rows of `width` elements, those of dgate and dup `stride` apart; y: silu(gate) * up once more, or null.
  void (*silu_mul_backward)(void* dgate, void* dup, void* y, const void* dy, const void* gate, const void* up, int dtype,
                            int64_t rows, int64_t width, int64_t stride);
  void (*embedding)(void* y, int dtype, const void* w, int w_dtype, const int64_t* tokens, int64_t t, int64_t d);
  // Rows of a packed quantised weight (n, k), dequantised.
  void (*embedding_quantised)(void* y, int dtype, const void* packed, int64_t format, const int64_t* tokens, int64_t t,
                              int64_t k);
  void (*scale)(void* y, const void* x, int dtype, float factor, int64_t count);
  void (*embedding_backward)(float* dw, const void* dy, int dtype, const int64_t* tokens, int64_t t, int64_t d);
  void (*add)(void* y, const void* a, const void* b, int dtype, int64_t count);
  void (*copy_rows)(void* dst, const void* src, int64_t rows, int64_t row_bytes, int64_t dst_stride_bytes,
                    int64_t src_stride_bytes);
  void (*column_sum)(float* sum, const void* x, int dtype, int64_t t, int64_t d);
  void (*split_qkv)(void* q, void* k, void* v, const void* qkv, int dtype, int64_t stride, const int64_t* positions,
                    const float* cos, const float* sin, const void* q_norm, const void* k_norm, int norm_dtype,
                    float eps, int64_t num_tokens, int64_t num_heads, int64_t num_kv, int64_t head_dim);
  void (*split_qkv_backward)(void* dqkv, float* dq_norm, float* dk_norm, void* turned, const void* dq,
                             const void* dk, const void* dv, const void* qkv, int dtype, int64_t stride,
                             const int64_t* positions, const float* cos, const float* sin, const void* q_norm,
                             const void* k_norm, int norm_dtype, float eps, int64_t num_tokens, int64_t num_heads,
                             int64_t num_kv, int64_t head_dim);
  // Keys and values go to their pages, then all rows attend. kv_format: 0 fp32, 1 bf16, 2 int8, 3 fp8 e4m3.
  void (*attention)(void* o, float* lse, const void* q, const void* k, const void* v, int dtype, int64_t q_stride,
                    int64_t kv_stride, void* k_pages, void* v_pages, float* k_scales, float* v_scales, int kv_format,
                    const int64_t* positions, const float* cos, const float* sin, const void* q_norm,
                    const void* k_norm, int norm_dtype, float eps, const int32_t* tables, int64_t table_stride,
                    const int32_t* starts, const int32_t* contexts, int64_t num_tokens, int64_t num_seqs,
                    int64_t num_heads, int64_t num_kv, int64_t head_dim, float scale, int64_t window);
  void (*attention_backward)(void* dq, void* dk, void* dv, const void* dout, const void* q, const void* k,
                             const void* v, const void* o, const float* lse, int dtype, const int32_t* starts,
                             int64_t num_seqs, int64_t num_heads, int64_t num_kv, int64_t head_dim,
                             int64_t num_tokens, float scale, int64_t window);
  void (*row_logprobs)(float* logprobs, float* lse, float* entropy, const float* logits, const int64_t* targets,
                       const float* inverse_temperature, int64_t rows, int64_t vocab);
  void (*row_softmax_grad)(void* dlogits, int dtype, const float* logits, const float* lse, const int64_t* targets,
                           const float* inverse_temperature, const float* dlogprobs, int64_t rows, int64_t vocab);
  void (*sample)(int64_t* tokens, float* logprobs, const float* logits, const float* temperature,
                 const int64_t* top_k, const float* top_p, const float* min_p, const int64_t* seed,
                 const int64_t* position, int64_t rows, int64_t vocab);
  void (*grad_weight)(float* dw, const void* dy, const void* x, int dtype, int64_t t, int64_t n, int64_t k, int64_t ldy,
                      int64_t ldx, int accumulate);
  void (*adamw)(float* p, float* m, float* v, const float* g, int64_t count, float grad_scale, float decay,
                float weight1, float beta2, float weight2, float step_size, float root_correction2, float eps);
  void (*sum_of_squares)(double* sums, const float* x, int64_t count);
};

// Every kernel by name: what simd/table.cpp fills in and dispatch.cpp hands out.
#define LS_KERNELS(X) \
  X(pack) X(pack_quantised) X(gemm) X(quantise_rows) X(rms_norm) X(rms_norm_backward) X(rope) X(silu_mul) \
  X(silu_mul_backward) X(embedding) X(embedding_quantised) X(scale) \
  X(embedding_backward) X(add) X(copy_rows) X(column_sum) X(split_qkv) X(split_qkv_backward) X(attention) \
  X(attention_backward) X(row_logprobs) X(row_softmax_grad) X(sample) X(grad_weight) X(adamw) X(sum_of_squares)

// The kernels of the instruction set in use.
const Kernels& kernels_in_use();

// Calls fn(context, begin, end) over [0, count) in pieces of at most `grain`, on the pool's threads and the caller's.
void parallel_for(int64_t count, int64_t grain, void (*fn)(void*, int64_t, int64_t), void* context);
int num_threads();

}  // namespace ls
