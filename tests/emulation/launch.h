// Kernel launches. A launch returns after the last block has ended.
#pragma once

#include <cuda_runtime_api.h>

namespace emulation {

// Returns the stream of a rank. The launches of a rank run one after the other, unless several
// threads make them. The stream of kAllRanks is for launches for all ranks, which share a device.
// In these launches, blockIdx.x is the rank.
constexpr int kAllRanks = -1;
inline cudaStream_t stream_of(int rank) {
  return reinterpret_cast<cudaStream_t>(static_cast<uintptr_t>(rank) + 1);
}

// Sets how many blocks run at a time on a rank's device, or on the device that all ranks share, as
// if foreign kernels occupied the rest. When a block ends, another block starts. Blocks with a
// smaller blockIdx.y start first, otherwise in random order.
void set_residency(int blocks);

// Sets the seed of the random orders of all launches.
void set_seed(uint64_t seed);

}  // namespace emulation
