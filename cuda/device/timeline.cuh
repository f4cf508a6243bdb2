// Records when warps pass the marks of a launch. Only tools/driver/kernels.cu compiles with
// -DMOE_A2A_TIMELINE.
//
// Each warp's first lane stores the time of each mark. A mark replaces an earlier one of the same
// kind and warp.
#ifndef MOE_A2A_DEVICE_TIMELINE_CUH_
#define MOE_A2A_DEVICE_TIMELINE_CUH_

#include "device/ranks.cuh"
#include "device/signal.cuh"

namespace moe_a2a {

#ifdef MOE_A2A_TIMELINE
__device__ inline void mark(const RankView& view, Mark what) {
  if (threadIdx.x % kWarpThreads != 0) return;
  const int warp = block_index() * kMaxTeams + threadIdx.x / kWarpThreads;
  view.timeline[warp * kNumMarks + static_cast<int>(what)] = global_time_ns();
}
#else
#define mark(view, what) ((void)0)  // a macro, because without the timeline the marks have no names
#endif

}  // namespace moe_a2a

#endif  // MOE_A2A_DEVICE_TIMELINE_CUH_
