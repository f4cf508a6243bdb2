#pragma once

#include <cstddef>

namespace moe_a2a {

// Consecutive elements of another object.
template <typename T>
struct Slice {
  T* first = nullptr;
  size_t count = 0;

  size_t size() const { return count; }
  T* begin() const { return first; }
  T* end() const { return first + count; }
  T& operator[](size_t i) const { return first[i]; }
  Slice from(size_t start) const { return {first + start, count - start}; }
};

using Addresses = Slice<char* const>;

}  // namespace moe_a2a
