// This instruction set's function table.
#include "vec.h"

namespace ls {
namespace LOCKSTEP_ISA {

#define LS_DECLARE(name) std::remove_pointer_t<decltype(Kernels::name)> name;
LS_KERNELS(LS_DECLARE)

}  // namespace LOCKSTEP_ISA

#define LS_JOIN_(a, b) a##b
#define LS_JOIN(a, b) LS_JOIN_(a, b)

const Kernels* LS_JOIN(kernels_, LOCKSTEP_ISA)() {
  static const Kernels table = [] {
    Kernels filled;
#define LS_FILL(name) filled.name = LOCKSTEP_ISA::name;
    LS_KERNELS(LS_FILL)
    return filled;
  }();
  return &table;
}

}  // namespace ls
