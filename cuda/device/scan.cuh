// Prefix sums over the threads of a block.
#pragma once

#include "device/team.cuh"

namespace moe_a2a {

// Returns the number of earlier threads of the block whose `flag` is set. `warp_sums` has a word of
// shared memory for each warp. All threads call it.
__device__ inline int count_before(bool flag, int* warp_sums) {
  const uint32_t set = __ballot_sync(kAllLanes, flag);
  const int lane = lane_index(), warp = threadIdx.x / kWarpThreads;
  __syncthreads();  // The sums of the previous call have been read.
  if (lane == 0) warp_sums[warp] = __popc(set);
  __syncthreads();
  int before = __popc(set & ((1u << lane) - 1));
  for (int w = 0; w < warp; ++w) before += warp_sums[w];
  return before;
}

// Replaces `count` values by their exclusive prefix sums. All threads of the block call it.
template <int kBlockThreads>
__device__ void prefix_sum(int32_t* values, int count, int* warp_sums) {
  const int lane = lane_index(), warp = threadIdx.x / kWarpThreads;
  int carry = 0;
  for (int base = 0; base < count; base += kBlockThreads) {
    const int i = base + threadIdx.x;
    const int value = i < count ? values[i] : 0;
    int inclusive = value;
    for (int d = 1; d < kWarpThreads; d *= 2) {
      const int other = __shfl_up_sync(kAllLanes, inclusive, d);
      if (lane >= d) inclusive += other;
    }
    __syncthreads();
    if (lane == kWarpThreads - 1) warp_sums[warp] = inclusive;
    __syncthreads();
    const int sum = lane < kBlockThreads / kWarpThreads ? warp_sums[lane] : 0;
    const int before = carry + __reduce_add_sync(kAllLanes, lane < warp ? sum : 0);
    carry += __reduce_add_sync(kAllLanes, sum);
    if (i < count) values[i] = before + inclusive - value;
  }
  __syncthreads();
}

}  // namespace moe_a2a
