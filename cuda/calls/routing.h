// Describes routing arrays (operands of a call) and plan arrays (results).
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "calls/call.h"
#include "params.h"

namespace moe_a2a {

#define MOE_A2A_POINTER(name) &RoutingView::name,
constexpr const int32_t* RoutingView::* kRoutingArrays[] = {
    MOE_A2A_ROUTING_ARRAYS(MOE_A2A_POINTER)};
#undef MOE_A2A_POINTER
constexpr size_t kNumRoutingArrays = sizeof(kRoutingArrays) / sizeof(*kRoutingArrays);

inline void SignShapes(RankView& view, const RoutingView& routing) {
  Mix(view.signature, routing.num_tokens, routing.top_k, routing.capacity);
}

// Sets the view, and the routing from the last operands.
template <typename Params>
Problem DescribeRouting(const CallContext& context, ArraySlice args, Params& params) {
  params.view = context.view;
  if (args.size() < kNumRoutingArrays) {
    return Concat("the last operands must be the ", kNumRoutingArrays, " routing arrays; got ",
                  args.size(), " operands");
  }
  const ArraySlice arrays = args.from(args.size() - kNumRoutingArrays);
  const Array &choice_rank = arrays[2], &row_slot = arrays[4];
  if (choice_rank.dimensions.size() != 2 || row_slot.dimensions.size() != 1) {
    return "choice_rank must have two axes and row_slot one; got " + ToString(choice_rank) +
           " and " + ToString(row_slot);
  }
  const int64_t num_ranks = context.view.num_ranks;
  const int64_t num_tokens = choice_rank.dimensions[0], top_k = choice_rank.dimensions[1];
  const int64_t capacity = row_slot.dimensions[0];
  MOE_A2A_TRY(FirstOf({CheckShape(arrays[0], "token_slot", kInt32, {num_tokens, num_ranks}),
                       CheckShape(arrays[1], "slot_token", kInt32, {num_ranks, num_tokens}),
                       CheckShape(choice_rank, "choice_rank", kInt32, {num_tokens, top_k}),
                       CheckShape(arrays[3], "slot_rows", kInt32, {num_ranks, num_tokens, top_k}),
                       CheckShape(row_slot, "row_slot", kInt32, {capacity})}));
  if (top_k > kMaxTopK) {
    return Unsupported("top_k must be at most ", kMaxTopK, "; got ", top_k);
  }
  if (std::max(num_tokens, capacity) > std::numeric_limits<int32_t>::max()) {
    return Unsupported("tokens and rows must be fewer than 2**31; got ", num_tokens, " and ",
                       capacity);
  }
  RoutingView& routing = params.routing;
  routing.num_tokens = static_cast<int32_t>(num_tokens);
  routing.top_k = static_cast<int32_t>(top_k);
  routing.capacity = static_cast<int32_t>(capacity);
  SignShapes(params.view, routing);
  for (size_t i = 0; i < kNumRoutingArrays; ++i) {
    context.Bind(&(routing.*kRoutingArrays[i]), arrays[i]);
  }
  return {};
}

inline void BindPlan(const CallContext& context, ArraySlice results, RoutePlan* plan) {
  for (int i = 0; i < kNumPlanArrays; ++i) context.Bind(&(plan->*kPlanArrays[i]), results[i]);
}

}  // namespace moe_a2a
