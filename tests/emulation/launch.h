// A launch returns after the last block has ended.
#pragma once

#include <cuda_runtime_api.h>

namespace emulation {

// On the stream of kAllRanks, a launch runs all ranks of a shared device, and blockIdx.x is the
// rank.
constexpr int kAllRanks = -1;
inline cudaStream_t stream_of(int rank) {
  return reinterpret_cast<cudaStream_t>(static_cast<uintptr_t>(rank) + 1);
}

// Sets how many blocks of a device run at a time. Blocks start in the order of blockIdx.y, and in
// random order if blockIdx.y is equal.
void set_residency(int blocks);

void set_seed(uint64_t seed);

}  // namespace emulation
