// A team is one or more warps of a block that share a work item.
#pragma once

#include <cstdint>

#include "device/ptx.cuh"
#include "layout.h"

namespace moe_a2a {

constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

__device__ inline int lane_index() { return threadIdx.x % kWarpThreads; }

// All teams of a block have equally many warps. Teams work independently.
class Team {
 public:
  // `mailboxes` has a word of shared memory for each team.
  __device__ Team(int num_teams, uint32_t* mailboxes)
      : threads_(blockDim.x / num_teams),
        index_(threadIdx.x / threads_),
        thread_(threadIdx.x % threads_),
        mailbox_(mailboxes + index_) {}

  __device__ int thread() const { return thread_; }    // index in the team
  __device__ int threads() const { return threads_; }  // of the team
  __device__ bool is_first_warp() const { return thread_ < kWarpThreads; }

  // Waits for all threads of the team, and orders their memory accesses.
  __device__ void sync(MOE_A2A_CALL_SITE) const {
    if (MOE_A2A_IS_LEFT_OUT) return;
    __syncwarp();  // A named barrier needs whole warps. Barrier 0 is for the block.
    if (threads_ > kWarpThreads) sync_named(1 + index_, threads_);
  }

  // Returns the first thread's value to all threads of the team.
  __device__ uint32_t broadcast(uint32_t value) const {
    if (threads_ == kWarpThreads) {
      value = __shfl_sync(kAllLanes, value, 0);
      __syncwarp();
      return value;
    }
    sync();  // All threads have read the previous value.
    if (thread_ == 0) *mailbox_ = value;
    sync();
    return *mailbox_;
  }

  // Returns true if `ok` is true in all threads, and orders their acquires before later accesses.
  __device__ bool all(bool ok) const {
    if (threads_ == kWarpThreads) {
      ok = __all_sync(kAllLanes, ok);
      __syncwarp();  // A vote does not order memory accesses.
      return ok;
    }
    sync();
    if (thread_ == 0) *mailbox_ = 1;
    sync();
    if (!ok) *mailbox_ = 0;
    sync();
    return *mailbox_ != 0;
  }

 private:
  int threads_, index_, thread_;
  uint32_t* mailbox_;
};

}  // namespace moe_a2a
