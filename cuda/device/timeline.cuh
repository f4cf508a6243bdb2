// When things happen inside a launch: compiled in with -DMOE_A2A_TIMELINE, by tools/driver/kernels.cu only.
//
// Each warp's first lane notes the time of each mark, the last one of its kind, in its own place.
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
#define mark(view, what) ((void)0)  // a macro: the marks have no names without the timeline
#endif

}  // namespace moe_a2a

#endif  // MOE_A2A_DEVICE_TIMELINE_CUH_
