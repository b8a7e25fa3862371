// This instruction set's function table.
#include "vec.h"

namespace ls {
namespace LOCKSTEP_ISA {

std::remove_pointer_t<decltype(Kernels::pack)> pack;
std::remove_pointer_t<decltype(Kernels::gemm)> gemm;
std::remove_pointer_t<decltype(Kernels::rms_norm)> rms_norm;
std::remove_pointer_t<decltype(Kernels::rms_norm_backward)> rms_norm_backward;
std::remove_pointer_t<decltype(Kernels::rope)> rope;
std::remove_pointer_t<decltype(Kernels::silu_mul)> silu_mul;
std::remove_pointer_t<decltype(Kernels::silu_mul_backward)> silu_mul_backward;
std::remove_pointer_t<decltype(Kernels::embedding)> embedding;
std::remove_pointer_t<decltype(Kernels::embedding_backward)> embedding_backward;
std::remove_pointer_t<decltype(Kernels::column_sum)> column_sum;
std::remove_pointer_t<decltype(Kernels::kv_write)> kv_write;
std::remove_pointer_t<decltype(Kernels::attention)> attention;
std::remove_pointer_t<decltype(Kernels::attention_backward)> attention_backward;
std::remove_pointer_t<decltype(Kernels::row_logprobs)> row_logprobs;
std::remove_pointer_t<decltype(Kernels::row_softmax_grad)> row_softmax_grad;
std::remove_pointer_t<decltype(Kernels::sample)> sample;

}  // namespace LOCKSTEP_ISA

#define LS_JOIN_(a, b) a##b
#define LS_JOIN(a, b) LS_JOIN_(a, b)

const Kernels* LS_JOIN(kernels_, LOCKSTEP_ISA)() {
  static const Kernels table{
      LOCKSTEP_ISA::pack,           LOCKSTEP_ISA::gemm,         LOCKSTEP_ISA::rms_norm, LOCKSTEP_ISA::rms_norm_backward,
      LOCKSTEP_ISA::rope,           LOCKSTEP_ISA::silu_mul,     LOCKSTEP_ISA::silu_mul_backward,
      LOCKSTEP_ISA::embedding,      LOCKSTEP_ISA::embedding_backward, LOCKSTEP_ISA::column_sum,
      LOCKSTEP_ISA::kv_write,       LOCKSTEP_ISA::attention,    LOCKSTEP_ISA::attention_backward,
      LOCKSTEP_ISA::row_logprobs,   LOCKSTEP_ISA::row_softmax_grad, LOCKSTEP_ISA::sample,
  };
  return &table;
}

}  // namespace ls
