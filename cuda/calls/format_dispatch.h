// The call `format_dispatch`. Operands: the payload (calls/encoded_payload.h) and the routing.
// Results: rows of the payload.
#pragma once

#include <cstdint>

#include "calls/array.h"
#include "calls/call.h"
#include "calls/encoded_payload.h"
#include "calls/payload.h"
#include "calls/routing.h"

namespace moe_a2a {

struct FormatDispatchCall {
  DispatchOptions options;
  EncodedPayload payload;

  static constexpr const char* kTarget = "moe_a2a_format_dispatch";
  static constexpr bool kHasHalves = false;
  using Params = FormatDispatchParams;
  static constexpr Operation kOperation = Operation::kDispatch;

  template <typename Reader>
  bool Read(Reader&& read) {
    return options.Read(read) && payload.Read(read);
  }

  Problem Describe(const CallContext& context, ArraySlice args, ArraySlice results,
                   FormatDispatchParams* params) const {
    FormatDispatchParams& p = *params;
    DispatchParams& exchange = p.exchange;
    exchange.view = context.view;
    MOE_A2A_TRY(DescribeRouting(args, exchange.view.num_ranks, &exchange.routing));
    options.Describe(exchange);
    SignShapes(exchange.view, exchange.routing);
    const ArraySlice moved = {args.first, args.size() - kNumRoutingArrays};
    MOE_A2A_TRY(payload.Describe(moved, results, options.num_choice_arrays, p.encoding, exchange));
    p.num_results = static_cast<int32_t>(results.size());
    exchange.roles = grid_of(p, context.num_sms).roles;
    return {};
  }

  void Point(Addresses args, Addresses results, FormatDispatchParams* p) const {
    PointRouting(args, &p->exchange.routing);
    payload.Point(args, results, p->encoding, p->exchange);
  }

  static int64_t ZoneBytes(const FormatDispatchParams& p) { return p.exchange.zone_bytes; }
};

}  // namespace moe_a2a
