// Numbers, buffers and checksums of cases.h.
#include "cases.h"

#include <cmath>
#include <limits>

const char* name_of(Numbers numbers) {
  switch (numbers) {
    case Numbers::plain: return "plain";
    case Numbers::denormal: return "denormal";
    case Numbers::infinite: return "infinite";
    default: return "nan";
  }
}

// splitmix64 (Steele et al. 2014)
uint64_t Run::next() {
  uint64_t z = state_ += 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

float Run::number(float scale) {
  const float ordinary = (static_cast<float>(next() >> 40) * 0x1p-23f - 1.0f) * scale;
  if (numbers == Numbers::plain || ++count_ % 11 != 0) return ordinary;
  switch (numbers) {
    case Numbers::denormal: return std::copysign(1e-40f, ordinary);
    case Numbers::infinite: return std::copysign(std::numeric_limits<float>::infinity(), ordinary);
    default: return std::numeric_limits<float>::quiet_NaN();
  }
}

static bf16 rounded(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<bf16>(x != x ? 0x7FC0 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

std::vector<float> Run::floats(int64_t count, float scale) {
  std::vector<float> out(count);
  for (auto& x : out) x = number(scale);
  return out;
}

Values Run::values(int64_t count, int dtype, float scale) {
  Values out{dtype, {}, {}};
  if (dtype == ls::kFp32) {
    out.fp32 = floats(count, scale);
  } else {
    out.half.resize(count);
    for (auto& x : out.half) x = rounded(number(scale));
  }
  return out;
}

std::vector<float> Run::ordinary(int64_t count, float low, float high) {
  std::vector<float> out(count);
  for (auto& x : out) x = low + (high - low) * static_cast<float>(next() >> 40) * 0x1p-24f;
  return out;
}

Values Run::room(int64_t count, int dtype) {
  Values out{dtype, {}, {}};
  if (dtype == ls::kFp32) {
    out.fp32.assign(count, -12345.0f);
  } else {
    out.half.assign(count, 0xC641);
  }
  return out;
}

void Run::add(const void* data, size_t bytes) {
  const auto* p = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < bytes; ++i) sum_ = (sum_ ^ p[i]) * 1099511628211ull;
}

// Every NaN counts as the same: which payload survives an operation differs between processors.
void Run::take(const std::vector<float>& result) {
  for (float x : result) {
    const float known = x != x ? std::numeric_limits<float>::quiet_NaN() : x;
    add(&known, sizeof known);
  }
}

void Run::take(const Values& result) {
  if (result.dtype == ls::kFp32) return take(result.fp32);
  for (bf16 x : result.half) {
    const bf16 known = (x & 0x7FFF) > 0x7F80 ? 0x7FC0 : x;
    add(&known, sizeof known);
  }
}
