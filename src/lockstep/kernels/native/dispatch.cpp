// Chooses the instruction set when the library loads and hands out its kernels by name.
#include <cstdlib>
#include <cstring>
#include <string>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "lockstep_native.h"

namespace ls {

const Kernels* kernels_portable();
const Kernels* kernels_avx2();
const Kernels* kernels_avx512();
const Kernels* kernels_avx512vnni();
const Kernels* kernels_avx512bf16();

namespace {

using Missing = std::string;  // CPU features, separated by spaces; empty: none

#if defined(__x86_64__)
#define LS_NEED(feature) \
  if (!__builtin_cpu_supports(feature)) missing += missing.empty() ? feature : " " feature;

[[maybe_unused]] Missing missing_for_avx2() {
  Missing missing;
  LS_NEED("avx2") LS_NEED("fma") LS_NEED("f16c")
  return missing;
}
[[maybe_unused]] Missing missing_for_avx512() {
  Missing missing = missing_for_avx2();
  LS_NEED("avx512f") LS_NEED("avx512bw") LS_NEED("avx512dq") LS_NEED("avx512vl")
  return missing;
}
[[maybe_unused]] Missing missing_for_avx512vnni() {
  Missing missing = missing_for_avx512();
  LS_NEED("avx512vnni")
  return missing;
}
[[maybe_unused]] Missing missing_for_avx512bf16() {
  Missing missing = missing_for_avx512vnni();
  LS_NEED("avx512bf16")
  return missing;
}
#undef LS_NEED
#endif
Missing missing_for_portable() { return {}; }

struct Variant {
  const char* name;
  const Kernels* (*kernels)();
  Missing (*missing)();  // what this CPU lacks of the features it is compiled for
};

// What this library was built with, best first. The features are those of FLAGS_<name> in CMakeLists.txt.
const Variant kVariants[] = {
#if defined(LOCKSTEP_HAVE_AVX512BF16)  // Cooper Lake, Sapphire Rapids, Zen 4
    {"avx512bf16", kernels_avx512bf16, missing_for_avx512bf16},
#endif
#if defined(LOCKSTEP_HAVE_AVX512VNNI)  // Cascade Lake, Ice Lake
    {"avx512vnni", kernels_avx512vnni, missing_for_avx512vnni},
#endif
#if defined(LOCKSTEP_HAVE_AVX512)  // Skylake-X
    {"avx512", kernels_avx512, missing_for_avx512},
#endif
#if defined(LOCKSTEP_HAVE_AVX2)
    {"avx2", kernels_avx2, missing_for_avx2},
#endif
    {"portable", kernels_portable, missing_for_portable}};

const Variant& best() {
#if defined(__x86_64__)
  __builtin_cpu_init();
#endif
  for (const auto& variant : kVariants) {
    if (variant.missing().empty()) return variant;
  }
  std::abort();  // portable lacks nothing
}

const Variant*& chosen() {
  static const Variant* variant = &best();
  return variant;
}

}  // namespace

const Kernels& kernels_in_use() { return *chosen()->kernels(); }

}  // namespace ls

LS_EXPORT int ls_abi_version() { return 5; }
LS_EXPORT const char* ls_isa() { return ls::chosen()->name; }

// The instruction sets of this library, best first, as "name: features this CPU lacks" lines; nothing after the colon
// where it runs.
LS_EXPORT const char* ls_isas() {
  static const std::string lines = [] {
    std::string all;
    for (const auto& variant : ls::kVariants) all += std::string(variant.name) + ": " + variant.missing() + "\n";
    return all;
  }();
  return lines.c_str();
}

// 0 when the library and the CPU have it, 1 when not (nothing changes then).
LS_EXPORT int ls_force_isa(const char* name) {
  for (const auto& variant : ls::kVariants) {
    if (std::strcmp(name, variant.name) == 0 && variant.missing().empty()) {
      ls::chosen() = &variant;
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
  if (!std::strcmp(name, #kernel)) return reinterpret_cast<void*>(ls::kernels_in_use().kernel);
  LS_KERNELS(LS_FIND)
  return nullptr;
}
