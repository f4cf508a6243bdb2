// The call `dispatch`. Operands: payload arrays and the routing. Results: rows of each payload
// array.
#pragma once

#include <cstdint>

#include "calls/array.h"
#include "calls/call.h"
#include "calls/payload.h"
#include "calls/routing.h"

namespace moe_a2a {

struct DispatchCall {
  DispatchOptions options;

  static constexpr const char* kTarget = "moe_a2a_dispatch";
  static constexpr bool kHasHalves = true;
  using Params = DispatchParams;
  static constexpr Operation kOperation = Operation::kDispatch;

  template <typename Reader>
  bool Read(Reader&& read) {
    return options.Read(read);
  }

  Problem Describe(const CallContext& context, ArraySlice args, ArraySlice results,
                   DispatchParams* params) const {
    DispatchParams& p = *params;
    p.view = context.view;
    MOE_A2A_TRY(DescribeRouting(args, p.view.num_ranks, &p.routing));
    options.Describe(p);
    SignShapes(p.view, p.routing);
    const ArraySlice moved = {args.first, args.size() - kNumRoutingArrays};
    MOE_A2A_TRY(DescribePayload(moved, results, options.num_choice_arrays, p));
    p.roles = grid_of(p, context.num_sms).roles;
    return {};
  }

  void Point(Addresses args, Addresses results, DispatchParams* p) const {
    PointRouting(args, &p->routing);
    PointPayload(args, results, *p);
  }

  static int64_t ZoneBytes(const DispatchParams& p) { return p.zone_bytes; }
};

}  // namespace moe_a2a
