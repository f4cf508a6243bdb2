// The calls `dispatch` and `format_dispatch`. Operands: payload, routing. Results: payload rows.
#pragma once

#include "calls/call.h"
#include "calls/encoded_payload.h"
#include "calls/payload.h"
#include "calls/routing.h"

namespace moe_a2a {

template <typename PayloadOfCall, typename KernelParams, bool kIsSplittable>
struct DispatchOf : ExchangeCall<KernelParams, Operation::kDispatch, kIsSplittable> {
  PayloadOfCall payload;

  bool Read(const AttributeReader& read) { return payload.Read(read); }

  Problem Describe(const CallContext& context, ArraySlice args, ArraySlice results,
                   KernelParams* params) const {
    DispatchParams& p = exchange_of(*params);
    MOE_A2A_TRY(DescribeRouting(context, args, p));
    const ArraySlice moved = {args.first, args.size() - kNumRoutingArrays};
    MOE_A2A_TRY(payload.Describe(context, moved, results, *params));
    p.roles = grid_of(*params, context.num_sms).roles;
    return {};
  }
};

struct DispatchCall : DispatchOf<MovedPayload, DispatchParams, /*kIsSplittable=*/true> {
  static constexpr const char* kTarget = "moe_a2a_dispatch";
};

struct FormatDispatchCall
    : DispatchOf<EncodedPayload, FormatDispatchParams, /*kIsSplittable=*/false> {
  static constexpr const char* kTarget = "moe_a2a_format_dispatch";
};

}  // namespace moe_a2a
