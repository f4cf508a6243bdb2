// Tells the lowering in Python why the kernels refuse a call.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "calls/call.h"
#include "calls/combine.h"
#include "calls/dispatch.h"
#include "calls/route.h"
#include "calls/routed_dispatch.h"
#include "calls/weighted_dispatch.h"
#include "lists.h"

namespace moe_a2a {

using ExchangeCalls = Types<RouteCall, DispatchCall, FormatDispatchCall, RoutedDispatchCall,
                            WeightedDispatchCall, CombineCall>;

struct Verdict {
  Problem why;             // empty if the kernels accept the call
  int64_t half_bytes = 0;  // the bytes of a ring half that the call needs
};

// Returns the verdict about a call, as if its arrays were aligned.
inline Verdict WhyNot(std::string_view target, const AttributeReader& read, const Arrays& args,
                      const Arrays& results, int num_ranks, bool is_colocated) {
  Verdict verdict = {"no kernel has the target '" + std::string(target) + "'"};
  for_each(ExchangeCalls{}, [&](auto of) {
    using Call = typename decltype(of)::type;
    if (target != Call::kTarget) return;
    Call call = {};
    verdict.why = ReadAttributes(read, &call);
    if (!verdict.why.empty()) return;
    typename Call::Params params = {};
    RankView view = {};
    view.num_ranks = num_ranks;
    verdict.why = call.Describe({view, is_colocated, /*num_sms=*/1}, {args.data(), args.size()},
                                {results.data(), results.size()}, &params);
    if (verdict.why.empty()) verdict.half_bytes = HalfBytes<Call>(params);
  });
  return verdict;
}

}  // namespace moe_a2a
