// The call `weighted_dispatch`. Operands: a payload array, optional rows for inner products,
// optional weights, the routing. Results: scaled rows (with weights), inner products (with rows).
#pragma once

#include <algorithm>
#include <cstdint>

#include "calls/call.h"
#include "calls/payload.h"
#include "calls/routing.h"

namespace moe_a2a {

struct WeightedDispatchCall : ExchangeCall<DispatchParams, Operation::kDispatch> {
  int64_t num_rows, num_weights;

  static constexpr const char* kTarget = "moe_a2a_weighted_dispatch";

  bool Read(const AttributeReader& read) {
    return read("num_rows", &num_rows) && read("num_weights", &num_weights);
  }

  Problem Describe(const CallContext& context, ArraySlice args, ArraySlice results,
                   DispatchParams* params) const {
    DispatchParams& p = *params;
    MOE_A2A_TRY(DescribeRouting(context, args, p));
    const size_t num_results = num_rows + num_weights;
    if (num_rows < 0 || num_weights < 0 || num_results == 0 || results.size() != num_results ||
        args.size() != 1 + num_results + kNumRoutingArrays) {
      return Concat(
          "weighted dispatch needs a payload array, and a result for each array of rows or "
          "weights; got ",
          args.size() - kNumRoutingArrays, " operands and ", results.size(), " results for ",
          num_rows, " arrays of rows and ", num_weights, " of weights");
    }
    if (num_rows > 1 || num_weights > 1) {
      return Unsupported("weighted dispatch has at most one array of rows and one of weights; got ",
                         num_rows, " and ", num_weights);
    }
    Mix(p.view.signature, 1 + num_weights + 2 * num_rows);
    const bool scaled = num_weights > 0, dotted = num_rows > 0;
    const Array& in = args[0];
    if (!ToElementType(in.type, &p.weighting.type)) {
      return Unsupported("weighted dispatch needs bfloat16, float16 or float32; got " +
                         ToString(in));
    }
    const Array& numbers = scaled ? args[1 + dotted] : results[0];
    if ((scaled && numbers.type != kFloat32) || numbers.dimensions.size() > 1) {
      return Unsupported("weighted dispatch has one weight of float32 for each row; got " +
                         ToString(numbers));
    }
    const int64_t num_tokens = p.routing.num_tokens, capacity = p.routing.capacity;
    MOE_A2A_TRY(CheckLead(in, "a payload array", {num_tokens}));
    const int64_t row_bytes = NumElements(in, 1) * in.type.bytes;
    MovedArray& array = AddArray(row_bytes, 0, Width(row_bytes, {&in}), p);
    context.Bind(&array.in, in);
    if (dotted) {
      const Array& rows = args[1];
      if (rows.type != in.type) {
        return Unsupported("weighted dispatch needs rows of the payload's type; got " +
                           ToString(rows) + " and " + ToString(in));
      }
      MOE_A2A_TRY(CheckItems(rows, "rows", {capacity}, array.row_bytes));
      array.width = std::min(array.width, Width(array.row_bytes, {&rows}));
      context.Bind(&p.weighting.rows, rows);
      const Array& products = results[scaled];
      MOE_A2A_TRY(CheckShape(products, "inner products", kFloat32, {capacity}));
      context.Bind(&p.weighting.dotted, products);
      context.BindFill(&p.fills[scaled], products);
    }
    if (scaled) {
      MOE_A2A_TRY(FirstOf({CheckShape(args[1 + dotted], "weights", kFloat32, {capacity}),
                           CheckItems(results[0], "scaled rows", {capacity}, array.row_bytes)}));
      array.width = std::min(array.width, Width(array.row_bytes, {&results[0]}));
      context.Bind(&p.weighting.weights, args[1 + dotted]);
      context.Bind(&array.out, results[0]);
      context.BindFill(&p.fills[0], results[0]);
    }
    if (array.width != kVectorBytes) {
      return Unsupported("weighted dispatch needs rows of 16-byte words");
    }
    p.roles = grid_of(p, context.num_sms).roles;
    return {};
  }
};

}  // namespace moe_a2a
