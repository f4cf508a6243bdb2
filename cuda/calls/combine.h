// The call `combine`. Operands: arrays of rows to sum, choice arrays, addends, the routing.
// Results: a sum for each array of rows, then the choice arrays. With `num_pairs` > 0, operands:
// the rows of all pairs, the weights of all pairs, an addend, the routing. Result: one sum over all
// pairs. Addends exist for all sums or for none.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "calls/call.h"
#include "calls/routing.h"
#include "tuning.h"

namespace moe_a2a {

struct CombineCall : ExchangeCall<CombineParams, Operation::kCombine, /*kIsSplittable=*/true> {
  int64_t num_choice_arrays, num_pairs, num_addends;
  std::string wire;  // of partial sums: a dtype, or the Python class of a format
  float global_scale;

  static constexpr const char* kTarget = "moe_a2a_combine";

  bool Read(const AttributeReader& read) {
    return read("num_choice_arrays", &num_choice_arrays) && read("num_pairs", &num_pairs) &&
           read("num_addends", &num_addends) && read("wire", &wire) &&
           read("global_scale", &global_scale);
  }

  Problem Describe(const CallContext& context, ArraySlice args, ArraySlice results,
                   CombineParams* params) const {
    CombineParams& p = *params;
    MOE_A2A_TRY(DescribeRouting(context, args, p));
    if (!HasRightSizes(args.size() - kNumRoutingArrays, results.size())) {
      return Concat(
          "combine needs one result for each operand, or one result of all pairs of rows and "
          "weights, then an addend for each sum or none; got ",
          args.size() - kNumRoutingArrays, " operands, of which ", num_addends, " are addends, ",
          num_pairs, " pairs and ", results.size(), " results");
    }
    if (results.size() > kMaxArrays || num_pairs > kMaxPairs) {
      return Unsupported("combine has at most ", kMaxArrays, " results and ", kMaxPairs,
                         " pairs of rows and weights; got ", results.size(), " and ", num_pairs);
    }
    p.num_pairs = static_cast<int32_t>(num_pairs);
    p.num_moved = static_cast<int32_t>(num_choice_arrays);
    p.num_summed = static_cast<int32_t>(results.size()) - p.num_moved;
    MOE_A2A_TRY(DescribeWire(args, p));
    Mix(p.view.signature, num_pairs, p.wire, p.wire_format);
    p.listed = p.wire == WireType::kOfRows && num_pairs <= 1;
    MOE_A2A_TRY(
        FirstOf({DescribeSums(context, args, results, p),
                 DescribeScalars(context, args, results, p), DescribePairs(context, args, p)}));
    if (is_encoded(p) && !p.listed) {
      return Unsupported(
          "combine with a token format needs rows of whole groups, and at most one pair of rows "
          "and weights");
    }
    p.roles = grid_of(p, context.num_sms).roles;
    return {};
  }

 private:
  static bool is_encoded(const CombineParams& p) { return p.wire_format != kNoFormat; }

  static int first_addend(const CombineParams& p) {
    return p.num_pairs > 0 ? 2 * p.num_pairs : p.num_summed + p.num_moved;
  }

  bool HasRightSizes(int64_t payload, int64_t num_results) const {
    const int64_t num_sums = num_results - num_choice_arrays, moved = payload - num_addends;
    if (num_choice_arrays < 0 || num_sums < 0) return false;
    if (num_addends != 0 && num_addends != num_sums) return false;
    if (num_pairs <= 0) return moved == num_results;
    return moved - num_pairs == num_pairs && num_results == 1 && num_sums == 1;
  }

  Problem DescribeWire(ArraySlice args, CombineParams& p) const {
    p.wire_format = format_named(wire);
    p.wire_global_scale = global_scale;
    if (p.num_summed == 0 || is_encoded(p) || wire == args[0].type.name) return {};
    p.wire = WireType::kFloat32;
    if (wire == kFloat32.name) return {};
    return Unsupported("combine sends partial sums in the type of the rows, in " + kFloat32.name +
                       " or in a token format; got '" + wire + "' for rows " + ToString(args[0]));
  }

  Problem DescribeSums(const CallContext& context, ArraySlice args, ArraySlice results,
                       CombineParams& p) const {
    const int64_t num_tokens = p.routing.num_tokens, capacity = p.routing.capacity;
    for (int i = 0; i < p.num_summed; ++i) {
      const Array &rows = args[i], &out = results[i];
      SummedArray& array = p.summed[i];
      array.elements = NumElements(rows, 1);
      if (rows.type != args[0].type || out.type != rows.type) {
        return "combine needs rows and sums of one type; got " + ToString(rows) + " and " +
               ToString(out) + " next to " + ToString(args[0]);
      }
      if (!ToElementType(rows.type, &p.type)) {
        return Unsupported("combine sums bfloat16, float16 or float32; got " + ToString(rows));
      }
      const int64_t item = rows.type.bytes;
      const Array& addend = num_addends > 0 ? args[first_addend(p) + i] : out;
      MOE_A2A_TRY(FirstOf({CheckLead(rows, "rows", {capacity}),
                           CheckItems(out, "sums", {num_tokens}, array.elements * item),
                           CheckItems(addend, "addends", {num_tokens}, array.elements * item)}));
      if (addend.type != out.type) {
        return "combine needs addends of the type of the sums; got " + ToString(addend) + " for " +
               ToString(out);
      }
      array.vectorized = Width(array.elements * item, {&rows, &out, &addend}) == kVectorBytes;
      p.listed = p.listed && array.vectorized &&
                 (!is_encoded(p) || array.elements % group_size(p.wire_format) == 0);
      const int64_t row_bytes =
          is_encoded(p) ? encoded_stride(p.wire_format, array.elements)
                        : array.elements * (p.wire == WireType::kFloat32 ? kFloat32.bytes : item);
      array.zone_offset = TakeZone(p.zone_bytes, num_tokens, row_bytes, p.view);
      context.Bind(&array.rows, rows);
      context.Bind(&array.out, out);
      if (num_addends > 0) context.Bind(&array.addend, addend);
      context.BindFill(&p.fills[i], out);
    }
    return {};
  }

  Problem DescribeScalars(const CallContext& context, ArraySlice args, ArraySlice results,
                          CombineParams& p) const {
    const int64_t num_tokens = p.routing.num_tokens, top_k = p.routing.top_k;
    for (int i = 0; i < p.num_moved; ++i) {
      const Array &in = args[p.num_summed + i], &out = results[p.num_summed + i];
      MovedArray& array = p.moved[i];
      array.choice_bytes = NumElements(in, 1) * in.type.bytes;
      MOE_A2A_TRY(
          FirstOf({CheckLead(in, "a choice array's rows", {p.routing.capacity}),
                   CheckItems(out, "a choice array", {num_tokens, top_k}, array.choice_bytes)}));
      array.row_bytes = top_k * array.choice_bytes;
      array.width = Width(array.choice_bytes, {&in, &out});
      array.zone_offset = TakeZone(p.zone_bytes, num_tokens, array.row_bytes, p.view);
      context.Bind(&array.in, in);
      context.Bind(&array.out, out);
      context.BindFill(&p.fills[p.num_summed + i], out);
    }
    return {};
  }

  // Call this after DescribeSums(), which describes summed[0], the sum of all pairs.
  Problem DescribePairs(const CallContext& context, ArraySlice args, CombineParams& p) const {
    const int64_t capacity = p.routing.capacity;
    SummedArray& sum = p.summed[0];
    for (int i = 0; i < p.num_pairs; ++i) {
      const Array &rows = args[i], &weights = args[p.num_pairs + i];
      if (rows.type != args[0].type || weights.type != kFloat32) {
        return Unsupported("combine needs rows of one type and weights of float32; got " +
                           ToString(rows) + " and " + ToString(weights));
      }
      const int64_t item = rows.type.bytes;
      MOE_A2A_TRY(FirstOf({CheckItems(rows, "rows", {capacity}, sum.elements * item),
                           CheckItems(weights, "weights", {capacity},
                                      NumElements(args[p.num_pairs], 1) * kFloat32.bytes)}));
      context.Bind(&p.pair_rows[i], rows);
      context.Bind(&p.pair_weights[i], weights);
      const int64_t weights_per_row = std::max<int64_t>(1, NumElements(weights, 1));
      p.elements_per_weight = std::max<int64_t>(1, sum.elements / weights_per_row);
      // All elements of a 16-byte vector must have the same weight.
      const bool aligned = weights_per_row == 1 || p.elements_per_weight % 8 == 0;
      const bool even = Width(sum.elements * item, {&rows}) == kVectorBytes;
      sum.vectorized = sum.vectorized && aligned && even;
      // A warp reads its SourceList once for each segment, so short segments would be slow.
      const int64_t bytes_per_weight = p.elements_per_weight * item;
      p.weights_per_row = static_cast<int32_t>(weights_per_row);
      const bool is_segment = is_encoded(p) ? p.elements_per_weight % group_size(p.wire_format) == 0
                                            : bytes_per_weight % kVectorBytes == 0 &&
                                                  bytes_per_weight >= Tuning::kLeastListedBytes;
      p.listed = p.listed && even && (weights_per_row == 1 || is_segment);
    }
    return {};
  }
};

}  // namespace moe_a2a
