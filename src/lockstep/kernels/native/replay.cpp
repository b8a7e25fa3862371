// Runs a recorded list of kernel calls in one native call: a captured step costs no Python between its kernels.
//
// A program is an array of 64-bit slots: for each call the kernel's number, then its arguments in order, each in the
// low bytes of a slot of its own. kernels/capture.py writes it from calls that were made once, so types are those of
// the prototypes; the table of kernels is that of the instruction set in use.
#include <cstring>
#include <utility>

#include "lockstep_native.h"

namespace ls {
namespace {

enum KernelNumber : uint64_t {
#define LS_NUMBER(kernel) k_##kernel,
  LS_KERNELS(LS_NUMBER)
};

template <typename T>
T argument(uint64_t slot) {
  static_assert(sizeof(T) <= sizeof slot, "an argument must fit into a slot");
  T value;
  std::memcpy(&value, &slot, sizeof value);
  return value;
}

template <typename... Args, size_t... Places>
void call_with(void (*kernel)(Args...), const uint64_t* slots, std::index_sequence<Places...>) {
  kernel(argument<Args>(slots[Places])...);
}

// Calls the kernel with the arguments at `slots`; returns where the next call begins.
template <typename... Args>
const uint64_t* call(void (*kernel)(Args...), const uint64_t* slots) {
  call_with(kernel, slots, std::index_sequence_for<Args...>{});
  return slots + sizeof...(Args);
}

}  // namespace
}  // namespace ls

// The number of a kernel within a program, -1 when there is none of that name.
LS_EXPORT int64_t ls_kernel_number(const char* name) {
#define LS_MATCH(kernel) \
  if (!std::strcmp(name, #kernel)) return ls::k_##kernel;
  LS_KERNELS(LS_MATCH)
  return -1;
}

// Makes the first `calls` calls of a program; how many were made (fewer only where a slot names no kernel).
LS_EXPORT int64_t ls_replay(const uint64_t* program, int64_t calls) {
  const ls::Kernels& kernels = ls::kernels_in_use();
  for (int64_t done = 0; done < calls; ++done) {
    switch (*program++) {
#define LS_CASE(kernel)                           \
  case ls::k_##kernel:                            \
    program = ls::call(kernels.kernel, program); \
    break;
      LS_KERNELS(LS_CASE)
      default:
        return done;
    }
  }
  return calls;
}
