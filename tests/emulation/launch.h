// Launches of kernels: a call that returns when the last block has left.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

namespace emulation {

// A stream is a rank: launches of a rank come one after the other, unless its threads make them at once.
inline cudaStream_t stream_of(int rank) {
  return reinterpret_cast<cudaStream_t>(static_cast<uintptr_t>(rank) + 1);
}

// How many blocks of one launch run at a time, on every rank. The others start, in random order, when one leaves.
void set_residency(int blocks);

// The sizes of the parameters of a loaded kernel.
const std::vector<size_t>& param_bytes_of(const void* kernel);

// Sets the seed of the random orders of all launches.
void set_seed(uint64_t seed);

}  // namespace emulation
