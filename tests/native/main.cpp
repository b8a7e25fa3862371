// Runs every kernel on awkward sizes and numbers, on every instruction set this CPU has and on 1 and 3 threads, and
// fails unless all give the same bits. Under a sanitizer (`make sanitize`) it finds what reads or writes too far; built
// for another architecture, its printed checksums must be those of this one (scripts/check_aarch64.sh).
#include <cstdio>
#include <map>
#include <string>

#include "cases.h"

extern "C" {
void* ls_kernel(const char* name);
const char* ls_isas();
int ls_force_isa(const char* name);
void ls_set_threads(int threads);
}

namespace {

const struct {
  const char* name;
  void (*run)(Run&);
} kCases[] = {
#define LS_LIST_CASE(name) {#name, case_##name},
    LS_KERNELS(LS_LIST_CASE)};

ls::Kernels table() {
  ls::Kernels kernels;
#define LS_FIND(name) kernels.name = reinterpret_cast<decltype(kernels.name)>(ls_kernel(#name));
  LS_KERNELS(LS_FIND)
  return kernels;
}

std::vector<std::string> usable_isas() {
  std::vector<std::string> names;
  const std::string lines = ls_isas();
  for (size_t begin = 0; begin < lines.size();) {
    const size_t end = lines.find('\n', begin), colon = lines.find(": ", begin);
    if (colon + 2 == end) names.push_back(lines.substr(begin, colon - begin));
    begin = end + 1;
  }
  return names;
}

}  // namespace

int main() {
  std::map<std::string, uint64_t> first;
  int failures = 0;
  for (const auto& isa : usable_isas()) {
    ls_force_isa(isa.c_str());
    const ls::Kernels kernels = table();
    for (int threads : {1, 3}) {
      ls_set_threads(threads);
      for (const auto& one : kCases) {
        for (Numbers numbers : kAllNumbers) {
          Run run(kernels, numbers);
          one.run(run);
          const std::string name = std::string(one.name) + " " + name_of(numbers);
          const auto [found, is_new] = first.emplace(name, run.checksum());
          if (!is_new && found->second != run.checksum()) {
            std::fprintf(stderr, "%s: other bits on %s with %d threads\n", name.c_str(), isa.c_str(), threads);
            ++failures;
          }
        }
      }
    }
    std::fprintf(stderr, "ran %s\n", isa.c_str());
  }
  for (const auto& [name, sum] : first) std::printf("%-32s %016llx\n", name.c_str(), static_cast<unsigned long long>(sum));
  return failures != 0;
}
