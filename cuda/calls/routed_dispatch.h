// The call `routed_dispatch`. Operands: ids, this device's rank, the payload. Results: the plan,
// and rows of the payload. If `format` is not empty, the payload is that of
// calls/encoded_payload.h.
#pragma once

#include <cstdint>

#include "calls/array.h"
#include "calls/call.h"
#include "calls/encoded_payload.h"
#include "calls/payload.h"
#include "calls/routing.h"

namespace moe_a2a {

struct RoutedDispatchCall {
  int64_t num_experts, alignment, first_choice;
  DispatchOptions options;
  EncodedPayload encoded;  // if `format` is empty, no other member is set

  static constexpr const char* kTarget = "moe_a2a_routed_dispatch";
  static constexpr bool kHasHalves = false;
  using Params = RoutedDispatchParams;
  static constexpr Operation kOperation = Operation::kRoutedDispatch;

  template <typename Reader>
  bool Read(Reader&& read) {
    return read("num_experts", &num_experts) && read("alignment", &alignment) &&
           read("first_choice", &first_choice) && options.Read(read) &&
           read("format", &encoded.format) && (!has_format() || encoded.Read(read));
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
    options.Describe(exchange);
    exchange.view = context.view;
    exchange.routing.num_tokens = static_cast<int32_t>(ids.dimensions[0]);
    exchange.routing.top_k = static_cast<int32_t>(ids.dimensions[1]);
    exchange.routing.capacity = static_cast<int32_t>(results[4].dimensions[0]);
    SignShapes(exchange.view, exchange.routing);
    p.num_experts = static_cast<int32_t>(num_experts);
    p.alignment = static_cast<int32_t>(alignment);
    p.first_choice = static_cast<int32_t>(first_choice);
    Mix(exchange.view.signature, p.num_experts);
    Mix(exchange.view.signature, p.alignment);
    Mix(exchange.view.signature, p.first_choice);
    const int num_ranks = exchange.view.num_ranks;
    if (p.num_experts % num_ranks != 0 || p.first_choice >= exchange.routing.top_k) {
      return "routed dispatch needs experts of whole ranks and a first choice below top_k; got " +
             std::to_string(num_experts) + " experts, " + std::to_string(num_ranks) +
             " ranks, the first choice " + std::to_string(first_choice) + " and ids " +
             ToString(ids);
    }
    if (exchange.routing.top_k > kMaxTopK ||
        !fits_routed_dispatch(num_ranks, exchange.routing.num_tokens, exchange.routing.top_k,
                              p.num_experts)) {
      return Unsupported("routed dispatch has at most " + std::to_string(kMaxFusedTokens) +
                         " tokens, " + std::to_string(kMaxFusedChoices) +
                         " choices of all ranks, " + std::to_string(kMaxFusedExperts) +
                         " experts per rank and " + std::to_string(kMaxFusedIds) +
                         " experts; got ids " + ToString(ids) + " of " + std::to_string(num_ranks) +
                         " ranks with " + std::to_string(p.num_experts / num_ranks) +
                         " experts each");
    }
    constexpr int kFirstCount = 8;  // from this index on, results are counts, before it indices
    for (int i = 0; i < kNumPlanArrays; ++i) {
      p.plan_fills[i].bytes = results[i].bytes;
      p.plan_fills[i].byte = i >= kFirstCount ? 0 : 0xFF;
    }
    const ArraySlice payload = args.from(kNumFirst), moved = results.from(kNumPlanArrays);
    p.num_results = static_cast<int32_t>(moved.size());
    if (has_format()) {
      MOE_A2A_TRY(
          encoded.Describe(payload, moved, options.num_choice_arrays, p.encoding, exchange));
    } else {
      MOE_A2A_TRY(DescribePayload(payload, moved, options.num_choice_arrays, exchange));
    }
    exchange.roles = grid_of(p, context.num_sms).roles;
    return {};
  }

  void Point(Addresses args, Addresses results, RoutedDispatchParams* p) const {
    p->ids = reinterpret_cast<const int32_t*>(args[0]);
    p->rank = reinterpret_cast<const int32_t*>(args[1]);
    PointPlan(results, &p->plan);
    for (int i = 0; i < kNumPlanArrays; ++i) p->plan_fills[i].data = results[i];
    const Addresses payload = args.from(kNumFirst), moved = results.from(kNumPlanArrays);
    if (has_format()) {
      encoded.Point(payload, moved, p->encoding, p->exchange);
    } else {
      PointPayload(payload, moved, p->exchange);
    }
  }

  static int64_t ZoneBytes(const RoutedDispatchParams& p) { return p.exchange.zone_bytes; }

 private:
  static constexpr size_t kNumFirst = 2;  // operands before the payload

  bool has_format() const { return !encoded.format.empty(); }
};

}  // namespace moe_a2a
