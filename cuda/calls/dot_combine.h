// The call `dot_combine`: a grouped product in slices of columns, and the combine of its rows next to it. Operands: rows
// [C, K], weights [L, K, H] (transposed: [L, H, K]), the table of groups [3 G] (ffi/grouped_gemm.cc), choice arrays to move
// [C, ...], and the routing. Results: sums [T, H]; the products [C, H], which are scratch memory; counters; choice
// arrays [T, K, ...].
#ifndef MOE_A2A_CALLS_DOT_COMBINE_H_
#define MOE_A2A_CALLS_DOT_COMBINE_H_

#include <cstdint>
#include <string>

#include "calls/array.h"
#include "calls/call.h"
#include "calls/combine.h"
#include "calls/routing.h"
#include "tuning.h"

namespace moe_a2a {

struct DotCombineCall {
  int64_t transposed, num_choice_arrays;

  static constexpr const char* kTarget = "moe_a2a_dot_combine";
  static constexpr bool kHasHalves = false;
  using Params = CombineParams;
  static constexpr Operation kOperation = Operation::kCombine;
  static constexpr int kNumSlices = 4;
  static constexpr int64_t kNumCounters =
      1 + kNumSlices;  // the next tile; finished tiles of slices

  // The places of operands before the routing, and of results.
  enum Operand { kRows, kWeights, kTable, kNumOperands };
  enum Result { kSums, kProducts, kCounters, kNumResults };

  template <typename Reader>
  bool Read(Reader&& read) {
    return read("transposed", &transposed) && read("num_choice_arrays", &num_choice_arrays);
  }

  Problem Describe(const CallContext& context, ArraySlice args, ArraySlice results,
                   CombineParams* params) const {
    if (num_choice_arrays < 0 || num_choice_arrays >= static_cast<int64_t>(kMaxArrays) ||
        args.size() != kNumOperands + num_choice_arrays + kNumRoutingArrays ||
        results.size() != kNumResults + static_cast<size_t>(num_choice_arrays)) {
      return "dot_combine needs rows, weights, a table, choice arrays, the routing, three results "
             "and as many choice arrays; got " +
             std::to_string(args.size()) + " operands and " + std::to_string(results.size()) +
             " results";
    }
    if (context.view.num_ranks == 1 || context.is_multi_host) {
      return "dot_combine needs two or more ranks that share memory";
    }
    const Array &rows = args[kRows], &weights = args[kWeights], &table = args[kTable],
                &products = results[kProducts];
    if (rows.dimensions.size() != 2 || weights.dimensions.size() != 3 ||
        products.dimensions.size() != 2 || table.dimensions.size() != 1) {
      return "dot_combine needs rows and products of two axes, weights of three and a table of "
             "one; "
             "got " +
             ToString(rows) + ", " + ToString(products) + ", " + ToString(weights) + " and " +
             ToString(table);
    }
    const int64_t groups = table.dimensions[0] / 3, matrices = weights.dimensions[0];
    const int64_t inner = rows.dimensions[1], columns = products.dimensions[1];
    const bool is_transposed = transposed != 0;
    if (Problem problem =
            FirstOf({CheckShape(weights, "weights", rows.type,
                                {matrices, is_transposed ? columns : inner,
                                 is_transposed ? inner : columns}),
                     CheckShape(table, "the table of groups", kInt32, {3 * groups}),
                     CheckShape(products, "products", rows.type, {rows.dimensions[0], columns}),
                     CheckShape(results[kCounters], "counters", kInt32, {kNumCounters})});
        !problem.empty()) {
      return problem;
    }
    if (rows.type == kFloat32)
      return "dot_combine needs bfloat16 or float16; got " + ToString(rows);
    if (rows.dimensions[0] == 0 || groups == 0) return "there are no rows or no groups";
    // Only the last slice may have fewer columns.
    const int64_t of_slice = slice_columns(columns, kNumSlices);
    if (columns <= (kNumSlices - 1) * of_slice) {
      return "dot_combine needs at least one tile of " + std::to_string(Tuning::kForward.n) +
             " columns in each of " + std::to_string(kNumSlices) + " slices; got " +
             ToString(products);
    }
    Arrays operands = {products}, sums = {results[kSums]};
    const ArraySlice others = args.from(kNumOperands), moved = results.from(kNumResults);
    operands.insert(operands.end(), others.begin(), others.end());
    sums.insert(sums.end(), moved.begin(), moved.end());
    const CombineCall combine = {num_choice_arrays, 0, 0, rows.type.name, 0};
    if (Problem problem = combine.Describe(context, {operands.data(), operands.size()},
                                           {sums.data(), sums.size()}, params);
        !problem.empty()) {
      return problem;
    }
    if (!params->listed) {
      return "dot_combine needs rows of whole 16-byte words, and top_k plus ranks of at most " +
             std::to_string(kWarpThreads);
    }
    Mix(params->view.signature, kNumSlices);
    // Ranks that share a device also share the product, so the tiles of all their groups are counted together.
    const int64_t ranks_here = context.is_colocated ? context.view.num_ranks : 1;
    params->sliced = {kNumSlices, static_cast<int32_t>(ranks_here * groups), of_slice, nullptr,
                      nullptr};
    return {};
  }

  // `finished` and `group_sizes` are those of the first rank of the device, also for its other ranks (ffi/dot_combine.h):
  // ranks that share a device have one table [3, ranks, G], of which each rank has a part.
  void Point(Addresses args, Addresses results, CombineParams* p) const {
    PointRouting(args, &p->routing);
    p->summed[0].rows = results[kProducts];
    p->summed[0].out = results[kSums];
    p->fills[0].data = results[kSums];
    for (int i = 0; i < p->num_moved; ++i) {
      p->moved[i].in = args[kNumOperands + i];
      p->moved[i].out = results[kNumResults + i];
      p->fills[1 + i].data = results[kNumResults + i];
    }
    p->sliced.group_sizes = reinterpret_cast<const int32_t*>(args[kTable]) + p->sliced.num_groups;
    p->sliced.finished = reinterpret_cast<const uint32_t*>(results[kCounters]) + 1;
  }

  static int64_t ZoneBytes(const CombineParams& p) { return p.zone_bytes; }

  // The combine alone, after the product.
  static cudaError_t Launch(const Kernels& kernels, const CombineParams* ranks, int blocks,
                            cudaStream_t stream) {
    return kernels.combine(ranks, blocks, stream);
  }
};

}  // namespace moe_a2a

#endif  // MOE_A2A_CALLS_DOT_COMBINE_H_
