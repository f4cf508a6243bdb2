// A GuardedArray detects accesses to the page after it, and changes of the bytes before it. The
// distance in memory between an array of rank r and the same array of rank r + 1 is the same for
// all r, as on a device that the ranks share.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "layout.h"

namespace emulation {

// While this object lives, arrays that the thread makes are in the memory of `rank`. All ranks must
// make arrays of the same sizes in the same order.
class InMemoryOf {
 public:
  explicit InMemoryOf(int rank) : previous_(current()) { current() = rank; }
  InMemoryOf(const InMemoryOf&) = delete;
  ~InMemoryOf() { current() = previous_; }

  // Returns null without an InMemoryOf object.
  static char* reserve(size_t bytes) {
    using moe_a2a::kMaxRanks;
    constexpr size_t kBytesOfRank = size_t{1} << 30;
    static std::atomic<size_t> used[kMaxRanks];
    static char* const memory =
        static_cast<char*>(mmap(nullptr, kMaxRanks * kBytesOfRank, PROT_NONE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (current() < 0) return nullptr;
    const size_t at = used[current()].fetch_add(bytes);
    if (at + bytes > kBytesOfRank) std::abort();
    return memory + current() * kBytesOfRank + at;
  }

 private:
  static int& current() {
    static thread_local int rank = -1;
    return rank;
  }
  const int previous_;
};

class GuardedArray {
 public:
  // The array starts `skew` bytes before a multiple of `alignment`.
  explicit GuardedArray(size_t bytes, size_t alignment = 16, size_t skew = 0) : bytes_(bytes) {
    const auto page = static_cast<size_t>(getpagesize());
    usable_ = (bytes + kFront + alignment + skew + page - 1) / page * page;
    char* at = InMemoryOf::reserve(usable_ + page);
    void* memory = mmap(at, usable_ + page, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | (at == nullptr ? 0 : MAP_FIXED), -1, 0);
    if (memory == MAP_FAILED) {
      std::perror("mmap");
      std::exit(2);
    }
    map_ = static_cast<char*>(memory);
    mapped_ = usable_ + page;
    mprotect(map_ + usable_, page, PROT_NONE);
    std::memset(map_, kUntouched, usable_);
    data_ = map_ + (usable_ - bytes) / alignment * alignment - skew;
  }
  GuardedArray(const GuardedArray&) = delete;
  ~GuardedArray() { munmap(map_, mapped_); }

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  static bool is_untouched(const char* first, const char* last) {
    for (const char* p = first; p < last; ++p) {
      if (static_cast<unsigned char>(*p) != kUntouched) return false;
    }
    return true;
  }
  bool is_intact_around() const {
    return is_untouched(data_ - kFront, data_) && is_untouched(data_ + bytes_, map_ + usable_);
  }

 private:
  static constexpr size_t kFront = 64;
  static constexpr unsigned char kUntouched = 0xA5;
  size_t bytes_, usable_ = 0, mapped_ = 0;
  char *map_ = nullptr, *data_ = nullptr;
};

using Array = std::shared_ptr<GuardedArray>;

inline Array make_array(size_t bytes, size_t alignment = 16, size_t skew = 0) {
  return std::make_shared<GuardedArray>(bytes, alignment, skew);
}
inline Array make_array(const std::vector<int32_t>& values) {
  Array array = make_array(values.size() * sizeof(int32_t), sizeof(int32_t));
  std::memcpy(array->data(), values.data(), array->bytes());
  return array;
}

}  // namespace emulation
