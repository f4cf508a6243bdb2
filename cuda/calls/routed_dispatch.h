// The call `routed_dispatch`. Operands: expert ids, rank, payload. Results: plan, payload rows.
#pragma once

#include <cstdint>

#include "calls/call.h"
#include "calls/encoded_payload.h"
#include "calls/payload.h"
#include "calls/routing.h"

namespace moe_a2a {

struct RoutedDispatchCall : ExchangeCall<RoutedDispatchParams, Operation::kRoutedDispatch> {
  int64_t num_experts, alignment;
  bool may_drop;
  EncodedPayload payload;  // if `format` is empty, only a MovedPayload

  static constexpr const char* kTarget = "moe_a2a_routed_dispatch";

  bool Read(const AttributeReader& read) {
    return read("num_experts", &num_experts) && read("alignment", &alignment) &&
           read("may_drop", &may_drop) && payload.MovedPayload::Read(read) &&
           read("format", &payload.format) && (!has_format() || payload.Read(read));
  }

  Problem Describe(const CallContext& context, ArraySlice args, ArraySlice results,
                   RoutedDispatchParams* params) const {
    RoutedDispatchParams& p = *params;
    if (args.size() < kNumFirst || results.size() < kNumPlanArrays ||
        results[4].dimensions.size() == 0) {
      return "routed dispatch needs ids and rank, and returns a plan";
    }
    const Array& ids = args[0];
    if (ids.dimensions.size() != 2 || ids.type != kInt32) {
      return "ids must be S32[num_tokens, top_k]; got " + ToString(ids);
    }
    MOE_A2A_TRY(CheckShape(args[1], "rank", kInt32, {}));
    DispatchParams& exchange = p.exchange;
    exchange.view = context.view;
    exchange.routing.num_tokens = static_cast<int32_t>(ids.dimensions[0]);
    exchange.routing.top_k = static_cast<int32_t>(ids.dimensions[1]);
    exchange.routing.capacity = static_cast<int32_t>(results[4].dimensions[0]);
    SignShapes(exchange.view, exchange.routing);
    p.num_experts = static_cast<int32_t>(num_experts);
    p.alignment = static_cast<int32_t>(alignment);
    p.may_drop = may_drop;
    Mix(exchange.view.signature, p.num_experts, p.alignment, p.may_drop);
    const int num_ranks = exchange.view.num_ranks;
    if (p.num_experts % num_ranks != 0) {
      return Concat("routed dispatch needs experts of whole ranks; got ", num_experts,
                    " experts and ", num_ranks, " ranks");
    }
    if (exchange.routing.top_k > kMaxTopK ||
        !fits_routed_dispatch(num_ranks, exchange.routing.num_tokens, exchange.routing.top_k,
                              p.num_experts)) {
      return Unsupported("routed dispatch has at most ", kMaxFusedTokens, " tokens, ",
                         kMaxFusedChoices, " choices of all ranks, ", kMaxFusedExperts,
                         " experts per rank and ", kMaxFusedIds, " experts; got ids ",
                         ToString(ids), " of ", num_ranks, " ranks with ",
                         p.num_experts / num_ranks, " experts each");
    }
    constexpr int kFirstCount = 8;  // 8 plan arrays of indices, then arrays of counts
    for (int i = 0; i < kNumPlanArrays; ++i) {
      context.BindFill(&p.plan_fills[i], results[i]);
      p.plan_fills[i].byte = i >= kFirstCount ? 0 : 0xFF;
    }
    const ArraySlice moved = args.from(kNumFirst), rows = results.from(kNumPlanArrays);
    p.num_results = static_cast<int32_t>(rows.size());
    MOE_A2A_TRY(has_format() ? payload.Describe(context, moved, rows, p)
                             : payload.MovedPayload::Describe(context, moved, rows, exchange));
    context.Bind(&p.ids, ids);
    context.Bind(&p.rank, args[1]);
    BindPlan(context, results, &p.plan);
    exchange.roles = grid_of(p, context.num_sms).roles;
    return {};
  }

 private:
  static constexpr size_t kNumFirst = 2;  // operands before the payload

  bool has_format() const { return !payload.format.empty(); }
};

}  // namespace moe_a2a
