// A dispatch by ranges of experts, next to which a grouped product runs as one launch for each range. See
// docs/protocol_ranges.md for what it holds and why. No call of the package uses it.
//
// A call, on two streams, where the first stream runs the products:
//
//   LaunchPlanRanges                once for each routing
//   fork
//   LaunchRangedDispatch            on the second stream
//   for each range
//     LaunchAwaitRange, the product of the range's groups
//   join
//   LaunchEndRanges
#ifndef MOE_A2A_TOOLS_RANGES_CUH_
#define MOE_A2A_TOOLS_RANGES_CUH_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "params.h"

namespace moe_a2a {

constexpr int kMaxRanges = 8;

// Ranges of local experts. Range r has the experts first[r] up to first[r + 1] - 1; it may have none.
struct Ranges {
  int32_t count;
  int32_t first[kMaxRanges + 1];
};

// Returns ranges whose numbers of experts are in proportion to `shares`, rounded.
inline Ranges RangesOf(const std::vector<int>& shares, int num_experts) {
  int64_t sum = 0, before = 0;
  for (int share : shares) sum += share;
  Ranges ranges = {static_cast<int32_t>(shares.size()), {}};
  for (int r = 0; r < ranges.count; ++r) {
    before += shares[r];
    ranges.first[r + 1] = static_cast<int32_t>((before * num_experts + sum / 2) / sum);
  }
  return ranges;
}

// Shared by all ranged calls of a rank, in its device memory. Before the first call: zero, except `call`, which is 1.
struct RangeCounters {
  uint64_t rows[kMaxRanges];  // call << kCountBits | rows of the range that are written
  uint64_t call;              // the number of the next call, or of the one under way
  uint64_t stopped;           // the last call in which a wait for a range has failed
  uint64_t epoch;             // of the last dispatch that has begun
  uint64_t waits;  // waits of all dispatches for a chunk that have ended: shows slow progress
};
constexpr int kCountBits = 24;

// The groups of rows, one for each local expert: as the grouped product reads them.
struct RangeGroups {
  const int32_t *starts, *sizes;  // [num_experts]
  int32_t num_experts;
};

// Chunks in the order in which they are needed: those that are sent to each destination, and those that come from each
// source. Each order names every chunk once.
struct RangePlan {
  int32_t *send_order, *receive_order;  // [num_ranks, chunks]
};

struct PlanRangesParams {
  int32_t num_ranks;
  RoutingView routing;
  RangeGroups groups;
  const int32_t* ids;  // [num_tokens, top_k]: experts of all ranks
  RangePlan plan;
};

struct RangedDispatchParams {
  DispatchParams exchange;
  RangePlan plan;
  RangeGroups groups;
  Ranges ranges;
  RangeCounters* counters;
};
MOE_A2A_HOST_DEVICE inline const RankView& view_of(const RangedDispatchParams& p) {
  return p.exchange.view;
}
static_assert(sizeof(RangedDispatchParams) <= 4096);

struct AwaitRangeParams {
  RankView view;  // of the dispatch
  RangeGroups groups;
  Ranges ranges;
  RangeCounters* counters;
  int32_t range;
};

struct EndRangesParams {
  RankView view;  // of the dispatch
  RangeCounters* counters;
  FailureFill fill;  // the results of the products
};

// Rules that a build with MOE_A2A_TEST_HOOKS may break, next to those of Mutation in device/signal.cuh.
constexpr uint32_t kIgnoreRange = 101;  // do not wait for a range
constexpr uint32_t kKeepFailed = 102;   // keep the product of a call that has failed
constexpr uint32_t kForgetStop = 103;   // do not note that a wait has failed

cudaError_t LoadRanges();
cudaError_t LaunchPlanRanges(const PlanRangesParams& p, cudaStream_t stream);
cudaError_t LaunchRangedDispatch(const RangedDispatchParams& p, int num_blocks,
                                 cudaStream_t stream);
cudaError_t LaunchAwaitRange(const AwaitRangeParams& p, cudaStream_t stream);
cudaError_t LaunchEndRanges(const EndRangesParams& p, cudaStream_t stream);

}  // namespace moe_a2a

#endif  // MOE_A2A_TOOLS_RANGES_CUH_
