// The call `route`. Operands: expert ids, this device's rank. Results: plan, scratch arrays.
#pragma once

#include <algorithm>
#include <cstdint>

#include "calls/call.h"
#include "calls/routing.h"

namespace moe_a2a {

struct RouteCall : ExchangeCall<RouteParams, Operation::kRoute> {
  int64_t num_experts, alignment, tokens_per_chunk;
  bool may_drop;
  int64_t parts;

  static constexpr const char* kTarget = "moe_a2a_route";

  bool Read(const AttributeReader& read) {
    return read("num_experts", &num_experts) && read("alignment", &alignment) &&
           read("tokens_per_chunk", &tokens_per_chunk) && read("may_drop", &may_drop) &&
           read("parts", &parts);
  }

  Problem Describe(const CallContext& context, ArraySlice args, ArraySlice results,
                   RouteParams* params) const {
    RouteParams& p = *params;
    if (args.size() != 2 || results.size() != kNumPlanArrays + 3 ||
        results[4].dimensions.size() == 0) {
      return "route needs ids and rank, and returns 14 arrays";
    }
    const Array& ids = args[0];
    const size_t rank = ids.dimensions.size();
    if (rank < 2 || ids.type != kInt32) {
      return "ids must be S32[..., num_tokens, top_k]; got " + ToString(ids);
    }
    MOE_A2A_TRY(CheckShape(args[1], "rank", kInt32, {}));
    p.view = context.view;
    p.num_tokens = static_cast<int32_t>(ids.dimensions[rank - 2]);
    p.top_k = static_cast<int32_t>(ids.dimensions[rank - 1]);
    p.batch = 1;
    for (size_t i = 0; i + 2 < rank; ++i) p.batch *= static_cast<int32_t>(ids.dimensions[i]);
    p.num_experts = static_cast<int32_t>(num_experts);
    p.alignment = static_cast<int32_t>(alignment);
    p.capacity = static_cast<int32_t>(results[4].dimensions.end()[-1]);
    p.may_drop = may_drop;
    p.parts = static_cast<int32_t>(parts);
    p.tokens_per_chunk = static_cast<int32_t>(tokens_per_chunk);
    if (p.tokens_per_chunk < 1) return "route needs chunks of one token or more";
    p.chunks =
        static_cast<int32_t>(std::max<int64_t>(1, ceil_div(p.num_tokens, p.tokens_per_chunk)));
    const int64_t blocks = int64_t{p.batch} * p.chunks * p.view.num_ranks;
    if (p.tokens_per_chunk > kMaxTokensPerRouteChunk || p.num_experts % p.view.num_ranks != 0 ||
        p.parts < 1 || p.local_experts() % p.parts != 0) {
      return Concat("route needs chunks of at most ", kMaxTokensPerRouteChunk,
                    " tokens, and experts of whole ranks and parts; got ", p.tokens_per_chunk,
                    " tokens, ", num_experts, " experts, ", parts, " parts and ", p.view.num_ranks,
                    " ranks");
    }
    const int64_t counts = int64_t{p.levels()} * p.local_experts();
    if ((context.is_colocated && blocks > kMaxColocatedBlocks) ||
        int64_t{p.batch} * p.chunks > kMaxChunks || p.local_experts() > kMaxLocalExperts ||
        counts > kMaxRouteCounts || p.num_experts > kMaxRouteExperts) {
      return Unsupported("route has at most ", kMaxChunks, " chunks, ", kMaxLocalExperts,
                         " experts per rank, ", kMaxRouteExperts, " experts and ", kMaxRouteCounts,
                         " counts; got ", p.batch, " batches of ", p.chunks, " chunks, ",
                         p.local_experts(), " experts per rank, ", p.num_experts, " experts and ",
                         counts, " counts");
    }
    Mix(p.view.signature, p.batch, p.num_tokens, p.top_k, p.num_experts, p.capacity, p.alignment,
        p.may_drop, p.parts);
    TakeZone(p.zone_bytes, 1, NumElements(ids, 0) * ids.type.bytes, p.view);
    context.Bind(&p.ids, ids);
    context.Bind(&p.rank, args[1]);
    BindPlan(context, results, &p.plan);
    const ArraySlice scratch = results.from(kNumPlanArrays);
    context.Bind(&p.all_ids, scratch[0]);
    context.Bind(&p.expert_counts, scratch[1]);
    context.Bind(&p.rank_counts, scratch[2]);
    return {};
  }
};

}  // namespace moe_a2a
