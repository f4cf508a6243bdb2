// Functions of route and routed_dispatch that write the rows of a plan.
#pragma once

#include "device/team.cuh"
#include "params.h"

namespace moe_a2a {

__device__ inline void write_row(const RoutePlan& plan, int64_t row, int rank, int slot, int k,
                                 int token) {
  plan.row_rank[row] = rank;
  plan.row_slot[row] = slot;
  plan.row_k[row] = k;
  plan.row_token[row] = token;
}

__device__ inline void write_empty_row(const RoutePlan& plan, int64_t row, bool is_tail) {
  write_row(plan, row, -1, is_tail ? kTailRow : kPaddingRow, -1, -1);
}

// The first choice that is dropped (docs/protocol.md, section 17). All earlier choices are kept.
struct Threshold {
  int k;  // the choice index
  int token;
  int source;

  __device__ bool keeps(int of_k, int of_token, int of_source) const {
    if (of_k != k) return of_k < k;
    return of_token < token || (of_token == token && of_source < source);
  }
};

// Returns the largest n below `high` for which fits(n) is true. fits(0) must be true.
template <typename Fits>
__device__ int last_that_fits(int high, Fits&& fits) {
  int low = 0;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (fits(middle) ? low : high) = middle;
  }
  return low;
}

// Gives each lane's choice the next row of its expert, in the order of lanes. Returns -1 if `here`
// is false. `next_row` is this warp's table of next rows, by expert. All lanes call it.
__device__ inline int take_row(int32_t* next_row, int expert, bool here) {
  const uint32_t same = __match_any_sync(kAllLanes, here ? expert : -1 - lane_index());
  const int before = __popc(same & ((1u << lane_index()) - 1));
  const int row = here ? next_row[expert] + before : -1;
  __syncwarp();
  if (here && before == 0) next_row[expert] += __popc(same);
  __syncwarp();
  return row;
}

// Returns whether a row has a token. `first_row` must ascend.
__device__ inline bool carries_token(const int32_t* first_row, const int32_t* rows,
                                     int local_experts, int64_t row) {
  const int expert = last_that_fits(local_experts, [&](int e) { return first_row[e] <= row; });
  return row < first_row[expert] + rows[expert];
}

}  // namespace moe_a2a
