// Fills the spare slots of ranks with replicas of popular experts.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "runtime/problem.h"

namespace moe_a2a {

// The largest number of experts for which shared memory has room.
constexpr int kMaxPlannedExperts = 4096;

// B plans for R ranks. A rank has L slots for its own experts and S spare slots.
struct FillSlots {
  const int32_t *experts, *rows;        // [B, R, L]
  int32_t *slot_experts, *slot_rows;    // [B, R, L + S]
  int32_t batch, num_ranks, num_local;  // B, R up to kMaxRanks, L; R * L up to kMaxPlannedExperts
  int32_t spare;                        // S
  int32_t most;                         // most slots of an expert, at least 1
  int64_t min_rows;                     // fewest rows of a replica, at least 1
};

cudaError_t LoadFillSlots();
Problem LaunchFillSlots(const FillSlots& call, cudaStream_t stream);

}  // namespace moe_a2a
