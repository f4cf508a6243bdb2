// The names that nvcc knows without an #include. Every source of the emulator is compiled with
// `-include cuda_runtime.h`.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "block.h"
#include "cuda_runtime_api.h"
#include "site.h"

// ---- Keywords.

#define __device__
#define __host__
#define __global__
#define __shared__ static thread_local  // a block is a thread of the operating system
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __noinline__
#define __forceinline__ inline
#define __builtin_assume(x) ((void)0)
#define __isShared(pointer) true

// ---- The index of a thread.

#define threadIdx (emulation::Index{emulation::thread_index(), 0})
#define blockIdx (emulation::block_index())
#define blockDim (emulation::Index{emulation::block_threads(), 1})
#define gridDim (emulation::grid_blocks())

// ---- Vectors.

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }

// ---- Barriers. A barrier does nothing if the run leaves out its `site`.

inline void __syncwarp(emulation::Site site = emulation::Site::here()) {
  if (!emulation::is_left_out(site)) emulation::sync_warp();
}
inline void __syncthreads(emulation::Site site = emulation::Site::here()) {
  if (!emulation::is_left_out(site)) emulation::sync_named(0, emulation::block_threads());
}
// If the run leaves out this `site`, the vote is still correct, but orders no memory.
inline int __syncthreads_or(int vote, emulation::Site site = emulation::Site::here()) {
  return emulation::vote_of_block(vote != 0, /*is_and=*/false, !emulation::is_left_out(site));
}
inline int __syncthreads_and(int vote, emulation::Site site = emulation::Site::here()) {
  return emulation::vote_of_block(vote != 0, /*is_and=*/true, !emulation::is_left_out(site));
}

// ---- Collectives of a warp. They order no memory.

template <typename T>
uint64_t bits_of(T value) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}
template <typename T>
T from_bits(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  return from_bits<T>(emulation::shuffle(bits_of(value), lane & 31));
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return from_bits<T>(emulation::shuffle(bits_of(value), (emulation::thread_index() % 32) ^ mask));
}
template <typename T>
T __shfl_up_sync(unsigned, T value, int distance) {
  const int lane = static_cast<int>(emulation::thread_index() % 32);
  return from_bits<T>(emulation::shuffle(bits_of(value), lane < distance ? lane : lane - distance));
}
inline unsigned __ballot_sync(unsigned, bool vote) { return emulation::ballot(vote); }
inline bool __all_sync(unsigned, bool vote) { return emulation::ballot(vote) == 0xFFFFFFFFu; }
inline unsigned __match_any_sync(unsigned, int value) { return emulation::match(bits_of(value)); }
inline int __reduce_add_sync(unsigned, int value) { return emulation::sum_of_warp(value); }
inline int __reduce_max_sync(unsigned lanes, int value) {
  for (int mask = 16; mask > 0; mask /= 2) {
    value = std::max(value, __shfl_xor_sync(lanes, value, mask));
  }
  return value;
}
inline int __reduce_min_sync(unsigned lanes, int value) {
  return ~__reduce_max_sync(lanes, ~value);
}

// ---- Atomic operations, which are relaxed, as in CUDA.

template <typename T>
T atomicAdd(T* address, T value) {
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}
template <typename T>
T atomicOr(T* address, T value) {
  return __atomic_fetch_or(address, value, __ATOMIC_RELAXED);
}
inline unsigned atomicExch(unsigned* address, unsigned value) {
  return __atomic_exchange_n(address, value, __ATOMIC_RELAXED);
}
inline unsigned long long atomicCAS(unsigned long long* address, unsigned long long expected,
                                    unsigned long long value) {
  __atomic_compare_exchange_n(address, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}
namespace emulation {
// Wraps from `last` to 0.
inline unsigned count_up(unsigned* address, unsigned last, bool is_ordered) {
  const int order = is_ordered ? __ATOMIC_ACQ_REL : __ATOMIC_RELAXED;
  unsigned before = __atomic_load_n(address, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(address, &before, before >= last ? 0u : before + 1, false,
                                      order, __ATOMIC_RELAXED)) {
  }
  return before;
}
}  // namespace emulation
inline unsigned atomicInc(unsigned* address, unsigned last) {
  return emulation::count_up(address, last, /*is_ordered=*/false);
}
inline void __threadfence_system() { emulation::pause_often(); }
inline void __nanosleep(unsigned) { emulation::yield(); }

// ---- Arithmetic.

inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline unsigned __float_as_uint(float v) { return from_bits<unsigned>(bits_of(v)); }
inline float __uint_as_float(unsigned v) { return from_bits<float>(v); }
inline float __frcp_rn(float v) { return 1.f / v; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline unsigned __vmaxu2(unsigned a, unsigned b) {
  return std::max(a & 0xFFFF, b & 0xFFFF) | std::max(a >> 16, b >> 16) << 16;
}

using std::max;
using std::min;
template <typename A, typename B, typename = std::enable_if_t<!std::is_same_v<A, B>>>
std::common_type_t<A, B> min(A a, B b) {
  return a < b ? a : b;
}
template <typename A, typename B, typename = std::enable_if_t<!std::is_same_v<A, B>>>
std::common_type_t<A, B> max(A a, B b) {
  return a > b ? a : b;
}
