// Chooses the instruction set when the library loads and hands out its kernels by name.
#include <cstring>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "lockstep_native.h"

namespace ls {

const Kernels* kernels_portable();
const Kernels* kernels_avx2();
const Kernels* kernels_avx512();
const Kernels* kernels_avx512bf16();

namespace {

struct Choice {
  const char* name;
  const Kernels* kernels;
};

// What this library was built with, best first.
const struct {
  const char* name;
  const Kernels* (*kernels)();
} kVariants[] = {
#if defined(LOCKSTEP_HAVE_AVX512BF16)
    {"avx512bf16", kernels_avx512bf16},
#endif
#if defined(LOCKSTEP_HAVE_AVX512)
    {"avx512", kernels_avx512},
#endif
#if defined(LOCKSTEP_HAVE_AVX2)
    {"avx2", kernels_avx2},
#endif
    {"portable", kernels_portable}};

bool supported(const char* name) {
  if (!std::strcmp(name, "portable")) return true;
#if defined(__x86_64__)
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

Choice best() {
  for (const auto& variant : kVariants) {
    if (supported(variant.name)) return {variant.name, variant.kernels()};
  }
  return {"portable", kernels_portable()};
}

Choice& chosen() {
  static Choice choice = best();
  return choice;
}

const Kernels& kernels() { return *chosen().kernels; }

}  // namespace
}  // namespace ls

LS_EXPORT int ls_abi_version() { return 2; }
LS_EXPORT const char* ls_isa() { return ls::chosen().name; }

// 0 when the library and the CPU have it, 1 when not (nothing changes then).
LS_EXPORT int ls_force_isa(const char* name) {
  for (const auto& variant : ls::kVariants) {
    if (std::strcmp(name, variant.name) == 0 && ls::supported(name)) {
      ls::chosen() = {variant.name, variant.kernels()};
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

// Address of a kernel for the instruction set in use, null when there is none of that name.
LS_EXPORT void* ls_kernel(const char* name) {
#define LS_FIND(kernel) \
  if (!std::strcmp(name, #kernel)) return reinterpret_cast<void*>(kernels().kernel);
  using ls::kernels;
  LS_KERNELS(LS_FIND)
  return nullptr;
}
