// Tells a block its rank, its index among the blocks of this rank, and the rank's parameters.
//
// Usually a launch is for the only rank of its device. With MOE_A2A_COLOCATED (cuda/colocated/), a
// launch is for all ranks of a domain, which share one GPU.
//
// The rank is the fastest grid dimension. The hardware issues blocks in this order, so every rank
// has a resident block, as docs/protocol.md, section 6, requires.
//
// Parameters are not in a table in device memory, because each call would need a copy of the table
// to the device, and a captured graph would replay this copy.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "device/signal.cuh"
#include "kernels/launch.h"
#include "params.h"

namespace moe_a2a {

inline namespace MOE_A2A_FORM {

#ifdef MOE_A2A_COLOCATED

__device__ inline uint32_t block_index() { return blockIdx.y; }
__device__ inline uint32_t num_blocks() { return gridDim.y; }

// The argument of a kernel: the parameters of ranks 0 and 1.
template <typename Params>
struct Launched {
  Params first, second;
};

// Writes the parameters of this block's rank to shared memory. Every 64-bit word is a linear
// function of the rank, so ranks 0 and 1 determine it. All threads of the block call it.
template <typename Params>
__device__ inline void write_own_params(const Launched<Params>& launched, Params& own) {
  static_assert(sizeof(Params) % sizeof(uint64_t) == 0 && alignof(Params) == alignof(uint64_t));
  const auto* first = reinterpret_cast<const uint64_t*>(&launched.first);
  const auto* second = reinterpret_cast<const uint64_t*>(&launched.second);
  auto* words = reinterpret_cast<uint64_t*>(&own);
  for (uint32_t i = threadIdx.x; i < sizeof(Params) / sizeof(uint64_t); i += blockDim.x) {
    words[i] = first[i] + blockIdx.x * (second[i] - first[i]);
  }
  __syncthreads();
#ifdef MOE_A2A_TEST_HOOKS
  RankView& view = const_cast<RankView&>(view_of(own));
  if (threadIdx.x == 0 && breaks(view, kOtherCall)) ++view.signature;
  __syncthreads();
#endif
}

// Declares `p`, the parameters of this block's rank, at the beginning of a kernel.
#define MOE_A2A_OWN_PARAMS(Params, p, launched) \
  __shared__ Params p##_of_rank;                \
  write_own_params(launched, p##_of_rank);      \
  const Params& p = p##_of_rank

template <typename Params>
Launched<Params> launched(const Params* ranks) {
  return {ranks[0], ranks[1]};
}
inline dim3 grid_of_launch(int num_ranks, int num_blocks) { return dim3(num_ranks, num_blocks); }

#else

__device__ inline uint32_t block_index() { return blockIdx.x; }
__device__ inline uint32_t num_blocks() { return gridDim.x; }

template <typename Params>
using Launched = Params;

#define MOE_A2A_OWN_PARAMS(Params, p, launched) const Params& p = launched

template <typename Params>
const Params& launched(const Params* ranks) {
  return *ranks;
}
inline dim3 grid_of_launch(int, int num_blocks) { return dim3(num_blocks); }

#endif

// Launches a kernel with `num_blocks` blocks for each rank. Returns only errors of this launch.
template <typename Params, typename... More>
cudaError_t Launch(void (*kernel)(Launched<Params>, More...), const Params* ranks, int num_blocks,
                   int num_threads, size_t shared_bytes, cudaStream_t stream, More... more) {
  Launched<Params> params = launched(ranks);
  void* arguments[] = {&params, &more...};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel),
                          grid_of_launch(view_of(*ranks).num_ranks, num_blocks), dim3(num_threads),
                          arguments, shared_bytes, stream);
}

}  // namespace MOE_A2A_FORM

}  // namespace moe_a2a
