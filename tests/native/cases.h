// What a kernel's test case is given: a function table, awkward numbers in heap buffers of exactly the size asked for,
// and a checksum to put the results in. See main.cpp for what is done with them.
#pragma once
#include <cstdint>
#include <cstring>
#include <vector>

#include "lockstep_native.h"

using bf16 = uint16_t;

enum class Numbers { plain, denormal, infinite, nan };
constexpr Numbers kAllNumbers[] = {Numbers::plain, Numbers::denormal, Numbers::infinite, Numbers::nan};
const char* name_of(Numbers numbers);

constexpr int kDtypes[] = {ls::kFp32, ls::kBf16};
constexpr int64_t kRowCounts[] = {1, 3, 17};
constexpr int64_t kWidths[] = {1, 3, 17, 127, 4099};

// Elements of a dtype known at run time.
struct Values {
  int dtype;
  std::vector<float> fp32;
  std::vector<bf16> half;
  void* data() { return dtype == ls::kBf16 ? static_cast<void*>(half.data()) : static_cast<void*>(fp32.data()); }
};

class Run {
 public:
  Run(const ls::Kernels& table, Numbers kind) : kernels(table), numbers(kind) {}

  const ls::Kernels& kernels;
  const Numbers numbers;

  // Mostly in [-scale, scale); every eleventh is denormal, infinite or NaN if that is the kind.
  std::vector<float> floats(int64_t count, float scale = 2.0f);
  Values values(int64_t count, int dtype, float scale = 2.0f);
  std::vector<float> ordinary(int64_t count, float low, float high);
  template <typename T>
  std::vector<T> integers(int64_t count, int64_t bound) {
    std::vector<T> out(count);
    for (auto& x : out) x = static_cast<T>(next() % static_cast<uint64_t>(bound));
    return out;
  }
  // A buffer for results, filled with a pattern that a kernel which forgets an element leaves behind.
  static Values room(int64_t count, int dtype);

  void take(const std::vector<float>& result);
  void take(const Values& result);
  template <typename T>
  void take_integers(const std::vector<T>& result) {
    add(result.data(), result.size() * sizeof(T));
  }
  uint64_t checksum() const { return sum_; }

 private:
  uint64_t next();
  float number(float scale);
  void add(const void* data, size_t bytes);

  uint64_t state_ = 1;
  uint64_t count_ = 0;
  uint64_t sum_ = 1469598103934665603ull;
};

// One case for each kernel. A kernel in LS_KERNELS without one does not link.
#define LS_DECLARE_CASE(name) void case_##name(Run& run);
LS_KERNELS(LS_DECLARE_CASE)
