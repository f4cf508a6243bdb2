// The call `dot_combine`: a grouped product in slices of columns, and the combine of its rows next
// to it. Operands: rows [C, K], weights [L, K, H] (transposed: [L, H, K]), the table of groups [3
// G] (ffi/grouped_gemm.cc), and the operands of the combine (calls/combine.h) without its rows.
// Results: sums [T, H]; the products [C, H], which are scratch memory; counters; choice arrays [T,
// K, ...].
#ifndef MOE_A2A_CALLS_DOT_COMBINE_H_
#define MOE_A2A_CALLS_DOT_COMBINE_H_

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "calls/array.h"
#include "calls/call.h"
#include "calls/combine.h"
#include "calls/routing.h"
#include "tuning.h"

namespace moe_a2a {

struct DotCombineCall {
  int64_t transposed, num_choice_arrays, num_pairs, num_addends;

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
  // Operands between the table and the routing: choice arrays, or the weights of rows; and an
  // addend.
  static constexpr size_t kMaxOthers = kMaxArrays;

  template <typename Reader>
  bool Read(Reader&& read) {
    return read("transposed", &transposed) && read("num_choice_arrays", &num_choice_arrays) &&
           read("num_pairs", &num_pairs) && read("num_addends", &num_addends);
  }

  Problem Describe(const CallContext& context, ArraySlice args, ArraySlice results,
                   CombineParams* params) const {
    constexpr size_t kLeast = kNumOperands + kNumRoutingArrays;
    if (num_choice_arrays < 0 || num_choice_arrays >= static_cast<int64_t>(kMaxArrays) ||
        args.size() < kLeast || args.size() > kLeast + kMaxOthers ||
        results.size() != kNumResults + static_cast<size_t>(num_choice_arrays)) {
      return "dot_combine needs rows, weights, a table, the other operands of a combine, three "
             "results and the choice arrays; got " +
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
    if (Problem problem = combine(rows.type.name)
                              .Describe(context, {operands.data(), operands.size()},
                                        {sums.data(), sums.size()}, params);
        !problem.empty()) {
      return problem;
    }
    if (!params->listed || params->weights_per_row > 1) {
      return "dot_combine needs rows of whole 16-byte words with one weight each or none, and "
             "top_k plus ranks of at most " +
             std::to_string(kWarpThreads);
    }
    Mix(params->view.signature, kNumSlices);
    // Ranks that share a device also share the product, so the tiles of all their groups are
    // counted together.
    const int64_t ranks_here = context.is_colocated ? context.view.num_ranks : 1;
    params->sliced = {kNumSlices, static_cast<int32_t>(ranks_here * groups), of_slice, nullptr,
                      nullptr};
    return {};
  }

  // `finished` and `group_sizes` are those of the first rank of the device, also for its other
  // ranks (ffi/dot_combine.h): ranks that share a device have one table [3, ranks, G], of which
  // each rank has a part.
  void Point(Addresses args, Addresses results, CombineParams* p) const {
    char *operands[1 + kMaxOthers + kNumRoutingArrays] = {results[kProducts]}, *sums[kMaxArrays];
    const Addresses others = args.from(kNumOperands), moved = results.from(kNumResults);
    std::copy(others.begin(), others.end(), operands + 1);
    sums[0] = results[kSums];
    std::copy(moved.begin(), moved.end(), sums + 1);
    combine().Point({operands, 1 + others.size()}, {sums, 1 + moved.size()}, p);
    p->sliced.group_sizes = reinterpret_cast<const int32_t*>(args[kTable]) + p->sliced.num_groups;
    p->sliced.finished = reinterpret_cast<const uint32_t*>(results[kCounters]) + 1;
  }

  static int64_t ZoneBytes(const CombineParams& p) { return p.zone_bytes; }

  // The combine alone, after the product.
  static cudaError_t Launch(const Kernels& kernels, const CombineParams* ranks, int blocks,
                            cudaStream_t stream) {
    return kernels.combine(ranks, blocks, stream);
  }

 private:
  // Returns the call of the combine, whose partial sums travel in this type. Only Describe() needs
  // the type.
  CombineCall combine(std::string wire = {}) const {
    return {num_choice_arrays, num_pairs, num_addends, std::move(wire), 0};
  }
};

}  // namespace moe_a2a

#endif  // MOE_A2A_CALLS_DOT_COMBINE_H_
