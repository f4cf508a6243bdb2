// The calls that run without other ranks: products, the plan of a placement, and the choice of
// experts. A call is a struct as in calls/call.h, but has no state: its handler describes it at
// each execution.
//
// moe_a2a_grouped_gemm: operands a, b and the table of groups; results d and the kernel's counter,
// int32 [1]. kWeightGradient may have a fourth operand, the float32 total to which the products are
// added; d is then the same memory.
// moe_a2a_dot_act, an activated product of rows [C, K] and weights [L, K, P]: operands rows,
// weights, table, biases [L, P] or [0], router weights, float32 [C]; results activations [C, I],
// pre-activations [C, P] or [0], counter.
// moe_a2a_act_dot_grad, the gradient of activations [C, I] times weights [L, I, N]: operands
// gradient [C, N], weights, table, pre-activations [C, P], router weights; results gradient of the
// pre-activations [C, P], weighted activations [C, I], partial dots, float32 [ceil(I /
// kDotColumns), C], counter.
// moe_a2a_fp8_gemm: operands rows [C, K] and weights [L, N, K], float8_e4m3fn; the table; scales of
// rows [C, K / 128] and of weights [L, ceil(N / 128), K / 128], float32; results d [C, N], bfloat16
// or float32, and the counter. Each lane loads the scales of its rows directly from the operand, so
// the order of the scales costs nothing.
// moe_a2a_act_encode, the pass between two products in FP8: operands product [B, C, P], bfloat16 or
// float32; the table of B times L groups; router weights, float32 [B, C], or [0] to encode the
// product itself; results values [B, C, I], float8_e4m3fn, and scales [B, C, I / 128], float32.
// moe_a2a_act_grad, the gradients of act_encode: operands as of act_encode, and the gradient of the
// activations [B, C, I]; results values [B, C, P] and scales [B, C, P / 128] of the gradient of the
// product, this gradient [B, C, P], the weighted activations [B, C, I], and the dots of rows,
// float32 [B, C].
// moe_a2a_encode_squares, the quantization of weights: operand weights [L, K, N], bfloat16 or
// float32; results values [L, N, K] or [0], the same values [L, K, N] or [0], float8_e4m3fn, and
// scales [L, N / 128, K / 128], float32.
// moe_a2a_fill_slots, which fills spare slots of ranks with experts (placement/fill_slots.h):
// operands experts and rows, int32 [B, R, L]; results the expert and the rows of each slot, int32
// [B, R, L + S].
// moe_a2a_choose, which chooses the experts of tokens (router/choose.h): operands keys and values,
// float32 [T, E], and a mask of tokens, PRED [T] or [0]; results ids, int32, weights and chosen
// values, float32 [T, K].
//
// All products except kWeightGradient accept one more operand after these: spare weights, [S, K, N]
// or [S, N, K], whose indices follow those of the weights. Biases are then [L + S, P], and scales
// of weights [L + S, N / 128, K / 128].
//
// The table of groups is int32 [3, groups]: first rows, numbers of rows, and indices of weights.
// Its values are not checked. Groups must lie within the rows, and indices within the weights; the
// lowering in Python ensures both.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "calls/array.h"
#include "calls/call.h"
#include "gemm/act_encode.h"
#include "gemm/encode_squares.h"
#include "gemm/fp8_gemm.h"
#include "gemm/grouped_gemm.h"
#include "layout.h"
#include "library/library_gemm.h"
#include "lists.h"
#include "placement/fill_slots.h"
#include "router/choose.h"
#include "runtime/problem.h"

namespace moe_a2a {

inline Problem CheckCounts(ArraySlice args, size_t least, size_t most, ArraySlice results,
                           size_t num_results) {
  if (args.size() >= least && args.size() <= most && results.size() == num_results) return {};
  return "the call needs " + std::to_string(least) + " to " + std::to_string(most) +
         " operands and " + std::to_string(num_results) + " results; got " +
         std::to_string(args.size()) + " and " + std::to_string(results.size());
}

inline Problem CheckAxes(const Array& rows, const Array& weights, const Array& table) {
  if (rows.dimensions.size() == 2 && weights.dimensions.size() == 3 && table.dimensions.size() == 2)
    return {};
  return "grouped_dot needs rows of two axes, weights of three and a table of two; got " +
         ToString(rows) + ", " + ToString(weights) + " and " + ToString(table);
}

// Checks and sets the groups and the counter. The table has two axes.
template <typename Gemm>
Problem DescribeGroups(const Array& table, const Array& counter, Gemm* gemm) {
  const int64_t num_groups = table.dimensions[1];
  gemm->starts = static_cast<const int32_t*>(table.data);
  gemm->sizes = gemm->starts + num_groups;
  gemm->weights = gemm->sizes + num_groups;
  gemm->num_groups = static_cast<int32_t>(num_groups);
  gemm->counter = static_cast<int32_t*>(counter.data);
  return FirstOf({CheckShape(table, "the table of groups", kInt32, {3, num_groups}),
                  CheckShape(counter, "the counter", kInt32, {1})});
}

// Sets the second array of weights, if there is one. `like` is the first.
template <typename Gemm>
Problem DescribeSpare(ArraySlice spare, const Array& like, Gemm* gemm) {
  if (spare.size() == 0) return {};
  if (spare[0].dimensions.size() != 3) {
    return "spare weights must have three axes; got " + ToString(spare[0]);
  }
  gemm->spare = spare[0].data;
  gemm->num_spare = spare[0].dimensions[0];
  return CheckShape(spare[0], "spare weights", like.type,
                    {gemm->num_spare, like.dimensions[1], like.dimensions[2]});
}

// Checks and sets the members that all products of 16-bit numbers have in common.
inline Problem DescribeGemm(const Array& rows, const Array& weights, const Array& table,
                            const Array& counter, GroupedGemm* gemm) {
  MOE_A2A_TRY(CheckAxes(rows, weights, table));
  const bool is_bfloat16 = rows.type == kBFloat16;
  gemm->type = is_bfloat16 ? ElementType::kBFloat16 : ElementType::kFloat16;
  const char* name = is_bfloat16 ? "bfloat16" : rows.type == kFloat16 ? "float16" : "another type";
  gemm->num_rows = rows.dimensions[0];
  gemm->num_weights = weights.dimensions[0];
  gemm->k = weights.dimensions[1];
  gemm->n = weights.dimensions[2];
  // This check precedes the comparison of dtypes, so that the reason names a dtype that no kernel
  // supports.
  MOE_A2A_TRY(WhyNotGroupedGemm(name, gemm->num_rows, table.dimensions[1], gemm->k, gemm->n));
  const bool is_transposed = gemm->product == GroupedProduct::kTransposed;
  return FirstOf(
      {CheckShape(rows, "rows", rows.type, {gemm->num_rows, is_transposed ? gemm->n : gemm->k}),
       CheckShape(weights, "weights", gemm->adds ? kFloat32 : rows.type,
                  {gemm->num_weights, gemm->k, gemm->n}),
       DescribeGroups(table, counter, gemm)});
}

// An activation as attributes of a call.
struct ActivationAttributes {
  int64_t activation, gated;
  float alpha, limit;

  template <typename Reader>
  bool Read(Reader&& read) {
    return read("activation", &activation) && read("gated", &gated) && read("alpha", &alpha) &&
           read("limit", &limit);
  }

  // Sets the activation of an ActivatedProduct or an ActEncode.
  template <typename Activated>
  Problem Describe(Activated* activated) const {
    const auto last = Activation::kScaledBias;
    activated->function = static_cast<Activation>(activation);
    activated->is_gated = gated != 0;
    activated->alpha = alpha;
    activated->limit = limit;
    const bool needs_gate = activated->function == Activation::kClampedSwiglu,
               needs_none = activated->function == last;
    if (activation >= 0 && activation <= static_cast<int64_t>(last) &&
        !(activated->is_gated ? needs_none : needs_gate)) {
      return {};
    }
    return "no kernel has the activation " + std::to_string(activation) +
           (activated->is_gated ? ", gated" : ", not gated");
  }
};

inline Problem CheckGated(const ActivatedProduct& activated, int64_t pre) {
  if (!activated.is_gated || pre % 16 == 0) return {};
  return Unsupported("a gated activation needs pre-activations in multiples of 16 columns; got " +
                     std::to_string(pre));
}

struct GroupedGemmCall {
  int64_t product, num_sms;

  static constexpr const char* kTarget = "moe_a2a_grouped_gemm";
  using Params = GroupedGemm;

  template <typename Reader>
  bool Read(Reader&& read) {
    return read("product", &product) && read("num_sms", &num_sms);
  }

  Problem Describe(ArraySlice args, ArraySlice results, GroupedGemm* gemm) const {
    if (product < 0 || product > static_cast<int64_t>(GroupedProduct::kWeightGradient)) {
      return "grouped_dot has no product " + std::to_string(product);
    }
    gemm->product = static_cast<GroupedProduct>(product);
    const bool is_gradient = gemm->product == GroupedProduct::kWeightGradient;
    MOE_A2A_TRY(CheckCounts(args, 3, 4, results, 2));
    const Array &a = args[0], &b = args[1], &d = results[0];
    gemm->adds = is_gradient && args.size() == 4;
    MOE_A2A_TRY(DescribeGemm(a, is_gradient ? d : b, args[2], results[1], gemm));
    gemm->a = a.data;
    gemm->b = b.data;
    gemm->d = d.data;
    if (gemm->adds) {
      MOE_A2A_TRY(
          CheckShape(args[3], "the total", kFloat32, {gemm->num_weights, gemm->k, gemm->n}));
      if (args[3].data != d.data) return "the total and the result must be the same memory";
    }
    if (is_gradient) return CheckShape(b, "b", a.type, {gemm->num_rows, gemm->n});
    const bool is_transposed = gemm->product == GroupedProduct::kTransposed;
    return FirstOf(
        {DescribeSpare(args.from(3), b, gemm),
         CheckShape(d, "the result", a.type, {gemm->num_rows, is_transposed ? gemm->k : gemm->n})});
  }

  static Problem Launch(GroupedGemm& gemm, int sms, cudaStream_t stream) {
    gemm.num_sms = sms;
    return LaunchGroupedGemm(gemm, stream);
  }
};

// The product of a GroupedGemmCall by cuBLASLt. The counter is the scratch memory, int32
// [LibraryScratch(groups)]. `mean_rows` of a group is what the library expects.
struct LibraryGemmCall : GroupedGemmCall {
  int64_t mean_rows;

  static constexpr const char* kTarget = "moe_a2a_library_gemm";
  using Params = LibraryGemm;

  template <typename Reader>
  bool Read(Reader&& read) {
    return GroupedGemmCall::Read(read) && read("mean_rows", &mean_rows);
  }

  Problem Describe(ArraySlice args, ArraySlice results, LibraryGemm* params) const {
    MOE_A2A_TRY(CheckCounts(args, 3, 4, results, 2));
    const int64_t one = 1;
    Array d_and_counter[] = {results[0], results[1]};
    d_and_counter[1].dimensions = {&one, 1};
    params->mean_rows = mean_rows;
    MOE_A2A_TRY(GroupedGemmCall::Describe(args, {d_and_counter, 2}, &params->gemm));
    if (params->gemm.adds) return "cuBLASLt's product must have no total";
    return CheckShape(results[1], "the scratch memory", kInt32,
                      {LibraryScratch(params->gemm.num_groups)});
  }

  static Problem Launch(const LibraryGemm& params, int sms, cudaStream_t stream) {
    return LaunchLibraryGemm(params, sms, stream);
  }
};

// The parameters of a product with an activation in its epilogue.
struct ActivatedGemm {
  GroupedGemm gemm;
  ActivatedProduct activated;

  Problem Launch(int sms, cudaStream_t stream) {
    gemm.activated = &activated;
    gemm.num_sms = sms;
    return LaunchGroupedGemm(gemm, stream);
  }
};

struct DotActCall {
  int64_t product, num_sms;
  ActivationAttributes activation;

  static constexpr const char* kTarget = "moe_a2a_dot_act";
  using Params = ActivatedGemm;

  template <typename Reader>
  bool Read(Reader&& read) {
    return read("product", &product) && read("num_sms", &num_sms) && activation.Read(read);
  }

  Problem Describe(ArraySlice args, ArraySlice results, ActivatedGemm* params) const {
    auto& [gemm, activated] = *params;
    gemm.product = static_cast<GroupedProduct>(product);
    if (gemm.product != GroupedProduct::kForward && gemm.product != GroupedProduct::kForwardFew) {
      return "an activation has no product " + std::to_string(product);
    }
    MOE_A2A_TRY(CheckCounts(args, 5, 6, results, 3));
    const Array &rows = args[0], &weights = args[1], &bias = args[3], &row_weights = args[4],
                &act = results[0], &pre = results[1];
    MOE_A2A_TRY(FirstOf({activation.Describe(&activated),
                         DescribeGemm(rows, weights, args[2], results[2], &gemm)}));
    MOE_A2A_TRY(
        FirstOf({DescribeSpare(args.from(5), weights, &gemm), CheckGated(activated, gemm.n)}));
    const int64_t columns = activated.is_gated ? gemm.n / 2 : gemm.n;
    const bool has_bias = bias.dimensions.size() != 1, keeps = pre.dimensions.size() != 1;
    gemm.a = rows.data;
    gemm.b = weights.data;
    gemm.d = act.data;
    activated.row_weights = static_cast<const float*>(row_weights.data);
    activated.bias = has_bias ? bias.data : nullptr;
    activated.pre = keeps ? pre.data : nullptr;
    return FirstOf({has_bias ? CheckShape(bias, "biases", rows.type,
                                          {gemm.num_weights + gemm.num_spare, gemm.n})
                             : CheckShape(bias, "biases", rows.type, {0}),
                    CheckShape(row_weights, "router weights", kFloat32, {gemm.num_rows}),
                    CheckShape(act, "activations", rows.type, {gemm.num_rows, columns}),
                    keeps ? CheckShape(pre, "pre-activations", rows.type, {gemm.num_rows, gemm.n})
                          : CheckShape(pre, "pre-activations", rows.type, {0})});
  }

  static Problem Launch(ActivatedGemm& params, int sms, cudaStream_t stream) {
    return params.Launch(sms, stream);
  }
};

struct ActDotGradCall {
  int64_t num_sms;
  ActivationAttributes activation;

  static constexpr const char* kTarget = "moe_a2a_act_dot_grad";
  using Params = ActivatedGemm;

  template <typename Reader>
  bool Read(Reader&& read) {
    return read("num_sms", &num_sms) && activation.Read(read);
  }

  Problem Describe(ArraySlice args, ArraySlice results, ActivatedGemm* params) const {
    auto& [gemm, activated] = *params;
    gemm.product = GroupedProduct::kTransposed;
    MOE_A2A_TRY(CheckCounts(args, 5, 6, results, 4));
    const Array &gradient = args[0], &weights = args[1], &pre = args[3], &row_weights = args[4],
                &d_pre = results[0], &act = results[1], &partial_dots = results[2];
    MOE_A2A_TRY(FirstOf({activation.Describe(&activated),
                         DescribeGemm(gradient, weights, args[2], results[3], &gemm)}));
    if (activated.function == Activation::kScaledBias) return "no activation has no gradient";
    const int64_t columns = gemm.k, width = activated.is_gated ? 2 * columns : columns;
    const int64_t num_dots = (columns + kDotColumns - 1) / kDotColumns;
    gemm.a = gradient.data;
    gemm.b = weights.data;
    gemm.d = act.data;
    activated.row_weights = static_cast<const float*>(row_weights.data);
    activated.pre = pre.data;
    activated.d_pre = d_pre.data;
    activated.partial_dots = static_cast<float*>(partial_dots.data);
    const DataType type = gradient.type;
    return FirstOf(
        {DescribeSpare(args.from(5), weights, &gemm), CheckGated(activated, width),
         CheckShape(pre, "pre-activations", type, {gemm.num_rows, width}),
         CheckShape(row_weights, "router weights", kFloat32, {gemm.num_rows}),
         CheckShape(d_pre, "the gradient of pre-activations", type, {gemm.num_rows, width}),
         CheckShape(act, "activations", type, {gemm.num_rows, columns}),
         CheckShape(partial_dots, "partial dots", kFloat32, {num_dots, gemm.num_rows})});
  }

  static Problem Launch(ActivatedGemm& params, int sms, cudaStream_t stream) {
    return params.Launch(sms, stream);
  }
};

// Returns the type of results that may be bfloat16 or float32. CheckShape() refuses other types.
inline ElementType WideType(const DataType& type, DataType* expected) {
  const bool is_float = type == kFloat32;
  *expected = is_float ? kFloat32 : kBFloat16;
  return is_float ? ElementType::kFloat32 : ElementType::kBFloat16;
}

struct Fp8GemmCall {
  int64_t product, num_sms;

  static constexpr const char* kTarget = "moe_a2a_fp8_gemm";
  using Params = Fp8Gemm;

  template <typename Reader>
  bool Read(Reader&& read) {
    return read("product", &product) && read("num_sms", &num_sms);
  }

  Problem Describe(ArraySlice args, ArraySlice results, Fp8Gemm* params) const {
    Fp8Gemm& gemm = *params;
    gemm.product = static_cast<Fp8Product>(product);
    if (gemm.product != Fp8Product::kForward && gemm.product != Fp8Product::kForwardFew) {
      return "grouped_dot in FP8 has no product " + std::to_string(product);
    }
    MOE_A2A_TRY(CheckCounts(args, 5, 6, results, 2));
    const Array &rows = args[0], &weights = args[1], &table = args[2], &row_scales = args[3],
                &weight_scales = args[4], &d = results[0];
    MOE_A2A_TRY(CheckAxes(rows, weights, table));
    gemm.num_rows = rows.dimensions[0];
    gemm.num_weights = weights.dimensions[0];
    gemm.n = weights.dimensions[1];
    gemm.k = weights.dimensions[2];
    MOE_A2A_TRY(WhyNotFp8Gemm(gemm.num_rows, table.dimensions[1], gemm.k, gemm.n));
    DataType type_of_d;
    gemm.type = WideType(d.type, &type_of_d);
    const int64_t blocks_k = gemm.k / kFp8Block, blocks_n = (gemm.n + kFp8Block - 1) / kFp8Block;
    gemm.rows = rows.data;
    gemm.matrices = weights.data;
    gemm.row_scales = static_cast<const float*>(row_scales.data);
    gemm.row_stride = blocks_k;
    gemm.block_stride = 1;
    gemm.matrix_scales = static_cast<const float*>(weight_scales.data);
    gemm.d = d.data;
    MOE_A2A_TRY(DescribeSpare(args.from(5), weights, &gemm));
    return FirstOf(
        {CheckShape(rows, "rows", kFp8, {gemm.num_rows, gemm.k}),
         CheckShape(weights, "weights", kFp8, {gemm.num_weights, gemm.n, gemm.k}),
         CheckShape(row_scales, "the scales of rows", kFloat32, {gemm.num_rows, blocks_k}),
         CheckShape(weight_scales, "the scales of weights", kFloat32,
                    {gemm.num_weights + gemm.num_spare, blocks_n, blocks_k}),
         CheckShape(d, "the result", type_of_d, {gemm.num_rows, gemm.n}),
         DescribeGroups(table, results[1], &gemm)});
  }

  static Problem Launch(Fp8Gemm& gemm, int sms, cudaStream_t stream) {
    gemm.num_sms = sms;
    return LaunchFp8Gemm(gemm, stream);
  }
};

struct ActEncodeCall {
  int64_t num_sms;
  ActivationAttributes activation;

  static constexpr const char* kTarget = "moe_a2a_act_encode";
  using Params = ActEncode;

  template <typename Reader>
  bool Read(Reader&& read) {
    return read("num_sms", &num_sms) && activation.Read(read);
  }

  Problem Describe(ArraySlice args, ArraySlice results, ActEncode* params) const {
    MOE_A2A_TRY(CheckCounts(args, 3, 3, results, 2));
    return DescribeEncode(args, results, /*encodes_product=*/false, params);
  }

  // Describes an ActEncode, or the arrays that an ActGrad has in common with an ActEncode.
  Problem DescribeEncode(ArraySlice args, ArraySlice results, bool encodes_product,
                         ActEncode* params) const {
    ActEncode& call = *params;
    const Array &product = args[0], &table = args[1], &row_weights = args[2], &values = results[0],
                &scales = results[1];
    if (product.dimensions.size() != 3 || table.dimensions.size() != 2) {
      return "act_encode needs a product of three axes and a table of two; got " +
             ToString(product) + " and " + ToString(table);
    }
    MOE_A2A_TRY(activation.Describe(&call));
    if (call.function == Activation::kScaledBias) return "act_encode needs an activation";
    DataType type;
    call.type = WideType(product.type, &type);
    const bool is_weighted = encodes_product || call.is_gated || row_weights.dimensions.size() != 1;
    const int64_t batch = product.dimensions[0], rows = product.dimensions[1],
                  width = product.dimensions[2];
    const int64_t halves = call.is_gated ? 2 : 1, columns = width / halves;
    const int64_t num_groups = table.dimensions[1], encoded = encodes_product ? width : columns;
    if (width % (halves * kFp8Block) != 0 || batch < 1 || num_groups < 1 ||
        num_groups % batch != 0) {
      return "act_encode needs columns in multiples of 128 and the same number of groups for each "
             "element of the batch; got a product " +
             ToString(product) + " and a table " + ToString(table);
    }
    call.product = product.data;
    call.row_weights = is_weighted ? static_cast<const float*>(row_weights.data) : nullptr;
    call.starts = static_cast<const int32_t*>(table.data);
    call.sizes = call.starts + num_groups;
    call.values = static_cast<uint8_t*>(values.data);
    call.scales = static_cast<uint32_t*>(scales.data);
    call.num_rows = batch * rows;
    call.batch = static_cast<int32_t>(batch);
    call.num_groups = static_cast<int32_t>(num_groups / batch);
    call.columns = static_cast<int32_t>(columns);
    return FirstOf(
        {CheckShape(product, "the product", type, {batch, rows, width}),
         CheckShape(table, "the table of groups", kInt32, {3, num_groups}),
         is_weighted ? CheckShape(row_weights, "router weights", kFloat32, {batch, rows})
                     : CheckShape(row_weights, "router weights", kFloat32, {0}),
         CheckShape(values, "the values", kFp8, {batch, rows, encoded}),
         CheckShape(scales, "the scales", kFloat32, {batch, rows, encoded / kFp8Block})});
  }

  static Problem Launch(ActEncode& call, int sms, cudaStream_t stream) {
    return LaunchActEncode(call, sms, stream);
  }
};

struct ActGradCall : ActEncodeCall {
  static constexpr const char* kTarget = "moe_a2a_act_grad";
  using Params = ActGrad;

  Problem Describe(ArraySlice args, ArraySlice results, ActGrad* params) const {
    MOE_A2A_TRY(CheckCounts(args, 4, 4, results, 5));
    MOE_A2A_TRY(DescribeEncode(args, results, /*encodes_product=*/true, params));
    const Array &product = args[0], &ct = args[3], &d_pre = results[2], &h = results[3],
                &dots = results[4];
    const int64_t batch = product.dimensions[0], rows = product.dimensions[1],
                  columns = params->columns;
    params->ct = ct.data;
    params->d_pre = d_pre.data;
    params->h = h.data;
    params->d_weights = static_cast<float*>(dots.data);
    return FirstOf(
        {CheckShape(ct, "the gradient of activations", product.type, {batch, rows, columns}),
         CheckShape(d_pre, "the gradient of the product", product.type,
                    {batch, rows, product.dimensions[2]}),
         CheckShape(h, "activations", product.type, {batch, rows, columns}),
         CheckShape(dots, "the dots", kFloat32, {batch, rows})});
  }

  static Problem Launch(ActGrad& call, int sms, cudaStream_t stream) {
    return LaunchActGrad(call, sms, stream);
  }
};

struct EncodeSquaresCall {
  static constexpr int64_t num_sms = 0;  // it launches a block for each square

  static constexpr const char* kTarget = "moe_a2a_encode_squares";
  using Params = EncodeSquares;

  template <typename Reader>
  bool Read(Reader&&) {
    return true;
  }

  Problem Describe(ArraySlice args, ArraySlice results, EncodeSquares* params) const {
    EncodeSquares& call = *params;
    MOE_A2A_TRY(CheckCounts(args, 1, 1, results, 3));
    const Array &weights = args[0], &turned = results[0], &plain = results[1], &scales = results[2];
    if (weights.dimensions.size() != 3 || weights.dimensions[1] % kFp8Block != 0 ||
        weights.dimensions[2] % kFp8Block != 0) {
      return "encode_squares needs weights [L, K, N], with multiples of 128; got " +
             ToString(weights);
    }
    const int64_t num = weights.dimensions[0], k = weights.dimensions[1], n = weights.dimensions[2];
    const auto check_values = [&](const Array& values, const char* name, int64_t rows,
                                  int64_t columns) {
      const bool is_there = values.dimensions.size() == 3;
      return is_there ? CheckShape(values, name, kFp8, {num, rows, columns})
                      : CheckShape(values, name, kFp8, {0});
    };
    const auto values_of = [](const Array& values) {
      return NumElements(values, 0) == 0 ? nullptr : static_cast<uint8_t*>(values.data);
    };
    DataType type;
    call = {WideType(weights.type, &type),
            weights.data,
            values_of(turned),
            values_of(plain),
            static_cast<uint32_t*>(scales.data),
            num,
            k,
            n};
    return FirstOf(
        {CheckShape(weights, "weights", type, {num, k, n}),
         check_values(turned, "the values", n, k),
         check_values(plain, "the transposed values", k, n),
         CheckShape(scales, "the scales", kFloat32, {num, n / kFp8Block, k / kFp8Block})});
  }

  static Problem Launch(EncodeSquares& call, int, cudaStream_t stream) {
    return LaunchEncodeSquares(call, stream);
  }
};

struct FillSlotsCall {
  int64_t most, min_rows;
  static constexpr int64_t num_sms = 0;  // it launches a block for each plan

  static constexpr const char* kTarget = "moe_a2a_fill_slots";
  using Params = FillSlots;

  template <typename Reader>
  bool Read(Reader&& read) {
    return read("most", &most) && read("min_rows", &min_rows);
  }

  Problem Describe(ArraySlice args, ArraySlice results, FillSlots* params) const {
    MOE_A2A_TRY(CheckCounts(args, 2, 2, results, 2));
    const Array &experts = args[0], &rows = args[1], &slots = results[0], &slot_rows = results[1];
    if (experts.dimensions.size() != 3 || slots.dimensions.size() != 3) {
      return "fill_slots needs arrays of three axes; got " + ToString(experts) + " and " +
             ToString(slots);
    }
    const int64_t batch = experts.dimensions[0], ranks = experts.dimensions[1],
                  local = experts.dimensions[2], width = slots.dimensions[2];
    if (ranks < 1 || ranks > kMaxRanks || local < 1 || local > kMaxPlannedExperts / ranks ||
        width < local || most < 1 || min_rows < 1) {
      return "fill_slots cannot fill " + ToString(slots) + " from " + ToString(experts) + " with " +
             std::to_string(most) + " slots of an expert and " + std::to_string(min_rows) +
             " rows of a replica";
    }
    *params = {static_cast<const int32_t*>(experts.data),
               static_cast<const int32_t*>(rows.data),
               static_cast<int32_t*>(slots.data),
               static_cast<int32_t*>(slot_rows.data),
               static_cast<int32_t>(batch),
               static_cast<int32_t>(ranks),
               static_cast<int32_t>(local),
               static_cast<int32_t>(width - local),
               static_cast<int32_t>(most),
               min_rows};
    return FirstOf({CheckShape(experts, "experts", kInt32, {batch, ranks, local}),
                    CheckShape(rows, "rows", kInt32, {batch, ranks, local}),
                    CheckShape(slots, "slots", kInt32, {batch, ranks, width}),
                    CheckShape(slot_rows, "rows of slots", kInt32, {batch, ranks, width})});
  }

  static Problem Launch(const FillSlots& call, int, cudaStream_t stream) {
    const cudaError_t error = call.batch == 0 ? cudaSuccess : LaunchFillSlots(call, stream);
    return error == cudaSuccess ? "" : cudaGetErrorString(error);
  }
};

struct ChooseCall {
  int64_t num_groups, top_groups, top_in_group, renormalizes, is_sigmoid;
  float scale;
  static constexpr int64_t num_sms = 0;  // it launches a warp for each token

  static constexpr const char* kTarget = "moe_a2a_choose";
  using Params = Choose;

  template <typename Reader>
  bool Read(Reader&& read) {
    return read("num_groups", &num_groups) && read("top_groups", &top_groups) &&
           read("top_in_group", &top_in_group) && read("renormalizes", &renormalizes) &&
           read("is_sigmoid", &is_sigmoid) && read("scale", &scale);
  }

  Problem Describe(ArraySlice args, ArraySlice results, Choose* params) const {
    MOE_A2A_TRY(CheckCounts(args, 3, 3, results, 3));
    const Array &keys = args[0], &values = args[1], &mask = args[2], &ids = results[0],
                &weights = results[1], &chosen = results[2];
    if (keys.dimensions.size() != 2 || ids.dimensions.size() != 2) {
      return "choose needs arrays of two axes; got " + ToString(keys) + " and " + ToString(ids);
    }
    const int64_t tokens = keys.dimensions[0], experts = keys.dimensions[1],
                  choices = ids.dimensions[1];
    const bool has_mask = NumElements(mask, 0) != 0;
    if (!HasRoomForKeys(experts, num_groups) || top_groups < 1 || top_groups > num_groups ||
        top_in_group < 1 || top_in_group > experts / num_groups || choices < 1 ||
        choices > std::min<int64_t>(kMaxTopK, experts / num_groups * top_groups)) {
      return "choose cannot choose " + ToString(ids) + " from " + ToString(keys) + " in " +
             std::to_string(num_groups) + " groups, from the best " + std::to_string(top_groups) +
             " by " + std::to_string(top_in_group) + " keys";
    }
    *params = {static_cast<const float*>(keys.data),
               static_cast<const float*>(values.data),
               has_mask ? static_cast<const bool*>(mask.data) : nullptr,
               static_cast<int32_t*>(ids.data),
               static_cast<float*>(weights.data),
               static_cast<float*>(chosen.data),
               tokens,
               static_cast<int32_t>(experts),
               static_cast<int32_t>(choices),
               static_cast<int32_t>(num_groups),
               static_cast<int32_t>(top_groups),
               static_cast<int32_t>(top_in_group),
               renormalizes != 0,
               is_sigmoid != 0,
               scale};
    return FirstOf({CheckShape(keys, "keys", kFloat32, {tokens, experts}),
                    CheckShape(values, "values", kFloat32, {tokens, experts}),
                    CheckShape(mask, "the mask", kBool, {has_mask ? tokens : 0}),
                    CheckShape(ids, "ids", kInt32, {tokens, choices}),
                    CheckShape(weights, "weights", kFloat32, {tokens, choices}),
                    CheckShape(chosen, "chosen values", kFloat32, {tokens, choices})});
  }

  static Problem Launch(const Choose& call, int, cudaStream_t stream) {
    const cudaError_t error = call.num_tokens == 0 ? cudaSuccess : LaunchChoose(call, stream);
    return error == cudaSuccess ? "" : cudaGetErrorString(error);
  }
};

#ifdef MOE_A2A_GROUPED_GEMM
using ProductCalls =
    Types<FillSlotsCall, ChooseCall, GroupedGemmCall, LibraryGemmCall, DotActCall, ActDotGradCall,
          Fp8GemmCall, ActEncodeCall, ActGradCall, EncodeSquaresCall>;
#else
using ProductCalls = Types<FillSlotsCall, ChooseCall>;
#endif

// Reads and describes a call. Returns why no kernel runs it.
template <typename Call, typename Reader>
Problem DescribeProduct(const Reader& read, ArraySlice args, ArraySlice results,
                        typename Call::Params* params, int64_t* num_sms) {
  Call call = {};
  MOE_A2A_TRY(ReadAttributes(read, &call));
  *num_sms = call.num_sms;
  if (*num_sms < 0) return "num_sms must be at least 0; got " + std::to_string(*num_sms);
  return call.Describe(args, results, params);
}

}  // namespace moe_a2a
