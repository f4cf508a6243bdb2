// Rows as bytes: one warp moves a row, the widest access that its addresses allow.
#ifndef MOE_A2A_DEVICE_COPY_CUH_
#define MOE_A2A_DEVICE_COPY_CUH_

#include <cstdint>

namespace moe_a2a {

constexpr int kWarpThreads = 32;
constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

template <int kBytes>
struct Word;
template <>
struct Word<16> {
  using Type = uint4;
};
template <>
struct Word<8> {
  using Type = uint64_t;
};
template <>
struct Word<4> {
  using Type = uint32_t;
};
template <>
struct Word<2> {
  using Type = uint16_t;
};
template <>
struct Word<1> {
  using Type = uint8_t;
};

// Landed rows change under the compiler's eyes: never through the non-coherent cache.
__device__ inline uint4 load_landed(const uint4* address) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address)
               : "memory");
  return v;
}
template <typename T>
__device__ inline T load_landed(const T* address) {
  return *const_cast<const volatile T*>(address);
}

// Calls `store(word index, word)` for every word of the row, by one warp. `kUnroll` loads are in
// flight per lane.
template <int kBytes, typename Store>
__device__ inline void for_each_word(const char* row, int64_t row_bytes, Store&& store) {
  using W = typename Word<kBytes>::Type;
  constexpr int kUnroll = 8;
  const W* words = reinterpret_cast<const W*>(row);
  const int64_t num_words = row_bytes / kBytes;
  const int lane = threadIdx.x % kWarpThreads;
  int64_t base = lane;
  for (; base + (kUnroll - 1) * kWarpThreads < num_words; base += kUnroll * kWarpThreads) {
    W v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) v[u] = load_landed(words + base + u * kWarpThreads);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) store(base + u * kWarpThreads, v[u]);
  }
  for (; base < num_words; base += kWarpThreads) store(base, load_landed(words + base));
}

// Runs `body` with the access width as a compile-time constant.
template <typename Body>
__device__ inline void with_width(int width, Body&& body) {
  switch (width) {
    case 16: return body(Word<16>{}, std::integral_constant<int, 16>{});
    case 4: return body(Word<4>{}, std::integral_constant<int, 4>{});
    case 2: return body(Word<2>{}, std::integral_constant<int, 2>{});
    default: return body(Word<1>{}, std::integral_constant<int, 1>{});
  }
}

// Copies a row; one warp.
__device__ inline void copy_row(char* to, const char* from, int64_t row_bytes, int width) {
  with_width(width, [&](auto word, auto bytes) {
    using W = typename decltype(word)::Type;
    for_each_word<bytes.value>(from, row_bytes,
                               [&](int64_t i, W v) { reinterpret_cast<W*>(to)[i] = v; });
  });
}

// Writes zeros to a row; one warp.
__device__ inline void zero_row(char* to, int64_t row_bytes, int width) {
  with_width(width, [&](auto word, auto bytes) {
    using W = typename decltype(word)::Type;
    const int64_t num_words = row_bytes / bytes.value;
    for (int64_t i = threadIdx.x % kWarpThreads; i < num_words; i += kWarpThreads) {
      reinterpret_cast<W*>(to)[i] = W{};
    }
  });
}

}  // namespace moe_a2a

#endif  // MOE_A2A_DEVICE_COPY_CUH_
