#include "oracle.h"

#include <algorithm>

namespace emulation {
namespace {

constexpr int32_t kTail = -2;  // after the last group

enum {
  kTokenSlot,
  kSlotToken,
  kChoiceRank,
  kSlotRows,
  kRowRank,
  kRowSlot,
  kRowK,
  kRowToken,
  kGroupSizes,
  kNumRows,
  kNumDropped
};

// At each destination, the tokens of a rank get slots in token order.
void assign_slots(const Shape& s, const std::vector<int32_t>& ids, Plan& plan) {
  std::vector<int> next(static_cast<size_t>(s.num_ranks));
  const int per_part = s.num_tokens / s.parts;
  for (int token = 0; token < s.num_tokens; ++token) {
    if (token % per_part == 0) std::fill(next.begin(), next.end(), token);
    for (int k = 0; k < s.top_k; ++k) {
      const int id = ids[token * s.top_k + k];
      if (id < 0 || id >= s.num_experts()) continue;
      const int rank = id / s.local_experts;
      plan.arrays[kChoiceRank][token * s.top_k + k] = rank;
      int32_t& slot = plan.arrays[kTokenSlot][token * s.num_ranks + rank];
      if (slot >= 0) continue;
      slot = next[rank]++;
      plan.arrays[kSlotToken][rank * s.num_tokens + slot] = token;
    }
  }
}

// Returns kept[source][choice]. Choices use up the capacity in the order of choice index, token and
// source. The first choice that does not fit and all later ones are dropped.
std::vector<std::vector<bool>> kept_choices(const Shape& s, const Ids& ids, int rank) {
  std::vector<std::vector<bool>> kept(static_cast<size_t>(s.num_ranks));
  for (auto& of_source : kept) of_source.resize(static_cast<size_t>(s.num_choices()));
  std::vector<int> rows(static_cast<size_t>(s.local_experts / s.group_experts));
  int room = s.capacity;
  for (int k = 0; k < s.top_k; ++k) {
    for (int token = 0; token < s.num_tokens; ++token) {
      for (int source = 0; source < s.num_ranks; ++source) {
        const int choice = token * s.top_k + k;
        const int expert = ids[source][choice] - rank * s.local_experts;
        if (expert < 0 || expert >= s.local_experts) continue;
        int& of_group = rows[expert / s.group_experts];
        if (of_group % s.alignment == 0) {
          if (room < s.alignment) return kept;
          room -= s.alignment;
        }
        ++of_group;
        kept[source][choice] = true;
      }
    }
  }
  return kept;
}

// Rows are ordered by expert, source, token and choice. Call assign_slots() for all ranks first.
void assign_rows(const Shape& s, const Ids& ids, int rank, std::vector<Plan>& plans) {
  auto& arrays = plans[rank].arrays;
  const auto kept = kept_choices(s, ids, rank);
  int row = 0;
  for (int expert = 0; expert < s.local_experts; ++expert) {
    const int begin = row;
    for (int source = 0; source < s.num_ranks; ++source) {
      for (int choice = 0; choice < s.num_choices(); ++choice) {
        if (ids[source][choice] != rank * s.local_experts + expert) continue;
        const int token = choice / s.top_k, k = choice % s.top_k;
        const int slot = plans[source].token_slot(s, token, rank);
        const bool fits = kept[source][choice];
        arrays[kSlotRows][(source * s.num_tokens + slot) * s.top_k + k] = fits ? row : -2;
        ++arrays[fits ? kNumRows : kNumDropped][0];
        if (!fits) continue;
        arrays[kRowRank][row] = source;
        arrays[kRowSlot][row] = slot;
        arrays[kRowK][row] = k;
        arrays[kRowToken][row] = token;
        ++row;
      }
    }
    if (expert % s.group_experts == s.group_experts - 1) {
      row = (row + s.alignment - 1) / s.alignment * s.alignment;
    }
    arrays[kGroupSizes][expert / s.group_experts] += row - begin;
  }
  for (; row < s.capacity; ++row) arrays[kRowSlot][row] = kTail;
}

}  // namespace

bool splits_sources(const Shape& s, const Ids& ids) {
  for (int rank = 0; rank < s.num_ranks; ++rank) {
    const auto kept = kept_choices(s, ids, rank);
    for (int choice = 0; choice < s.num_choices(); ++choice) {
      bool any_kept = false, any_dropped = false;
      for (int source = 0; source < s.num_ranks; ++source) {
        const int id = ids[source][choice];
        if (id < 0 || id >= s.num_experts() || id / s.local_experts != rank) continue;
        (kept[source][choice] ? any_kept : any_dropped) = true;
      }
      if (any_kept && any_dropped) return true;
    }
  }
  return false;
}

std::vector<Plan> plans_of(const Shape& s, const Ids& ids) {
  std::vector<Plan> plans(static_cast<size_t>(s.num_ranks));
  const int slots = s.num_ranks * s.num_tokens;
  const int sizes[] = {slots,
                       slots,
                       s.num_choices(),
                       slots * s.top_k,
                       s.capacity,
                       s.capacity,
                       s.capacity,
                       s.capacity,
                       s.local_experts / s.group_experts,
                       1,
                       1};
  for (Plan& plan : plans) {
    for (int i = 0; i < moe_a2a::kNumPlanArrays; ++i) {
      plan.arrays[i].assign(static_cast<size_t>(sizes[i]), i < kGroupSizes ? -1 : 0);
    }
  }
  for (int rank = 0; rank < s.num_ranks; ++rank) assign_slots(s, ids[rank], plans[rank]);
  for (int rank = 0; rank < s.num_ranks; ++rank) assign_rows(s, ids, rank, plans);
  return plans;
}

}  // namespace emulation
