// The call `combine`. If `num_pairs` is 0, the operands are rows to sum, choice scalars to move,
// and the routing. Otherwise they are pairs (all rows, then all weights) and the routing. Results:
// sums and choice scalars, or the single sum of all pairs.
#ifndef MOE_A2A_CALLS_COMBINE_H_
#define MOE_A2A_CALLS_COMBINE_H_

#include <algorithm>
#include <cstdint>
#include <string>

#include "calls/array.h"
#include "calls/call.h"
#include "calls/routing.h"
#include "tuning.h"

namespace moe_a2a {

struct CombineCall {
  int64_t num_scalars, num_pairs, wire_format;
  bool float32_wire;
  float global_scale;

  using Params = CombineParams;
  static constexpr Operation kOperation = Operation::kCombine;

  template <typename Reader>
  bool Read(Reader&& read) {
    return read("num_scalars", &num_scalars) && read("num_pairs", &num_pairs) &&
           read("float32_wire", &float32_wire) && read("wire_format", &wire_format) &&
           read("global_scale", &global_scale);
  }

  Problem Describe(const CallContext& context, ArraySlice args, ArraySlice results,
                   CombineParams* params) const {
    CombineParams& p = *params;
    p.view = context.view;
    if (Problem problem = DescribeRouting(args, p.view.num_ranks, &p.routing); !problem.empty()) {
      return problem;
    }
    if (!HasRightSizes(args.size() - kNumRoutingArrays, results.size())) {
      return "combine needs one result for each operand, at most " + std::to_string(kMaxArrays) +
             ", or one result and at most " + std::to_string(kMaxPairs) +
             " pairs of rows and weights; got " + std::to_string(args.size() - kNumRoutingArrays) +
             " operands and " + std::to_string(results.size()) + " results";
    }
    SignShapes(p.view, p.routing);
    p.num_pairs = static_cast<int32_t>(num_pairs);
    p.num_moved = static_cast<int32_t>(num_scalars);
    p.num_summed = static_cast<int32_t>(results.size()) - p.num_moved;
    Mix(p.view.signature, num_pairs);
    Mix(p.view.signature, float32_wire);
    Mix(p.view.signature, wire_format);
    p.float32_wire = float32_wire;
    p.wire_format = static_cast<TokenFormat>(wire_format);
    p.wire_global_scale = global_scale;
    if (wire_format < 0 || wire_format > kNumFormats || (is_encoded() && float32_wire)) {
      return "wire_format must be 0 to " + std::to_string(kNumFormats) +
             ", and 0 if partial sums travel in float32; got " + std::to_string(wire_format);
    }
    p.listed =
        !float32_wire && num_pairs <= 1 && p.routing.top_k + p.view.num_ranks <= kWarpThreads;
    if (Problem problem = FirstOf({DescribeSums(args, results, p),
                                   DescribeScalars(args, results, p), DescribePairs(args, p)});
        !problem.empty()) {
      return problem;
    }
    if (is_encoded() && !p.listed) {
      return "combine with a token format needs rows of whole groups, at most one pair of rows and "
             "weights, and top_k plus ranks of at most " +
             std::to_string(kWarpThreads);
    }
    p.roles = grid_of(p, context.num_sms).roles;
    return {};
  }

  void Point(Addresses args, Addresses results, CombineParams* p) const {
    PointRouting(args, &p->routing);
    for (int i = 0; i < p->num_summed; ++i) {
      p->summed[i].rows = args[i];
      p->summed[i].out = results[i];
    }
    for (int i = 0; i < p->num_moved; ++i) {
      p->moved[i].in = args[p->num_summed + i];
      p->moved[i].out = results[p->num_summed + i];
    }
    for (int i = 0; i < p->num_pairs; ++i) {
      p->pair_rows[i] = args[i];
      p->pair_weights[i] = reinterpret_cast<const float*>(args[p->num_pairs + i]);
    }
    for (size_t i = 0; i < results.size(); ++i) p->fills[i].data = results[i];
  }

  static int64_t ZoneBytes(const CombineParams& p) { return p.zone_bytes; }

  static cudaError_t Launch(const Kernels& kernels, const CombineParams* ranks, int blocks,
                            cudaStream_t stream) {
    return kernels.combine(ranks, blocks, stream);
  }

 private:
  bool is_encoded() const { return wire_format != 0; }

  bool HasRightSizes(size_t payload, size_t num_results) const {
    if (num_scalars < 0 || static_cast<size_t>(num_scalars) > num_results) return false;
    if (num_pairs <= 0) return payload == num_results && payload <= kMaxArrays;
    return payload == 2 * static_cast<size_t>(num_pairs) && num_results == 1 &&
           num_pairs <= kMaxPairs;
  }

  Problem DescribeSums(ArraySlice args, ArraySlice results, CombineParams& p) const {
    const int64_t num_tokens = p.routing.num_tokens, capacity = p.routing.capacity;
    for (int i = 0; i < p.num_summed; ++i) {
      const Array &rows = args[i], &out = results[i];
      SummedArray& array = p.summed[i];
      array.elements = NumElements(rows, 1);
      if (!ToElementType(rows.type, &p.type) || rows.type != args[0].type) {
        return "combine needs arrays of one type: bfloat16, float16 or float32; got " +
               ToString(rows);
      }
      const int64_t item = rows.type.bytes;
      if (Problem problem = FirstOf({CheckLead(rows, "rows", {capacity}),
                                     CheckItems(out, "sums", {num_tokens}, array.elements * item)});
          !problem.empty()) {
        return problem;
      }
      array.vectorized = Width(array.elements * item, {&rows, &out}) == kVectorBytes;
      p.listed = p.listed && array.vectorized &&
                 (!is_encoded() || array.elements % group_size(p.wire_format) == 0);
      const int64_t row_bytes = is_encoded() ? encoded_stride(p.wire_format, array.elements)
                                             : array.elements * (float32_wire ? 4 : item);
      array.zone_offset = TakeZone(p.zone_bytes, num_tokens, row_bytes, p.view);
      p.fills[i] = FillOf(out);
    }
    return {};
  }

  Problem DescribeScalars(ArraySlice args, ArraySlice results, CombineParams& p) const {
    const int64_t num_tokens = p.routing.num_tokens, top_k = p.routing.top_k;
    for (int i = 0; i < p.num_moved; ++i) {
      const Array &in = args[p.num_summed + i], &out = results[p.num_summed + i];
      MovedArray& array = p.moved[i];
      array.choice_bytes = NumElements(in, 1) * in.type.bytes;
      if (Problem problem =
              FirstOf({CheckLead(in, "a choice array's rows", {p.routing.capacity}),
                       CheckItems(out, "a choice array", {num_tokens, top_k}, array.choice_bytes)});
          !problem.empty()) {
        return problem;
      }
      array.row_bytes = top_k * array.choice_bytes;
      array.width = Width(array.choice_bytes, {&in, &out});
      array.zone_offset = TakeZone(p.zone_bytes, num_tokens, array.row_bytes, p.view);
      p.fills[p.num_summed + i] = FillOf(out);
    }
    return {};
  }

  // Runs after DescribeSums(), because all pairs belong to the first sum.
  Problem DescribePairs(ArraySlice args, CombineParams& p) const {
    const int64_t capacity = p.routing.capacity;
    SummedArray& sum = p.summed[0];
    for (int i = 0; i < p.num_pairs; ++i) {
      const Array &rows = args[i], &weights = args[p.num_pairs + i];
      if (rows.type != args[0].type || weights.type != kFloat32) {
        return "combine needs rows of one type and weights of float32; got " + ToString(rows) +
               " and " + ToString(weights);
      }
      const int64_t item = rows.type.bytes;
      if (Problem problem =
              FirstOf({CheckItems(rows, "rows", {capacity}, sum.elements * item),
                       CheckItems(weights, "weights", {capacity},
                                  NumElements(args[p.num_pairs], 1) * kFloat32.bytes)});
          !problem.empty()) {
        return problem;
      }
      const int64_t weights_per_row = std::max<int64_t>(1, NumElements(weights, 1));
      p.elements_per_weight = std::max<int64_t>(1, sum.elements / weights_per_row);
      // A vector must not straddle two weights.
      const bool aligned = weights_per_row == 1 || p.elements_per_weight % 8 == 0;
      const bool even = Width(sum.elements * item, {&rows}) == kVectorBytes;
      sum.vectorized = sum.vectorized && aligned && even;
      // A warp goes through its list once for each segment, so unencoded segments must not be
      // short.
      const int64_t bytes_per_weight = p.elements_per_weight * item;
      p.weights_per_row = static_cast<int32_t>(weights_per_row);
      const bool is_segment = is_encoded() ? p.elements_per_weight % group_size(p.wire_format) == 0
                                           : bytes_per_weight % kVectorBytes == 0 &&
                                                 bytes_per_weight >= Tuning::kLeastListedBytes;
      p.listed = p.listed && even && (weights_per_row == 1 || is_segment);
    }
    return {};
  }
};

}  // namespace moe_a2a

#endif  // MOE_A2A_CALLS_COMBINE_H_
