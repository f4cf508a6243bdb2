// Copies and zeroes rows as bytes. Loads and stores are as large as a row's alignment allows.
#pragma once

#include <cstdint>

#include "device/ptx.cuh"
#include "device/team.cuh"
#include "lists.h"
#include "params.h"

namespace moe_a2a {

template <int kBytes>
struct Word;
template <>
struct Word<16> : Type<uint4> {};
template <>
struct Word<8> : Type<uint64_t> {};
template <>
struct Word<4> : Type<uint32_t> {};
template <>
struct Word<2> : Type<uint16_t> {};
template <>
struct Word<1> : Type<uint8_t> {};

// These loads avoid the non-coherent cache, because peers write the rows while the kernel runs.
__device__ inline uint4 load_landed(const uint4* address) { return load_no_allocate(address); }
template <typename T>
__device__ inline T load_landed(const T* address) {
  return *const_cast<const volatile T*>(address);
}

template <typename Body>
__device__ inline void with_width(int width, Body&& body) {
  switch (width) {
    case 16: return body(Word<16>{});
    case 4: return body(Word<4>{});
    case 2: return body(Word<2>{});
    case 1: return body(Word<1>{});
    default: reject_value();
  }
}

// In each round, a thread loads kUnroll words of a row and then calls `deliver(write)`. `deliver`
// calls `write(to)` with the address of every destination row.
template <typename W, typename Deliver>
__device__ inline void read_row(const Team& team, const char* row, int64_t row_bytes,
                                Deliver&& deliver) {
  constexpr int kUnroll =
      sizeof(W) == kVectorBytes ? Tuning::kLoadsOfVectors : Tuning::kLoadsOfWords;
  const W* words = reinterpret_cast<const W*>(row);
  const int64_t num_words = row_bytes / sizeof(W);
  // All lanes of a warp have the same number of rounds, because `deliver` may use warp shuffles.
  for (int64_t base = 0; base < num_words; base += kUnroll * team.threads()) {
    W v[kUnroll];
    const int64_t first = base + team.thread();
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = first + u * team.threads();
      if (i < num_words) v[u] = load_landed(words + i);
    }
    deliver([&](W* to) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t i = first + u * team.threads();
        if (i < num_words) to[i] = v[u];
      }
    });
  }
}

__device__ inline void copy_row(const Team& team, char* to, const char* from, int64_t row_bytes,
                                int width) {
  with_width(width, [&](auto word) {
    using W = typename decltype(word)::type;
    read_row<W>(team, from, row_bytes, [&](auto&& write) { write(reinterpret_cast<W*>(to)); });
  });
}

// Copies the row `from` to row `row` of `array.out`, for each lane in the mask `choices`.
__device__ inline void spread_row(const MovedArray& array, const Team& team, const char* from,
                                  int row, uint32_t choices) {
  with_width(array.width, [&](auto word) {
    using W = typename decltype(word)::type;
    read_row<W>(team, from, array.row_bytes, [&](auto&& write) {
      for (uint32_t left = choices; left != 0; left &= left - 1) {
        const int64_t to_row = __shfl_sync(kAllLanes, row, __ffs(left) - 1);
        write(reinterpret_cast<W*>(array.out + to_row * array.row_bytes));
      }
    });
  });
}

__device__ inline void zero_row(const Team& team, char* to, int64_t row_bytes, int width) {
  with_width(width, [&](auto word) {
    using W = typename decltype(word)::type;
    const int64_t num_words = row_bytes / sizeof(W);
    for (int64_t i = team.thread(); i < num_words; i += team.threads()) {
      reinterpret_cast<W*>(to)[i] = W{};
    }
  });
}

// Copies one entry of a choice array, or writes zeros if `from` is null. One thread calls it.
__device__ inline void copy_choice(char* to, const char* from, int64_t bytes, int width) {
  with_width(width, [&](auto word) {
    using W = typename decltype(word)::type;
    for (int64_t i = 0; i < bytes / static_cast<int64_t>(sizeof(W)); ++i) {
      reinterpret_cast<W*>(to)[i] =
          from == nullptr ? W{} : load_landed(reinterpret_cast<const W*>(from) + i);
    }
  });
}

}  // namespace moe_a2a
