// Computes slots and rows with plain loops.
#pragma once

#include <cstdint>
#include <vector>

#include "params.h"

namespace emulation {

struct Shape {
  int num_ranks, num_tokens, top_k, local_experts, capacity, alignment;
  int group_experts = 1;  // how many consecutive experts form one group
  bool may_drop = true;   // false: the capacity is large enough for any routing
  int parts = 1;          // ranges of tokens that have separate slots, as under vmap

  int num_choices() const { return num_tokens * top_k; }
  int num_experts() const { return num_ranks * local_experts; }
};

struct Plan {
  std::vector<int32_t> arrays[moe_a2a::kNumPlanArrays];  // in the order of kPlanArrays

  int token_slot(const Shape& s, int token, int rank) const {
    return arrays[0][static_cast<size_t>(token) * s.num_ranks + rank];
  }
  int choice_rank(const Shape& s, int token, int k) const {
    return arrays[2][static_cast<size_t>(token) * s.top_k + k];
  }
  int slot_row(const Shape& s, int source, int slot, int k) const {
    return arrays[3][(static_cast<size_t>(source) * s.num_tokens + slot) * s.top_k + k];
  }
  int row_rank(int row) const { return arrays[4][row]; }
  bool is_tail(int row) const { return arrays[5][row] == moe_a2a::kTailRow; }
  int row_k(int row) const { return arrays[6][row]; }
  int row_token(int row) const { return arrays[7][row]; }
};

using Ids = std::vector<std::vector<int32_t>>;  // indexed by rank

std::vector<Plan> plans_of(const Shape& shape, const Ids& ids);

// True if a rank keeps a choice of one source, but drops the choice of another source with equal
// token and choice indices.
bool splits_sources(const Shape& shape, const Ids& ids);

}  // namespace emulation
