// Prefix sums over a block's threads.
#ifndef MOE_A2A_DEVICE_SCAN_CUH_
#define MOE_A2A_DEVICE_SCAN_CUH_

#include "device/team.cuh"

namespace moe_a2a {

// Exclusive prefix sum of a flag over the block's threads; `warp_sums` is shared.
__device__ inline int count_before(bool flag, int* warp_sums) {
  const uint32_t set = __ballot_sync(kAllLanes, flag);
  const int warp = threadIdx.x / kWarpThreads;
  const int lane = threadIdx.x % kWarpThreads;
  __syncthreads();  // The last call's sums have been read.
  if (lane == 0) warp_sums[warp] = __popc(set);
  __syncthreads();
  int before = __popc(set & ((1u << lane) - 1));
  for (int w = 0; w < warp; ++w) before += warp_sums[w];
  return before;
}

// Exclusive prefix sum over `count` values in shared memory, in place. All threads.
template <int kBlockThreads>
__device__ void prefix_sum(int32_t* values, int count, int* warp_sums) {
  int carry = 0;
  for (int base = 0; base < count; base += kBlockThreads) {
    const int i = base + threadIdx.x;
    const int value = i < count ? values[i] : 0;
    int inclusive = value;
    for (int d = 1; d < kWarpThreads; d *= 2) {
      const int other = __shfl_up_sync(kAllLanes, inclusive, d);
      if (static_cast<int>(threadIdx.x % kWarpThreads) >= d) inclusive += other;
    }
    __syncthreads();
    if (threadIdx.x % kWarpThreads == kWarpThreads - 1) {
      warp_sums[threadIdx.x / kWarpThreads] = inclusive;
    }
    __syncthreads();
    const int lane = lane_index();
    const int sum = lane < kBlockThreads / kWarpThreads ? warp_sums[lane] : 0;
    const bool is_before = lane < static_cast<int>(threadIdx.x / kWarpThreads);
    const int before = carry + __reduce_add_sync(kAllLanes, is_before ? sum : 0);
    carry += __reduce_add_sync(kAllLanes, sum);
    if (i < count) values[i] = before + inclusive - value;
  }
  __syncthreads();
}

}  // namespace moe_a2a

#endif  // MOE_A2A_DEVICE_SCAN_CUH_
