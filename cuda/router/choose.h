// Chooses the experts of tokens from a key for each expert.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "layout.h"
#include "runtime/problem.h"

namespace moe_a2a {

// The most experts if the number of groups is a power of two; other numbers allow fewer experts.
constexpr int kMaxChoiceExperts = 1024;

// Arrays of T tokens, E experts and K choices of each token.
struct Choose {
  const float *keys, *values;        // [T, E]; 16-byte aligned
  const bool* mask;                  // [T], or null if all tokens choose
  int32_t* ids;                      // [T, K], the best expert first; -1 in masked tokens
  float *weights, *chosen;           // [T, K]: weights of ids, values of ids; 0 in masked tokens
  int64_t num_tokens;                // T
  int32_t num_experts, num_choices;  // E, K up to 32
  // Groups of consecutive experts. A token chooses from its `top_groups` best groups. The value of
  // a group is the sum of its `top_in_group` highest keys.
  int32_t num_groups, top_groups, top_in_group;
  // If `renormalizes`, weights are the softmax of the chosen values, or of their log-sigmoids if
  // `is_sigmoid`. Otherwise weights are the values. In both cases, `scale` multiplies all weights.
  bool renormalizes, is_sigmoid;
  float scale;
};

// Returns how many lanes have keys of the same group.
MOE_A2A_HOST_DEVICE constexpr int LanesOfGroup(int num_groups) {
  int lanes = kWarpThreads;
  while (lanes > 1 && lanes * num_groups > kWarpThreads) lanes /= 2;
  return lanes;
}

// Returns true if the kernel has enough registers for the keys.
constexpr bool HasRoomForKeys(int64_t num_experts, int64_t num_groups) {
  if (num_groups < 1 || num_groups > kWarpThreads || num_experts % num_groups != 0) return false;
  const int lanes = LanesOfGroup(static_cast<int>(num_groups));
  return num_experts / num_groups <= kMaxChoiceExperts / kWarpThreads * lanes;
}

cudaError_t LoadChoose();

// Launches a warp for each token. Does not allocate or synchronize.
Problem LaunchChoose(const Choose& call, cudaStream_t stream);

}  // namespace moe_a2a
