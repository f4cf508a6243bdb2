// The part of NVSHMEM that the kernels use, on the emulator's network.
#pragma once

#include "network.h"

#define NVSHMEM_SIGNAL_SET 1

inline void nvshmemx_signal_op(uint64_t* signal, uint64_t value, int, int pe) {
  emulation::put(nullptr, nullptr, 0, signal, value, pe);
}
inline void nvshmem_fence() { emulation::fence_network(); }
// All lanes of a warp call these functions together. The first lane makes the put.
inline void nvshmemx_putmem_nbi_warp(void* to, const void* from, size_t bytes, int pe) {
  if (threadIdx.x % 32 == 0) emulation::put(to, from, bytes, nullptr, 0, pe);
}
inline void nvshmemx_putmem_signal_nbi_warp(void* to, const void* from, size_t bytes,
                                            uint64_t* signal, uint64_t value, int, int pe) {
  if (threadIdx.x % 32 == 0) emulation::put(to, from, bytes, signal, value, pe);
}
