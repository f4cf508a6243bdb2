// The call `dispatch`. Operands: payload arrays and the routing. Results: rows of each payload
// array.
//
// With `lands`, a product on the same stream may read the rows as they land. Between payload and routing are then operands
// that the call does not read: what the product needs besides, so that XLA computes it before. The last result is int32
// [C / kLandingRows rounded up + 1 + R T]: Landing in params.h.
#ifndef MOE_A2A_CALLS_DISPATCH_H_
#define MOE_A2A_CALLS_DISPATCH_H_

#include <algorithm>
#include <cstdint>
#include <string>

#include "calls/array.h"
#include "calls/call.h"
#include "calls/payload.h"
#include "calls/routing.h"

namespace moe_a2a {

// Returns the error of a dispatch whose operands do not match its results.
inline std::string UnequalPayload(const char* call) {
  return std::string(call) + " needs one result for each payload array, at most " +
         std::to_string(kMaxArrays);
}

struct DispatchCall {
  DispatchOptions options;
  bool lands;

  static constexpr const char* kTarget = "moe_a2a_dispatch";
  static constexpr bool kHasHalves = true;
  using Params = DispatchParams;
  static constexpr Operation kOperation = Operation::kDispatch;

  template <typename Reader>
  bool Read(Reader&& read) {
    return options.Read(read) && read("lands", &lands);
  }

  Problem Describe(const CallContext& context, ArraySlice args, ArraySlice results,
                   DispatchParams* params) const {
    DispatchParams& p = *params;
    p.view = context.view;
    if (Problem problem = DescribeRouting(args, p.view.num_ranks, &p.routing); !problem.empty()) {
      return problem;
    }
    const size_t payload = results.size() - std::min<size_t>(results.size(), lands);
    if (args.size() < payload + kNumRoutingArrays || payload > kMaxArrays ||
        (!lands && args.size() > payload + kNumRoutingArrays)) {
      return UnequalPayload("dispatch");
    }
    options.Describe(p);
    SignShapes(p.view, p.routing);
    if (Problem problem =
            DescribePayload(args, {results.begin(), payload}, options.num_choice_arrays, p);
        !problem.empty()) {
      return problem;
    }
    if (lands) {
      if (Problem problem = DescribeLanding(context, results, p); !problem.empty()) return problem;
    }
    p.roles = grid_of(p, context.num_sms).roles;
    return {};
  }

  void Point(Addresses args, Addresses results, DispatchParams* p) const {
    PointRouting(args, &p->routing);
    PointPayload(args, results, *p);
    if (lands) {
      p->landing.landed = reinterpret_cast<uint32_t*>(results[p->num_arrays]);
      p->landing.order = reinterpret_cast<int32_t*>(p->landing.landed +
                                                    num_landing_counts(p->routing.capacity) + 1);
    }
  }

  static int64_t ZoneBytes(const DispatchParams& p) { return p.zone_bytes; }

  static cudaError_t Launch(const Kernels& kernels, const DispatchParams* ranks, int blocks,
                            cudaStream_t stream) {
    return kernels.dispatch(ranks, blocks, stream);
  }

 private:
  static Problem DescribeLanding(const CallContext& context, ArraySlice results,
                                 DispatchParams& p) {
    const int64_t capacity = p.routing.capacity, num_tokens = p.routing.num_tokens;
    if (p.view.num_ranks == 1 || context.is_multi_host || results.size() == 0) {
      return "a dispatch next to a product needs two or more ranks that share memory";
    }
    p.landing.slots_per_chunk =
        static_cast<int32_t>(std::max<int64_t>(Tuning::kLandingSlots, slots_per_chunk(num_tokens)));
    p.landing.zone_offset =
        TakeZone(p.zone_bytes, ceil_div(num_tokens, 4), 4 * sizeof(int32_t), p.view);
    return CheckShape(results[results.size() - 1], "landed rows", kInt32,
                      {num_landing_counts(capacity) + 1 + p.view.num_ranks * num_tokens});
  }
};

}  // namespace moe_a2a

#endif  // MOE_A2A_CALLS_DISPATCH_H_
