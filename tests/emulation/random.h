#pragma once

#include <cstdint>
#include <random>

namespace emulation {

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}

  uint32_t next() { return static_cast<uint32_t>(engine_()); }
  int below(int64_t n) { return static_cast<int>(engine_() % static_cast<uint64_t>(n)); }
  int between(int first, int last) { return first + below(last - first + 1); }
  bool one_in(int n) { return below(n) == 0; }

 private:
  std::mt19937_64 engine_;
};

}  // namespace emulation
