// Calls that need no other ranks: matrix products, the plan of a placement, the choice of experts.
// A call is a struct as in calls/call.h. It has no state, so each execution calls Describe().
//
// The calls of Take() show the name, type and axes of each operand args[i] and each result
// results[i]. C is a number of rows, L a number of weight matrices, and B a batch size.
//
// All products except kWeightGradient accept spare weights as one more operand. Matrix indices
// count weights and then spare weights. Biases and scales have this order, too.
//
// The table of groups is int32 [3, groups]: each group's first row, number of rows, matrix index.
// Python ensures that these values are in range, so they are not checked here.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

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

// Kernels are loaded before the first execution on a device, because no launch may load a kernel.
template <typename KernelParams, auto kLoadKernels, auto kLaunchKernel>
struct ProductCall {
  using Params = KernelParams;
  static constexpr auto kLoad = kLoadKernels;
  static constexpr auto kLaunch = kLaunchKernel;
  static constexpr bool kRunsOnAllGpus = false;  // false: only on compute capability 9.0

  int64_t num_sms = 0;  // the most blocks to launch; 0: one for each multiprocessor
};

inline Problem CheckCounts(ArraySlice args, size_t least, size_t most, ArraySlice results,
                           size_t num_results) {
  if (args.size() >= least && args.size() <= most && results.size() == num_results) return {};
  return Concat("the call needs ", least, " to ", most, " operands and ", num_results,
                " results; got ", args.size(), " and ", results.size());
}

template <typename T>
Problem Take(const Array& array, const char* name, const DataType& type, Axes axes, T** data) {
  *data = static_cast<T*>(array.data);
  return CheckShape(array, name, type, axes);
}

// Takes an optional array of two axes or more. A call without it passes an array of shape [0].
template <typename T>
Problem TakeOptional(const Array& array, const char* name, const DataType& type, Axes axes,
                     T** data) {
  if (array.dimensions.size() != 1) return Take(array, name, type, axes, data);
  *data = nullptr;
  return CheckShape(array, name, type, {0});
}

inline Problem CheckAxes(const Array& rows, const Array& weights, const Array& table) {
  if (rows.dimensions.size() == 2 && weights.dimensions.size() == 3 && table.dimensions.size() == 2)
    return {};
  return "grouped_dot needs rows of two axes, weights of three and a table of two; got " +
         ToString(rows) + ", " + ToString(weights) + " and " + ToString(table);
}

template <typename Gemm>
Problem TakeGroups(const Array& table, const Array& counter, Gemm* gemm) {
  const int64_t num_groups = table.dimensions[1];
  const Problem problem =
      FirstOf({Take(table, "the table of groups", kInt32, {3, num_groups}, &gemm->starts),
               Take(counter, "the counter", kInt32, {1}, &gemm->counter)});
  gemm->sizes = gemm->starts + num_groups;
  gemm->weights = gemm->sizes + num_groups;
  gemm->num_groups = static_cast<int32_t>(num_groups);
  return problem;
}

template <typename Gemm>
Problem TakeSpare(ArraySlice spare, const Array& like, Gemm* gemm) {
  if (spare.size() == 0) return {};
  if (spare[0].dimensions.size() != 3) {
    return "spare weights must have three axes; got " + ToString(spare[0]);
  }
  gemm->num_spare = spare[0].dimensions[0];
  return Take(spare[0], "spare weights", like.type,
              {gemm->num_spare, like.dimensions[1], like.dimensions[2]}, &gemm->spare);
}

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
  // Check this first, so that an unsupported dtype is reported as such.
  MOE_A2A_TRY(WhyNotGroupedGemm(name, gemm->num_rows, table.dimensions[1], gemm->k, gemm->n));
  const bool is_transposed = gemm->product == GroupedProduct::kTransposed;
  const int64_t columns = is_transposed ? gemm->n : gemm->k;
  return FirstOf({Take(rows, "rows", rows.type, {gemm->num_rows, columns}, &gemm->a),
                  Take(weights, "weights", gemm->adds ? kFloat32 : rows.type,
                       {gemm->num_weights, gemm->k, gemm->n}, &gemm->b),
                  TakeGroups(table, counter, gemm)});
}

// A product of 16-bit numbers. Operands: a, b, table, and optionally for kWeightGradient a total.
// Results: d, counter. If there is a total, d has its memory, and the product is added to it.
struct GroupedGemmCall : ProductCall<GroupedGemm, LoadGroupedGemm, LaunchGroupedGemm> {
  int64_t product;

  static constexpr const char* kTarget = "moe_a2a_grouped_gemm";

  bool Read(const AttributeReader& read) {
    return read("product", &product) && read("num_sms", &num_sms);
  }

  Problem Describe(ArraySlice args, ArraySlice results, GroupedGemm* gemm) const {
    if (product < 0 || product > static_cast<int64_t>(GroupedProduct::kWeightGradient)) {
      return Concat("grouped_dot has no product ", product);
    }
    gemm->product = static_cast<GroupedProduct>(product);
    const bool is_gradient = gemm->product == GroupedProduct::kWeightGradient,
               is_transposed = gemm->product == GroupedProduct::kTransposed;
    MOE_A2A_TRY(CheckCounts(args, 3, 4, results, 2));
    const Array &a = args[0], &b = args[1], &d = results[0];
    gemm->adds = is_gradient && args.size() == 4;
    MOE_A2A_TRY(DescribeGemm(a, is_gradient ? d : b, args[2], results[1], gemm));
    gemm->d = d.data;
    if (!is_gradient) {
      return FirstOf({TakeSpare(args.from(3), b, gemm),
                      CheckShape(d, "the result", a.type,
                                 {gemm->num_rows, is_transposed ? gemm->k : gemm->n})});
    }
    void* total = d.data;
    if (gemm->adds) {
      MOE_A2A_TRY(
          Take(args[3], "the total", kFloat32, {gemm->num_weights, gemm->k, gemm->n}, &total));
    }
    if (total != d.data) return "the total and the result must be the same memory";
    return Take(b, "b", a.type, {gemm->num_rows, gemm->n}, &gemm->b);
  }
};

// A GroupedGemmCall that cuBLASLt computes. Instead of a counter, the call has scratch memory,
// int32 [LibraryScratch(groups)]. The library plans for `mean_rows` rows in a group.
struct LibraryGemmCall : GroupedGemmCall {
  int64_t mean_rows;

  using Params = LibraryGemm;
  static constexpr auto kLoad = LoadGroupArrays;
  static constexpr auto kLaunch = LaunchLibraryGemm;
  static constexpr const char* kTarget = "moe_a2a_library_gemm";
  static constexpr bool kRunsOnAllGpus = true;

  bool Read(const AttributeReader& read) {
    return GroupedGemmCall::Read(read) && read("mean_rows", &mean_rows);
  }

  Problem Describe(ArraySlice args, ArraySlice results, LibraryGemm* params) const {
    MOE_A2A_TRY(CheckCounts(args, 3, 4, results, 2));
    const int64_t one = 1;
    Array d_and_counter[] = {results[0], results[1]};
    d_and_counter[1].dimensions = {&one, 1};
    params->mean_rows = mean_rows;
    MOE_A2A_TRY(GroupedGemmCall::Describe(args, {d_and_counter, 2}, params));
    if (params->adds) return "cuBLASLt's product must have no total";
    return CheckShape(results[1], "the scratch memory", kInt32,
                      {LibraryScratch(params->num_groups)});
  }
};

template <typename KernelParams, auto kLoad, auto kLaunch>
struct ActivationCall : ProductCall<KernelParams, kLoad, kLaunch> {
  int64_t activation, gated;
  float alpha, limit;

  bool Read(const AttributeReader& read) {
    return read("num_sms", &this->num_sms) && read("activation", &activation) &&
           read("gated", &gated) && read("alpha", &alpha) && read("limit", &limit);
  }

  template <typename Activated>
  Problem DescribeActivation(Activated* activated) const {
    activated->function = static_cast<Activation>(activation);
    activated->is_gated = gated != 0;
    activated->alpha = alpha;
    activated->limit = limit;
    const auto unfit = gated != 0 ? Activation::kScaledBias : Activation::kClampedSwiglu;
    if (activation >= 0 && activation <= static_cast<int64_t>(Activation::kScaledBias) &&
        activated->function != unfit) {
      return {};
    }
    return Concat("no kernel has the activation ", activation,
                  (activated->is_gated ? ", gated" : ", not gated"));
  }
};

struct ActivatedGemm : GroupedGemm {
  ActivatedProduct epilogue;  // GroupedGemm::activated points to it
};

struct ActivatedGemmCall : ActivationCall<ActivatedGemm, LoadGroupedGemm, LaunchGroupedGemm> {
  // The caller must have set `gemm->product`. Sets `width` to the columns of pre-activations.
  Problem DescribeActivated(ArraySlice args, const Array& counter, ActivatedGemm* gemm,
                            int64_t* width) const {
    gemm->activated = &gemm->epilogue;
    MOE_A2A_TRY(FirstOf({DescribeActivation(&gemm->epilogue),
                         DescribeGemm(args[0], args[1], args[2], counter, gemm)}));
    const bool is_gradient = gemm->product == GroupedProduct::kTransposed;
    *width = !is_gradient ? gemm->n : gemm->epilogue.is_gated ? 2 * gemm->k : gemm->k;
    if (gemm->epilogue.is_gated && *width % 16 != 0) {
      return Concat("a gated activation needs pre-activations in multiples of 16 columns; got ",
                    *width);
    }
    return FirstOf(
        {TakeSpare(args.from(5), args[1], gemm),
         Take(args[4], "router weights", kFloat32, {gemm->num_rows}, &gemm->epilogue.row_weights)});
  }
};

// Multiplies rows [C, K] by weights [L, K, P], and applies an activation. Operands: rows, weights,
// table, biases, router weights. Results: activations [C, I], pre-activations, counter.
struct DotActCall : ActivatedGemmCall {
  static constexpr const char* kTarget = "moe_a2a_dot_act";

  Problem Describe(ArraySlice args, ArraySlice results, ActivatedGemm* gemm) const {
    gemm->product = GroupedProduct::kForward;
    MOE_A2A_TRY(CheckCounts(args, 5, 6, results, 3));
    int64_t width;
    MOE_A2A_TRY(DescribeActivated(args, results[2], gemm, &width));
    ActivatedProduct& epilogue = gemm->epilogue;
    const DataType& type = args[0].type;
    const int64_t rows = gemm->num_rows, columns = epilogue.is_gated ? width / 2 : width;
    return FirstOf(
        {TakeOptional(args[3], "biases", type, {gemm->num_weights + gemm->num_spare, width},
                      &epilogue.bias),
         Take(results[0], "activations", type, {rows, columns}, &gemm->d),
         TakeOptional(results[1], "pre-activations", type, {rows, width}, &epilogue.pre)});
  }
};

// The gradient of activations that were multiplied by weights [L, I, N]. Operands: the product's
// gradient [C, N], weights, table, pre-activations, router weights. Results: d_pre, weighted
// activations, partial dots, counter.
struct ActDotGradCall : ActivatedGemmCall {
  static constexpr const char* kTarget = "moe_a2a_act_dot_grad";

  Problem Describe(ArraySlice args, ArraySlice results, ActivatedGemm* gemm) const {
    gemm->product = GroupedProduct::kTransposed;
    MOE_A2A_TRY(CheckCounts(args, 5, 6, results, 4));
    int64_t width;
    MOE_A2A_TRY(DescribeActivated(args, results[3], gemm, &width));
    ActivatedProduct& epilogue = gemm->epilogue;
    if (epilogue.function == Activation::kScaledBias) return "a scaled bias is no activation";
    const DataType& type = args[0].type;
    const int64_t rows = gemm->num_rows, columns = gemm->k;
    return FirstOf(
        {Take(args[3], "pre-activations", type, {rows, width}, &epilogue.pre),
         Take(results[0], "the gradient of pre-activations", type, {rows, width}, &epilogue.d_pre),
         Take(results[1], "activations", type, {rows, columns}, &gemm->d),
         Take(results[2], "partial dots", kFloat32, {ceil_div(columns, kDotColumns), rows},
              &epilogue.partial_dots)});
  }
};

// Returns the type that CheckShape() must require: float32 if the array is float32, else bfloat16.
inline const DataType& WideType(const Array& array, ElementType* type) {
  const bool is_float = array.type == kFloat32;
  *type = is_float ? ElementType::kFloat32 : ElementType::kBFloat16;
  return is_float ? kFloat32 : kBFloat16;
}

// Operands: rows, weights [L, N, K], table, scales of rows, scales of weights. Results: d, counter.
struct Fp8GemmCall : ProductCall<Fp8Gemm, LoadFp8Gemm, LaunchFp8Gemm> {
  static constexpr const char* kTarget = "moe_a2a_fp8_gemm";

  bool Read(const AttributeReader& read) { return read("num_sms", &num_sms); }

  Problem Describe(ArraySlice args, ArraySlice results, Fp8Gemm* gemm) const {
    MOE_A2A_TRY(CheckCounts(args, 5, 6, results, 2));
    const Array &rows = args[0], &weights = args[1], &table = args[2], &d = results[0];
    MOE_A2A_TRY(CheckAxes(rows, weights, table));
    gemm->num_rows = rows.dimensions[0];
    gemm->num_weights = weights.dimensions[0];
    gemm->n = weights.dimensions[1];
    gemm->k = weights.dimensions[2];
    MOE_A2A_TRY(WhyNotFp8Gemm(gemm->num_rows, table.dimensions[1], gemm->k, gemm->n));
    MOE_A2A_TRY(TakeSpare(args.from(5), weights, gemm));
    const int64_t blocks_k = gemm->k / kFp8Block, blocks_n = ceil_div(gemm->n, kFp8Block);
    gemm->row_stride = blocks_k;
    gemm->block_stride = 1;
    const DataType& type = WideType(d, &gemm->type);
    return FirstOf(
        {Take(rows, "rows", kFp8, {gemm->num_rows, gemm->k}, &gemm->rows),
         Take(weights, "weights", kFp8, {gemm->num_weights, gemm->n, gemm->k}, &gemm->matrices),
         Take(args[3], "the scales of rows", kFloat32, {gemm->num_rows, blocks_k},
              &gemm->row_scales),
         Take(args[4], "the scales of weights", kFloat32,
              {gemm->num_weights + gemm->num_spare, blocks_n, blocks_k}, &gemm->matrix_scales),
         Take(d, "the result", type, {gemm->num_rows, gemm->n}, &gemm->d),
         TakeGroups(table, results[1], gemm)});
  }
};

template <typename KernelParams, auto kLaunch>
struct EncodeCall : ActivationCall<KernelParams, LoadActEncode, kLaunch> {
  Problem DescribeEncode(ArraySlice args, ArraySlice results, bool encodes_product,
                         ActEncode* call) const {
    const Array &product = args[0], &table = args[1], &row_weights = args[2];
    if (product.dimensions.size() != 3 || table.dimensions.size() != 2) {
      return "act_encode needs a product of three axes and a table of two; got " +
             ToString(product) + " and " + ToString(table);
    }
    MOE_A2A_TRY(this->DescribeActivation(call));
    if (call->function == Activation::kScaledBias) return "act_encode needs an activation";
    const int64_t batch = product.dimensions[0], rows = product.dimensions[1],
                  width = product.dimensions[2];
    const int64_t halves = call->is_gated ? 2 : 1, columns = width / halves;
    const int64_t num_groups = table.dimensions[1], encoded = encodes_product ? width : columns;
    if (width % (halves * kFp8Block) != 0 || batch < 1 || num_groups < 1 ||
        num_groups % batch != 0) {
      return "act_encode needs columns in multiples of 128 and the same number of groups for each "
             "element of the batch; got a product " +
             ToString(product) + " and a table " + ToString(table);
    }
    call->num_rows = batch * rows;
    call->batch = static_cast<int32_t>(batch);
    call->num_groups = static_cast<int32_t>(num_groups / batch);
    call->columns = static_cast<int32_t>(columns);
    const DataType& type = WideType(product, &call->type);
    const auto take_weights =
        encodes_product || call->is_gated ? Take<const float> : TakeOptional<const float>;
    const Problem problem = FirstOf(
        {Take(product, "the product", type, {batch, rows, width}, &call->product),
         Take(table, "the table of groups", kInt32, {3, num_groups}, &call->starts),
         take_weights(row_weights, "router weights", kFloat32, {batch, rows}, &call->row_weights),
         Take(results[0], "the values", kFp8, {batch, rows, encoded}, &call->values),
         Take(results[1], "the scales", kFloat32, {batch, rows, encoded / kFp8Block},
              &call->scales)});
    call->sizes = call->starts + num_groups;
    return problem;
  }
};

// Applies the activation between two products in FP8, and encodes the result. Operands: the first
// product [B, C, P], the table of B * L groups, and the router weights. Without router weights, the
// call encodes the first product, without an activation.
struct ActEncodeCall : EncodeCall<ActEncode, LaunchActEncode> {
  static constexpr const char* kTarget = "moe_a2a_act_encode";

  Problem Describe(ArraySlice args, ArraySlice results, ActEncode* params) const {
    MOE_A2A_TRY(CheckCounts(args, 3, 3, results, 2));
    return DescribeEncode(args, results, /*encodes_product=*/false, params);
  }
};

// The gradients of ActEncodeCall. The gradient of the product is encoded as values and scales.
struct ActGradCall : EncodeCall<ActGrad, LaunchActGrad> {
  static constexpr const char* kTarget = "moe_a2a_act_grad";

  Problem Describe(ArraySlice args, ArraySlice results, ActGrad* params) const {
    MOE_A2A_TRY(CheckCounts(args, 4, 4, results, 5));
    MOE_A2A_TRY(DescribeEncode(args, results, /*encodes_product=*/true, params));
    const auto& product = args[0];
    const int64_t batch = product.dimensions[0], rows = product.dimensions[1],
                  width = product.dimensions[2], columns = params->columns;
    const DataType& type = product.type;
    return FirstOf(
        {Take(args[3], "the gradient of activations", type, {batch, rows, columns}, &params->ct),
         Take(results[2], "the gradient of the product", type, {batch, rows, width},
              &params->d_pre),
         Take(results[3], "activations", type, {batch, rows, columns}, &params->h),
         Take(results[4], "the dots", kFloat32, {batch, rows}, &params->d_weights)});
  }
};

// Quantizes weights [L, K, N] to values [L, N, K], values [L, K, N], or both.
struct EncodeSquaresCall : ProductCall<EncodeSquares, LoadEncodeSquares, LaunchEncodeSquares> {
  static constexpr const char* kTarget = "moe_a2a_encode_squares";

  bool Read(const AttributeReader&) { return true; }

  Problem Describe(ArraySlice args, ArraySlice results, EncodeSquares* call) const {
    MOE_A2A_TRY(CheckCounts(args, 1, 1, results, 3));
    const Array& weights = args[0];
    if (weights.dimensions.size() != 3 || weights.dimensions[1] % kFp8Block != 0 ||
        weights.dimensions[2] % kFp8Block != 0) {
      return "encode_squares needs weights [L, K, N], with multiples of 128; got " +
             ToString(weights);
    }
    const int64_t num = weights.dimensions[0], k = weights.dimensions[1], n = weights.dimensions[2];
    call->num_matrices = num;
    call->k = k;
    call->n = n;
    const DataType& type = WideType(weights, &call->type);
    return FirstOf(
        {Take(weights, "weights", type, {num, k, n}, &call->weights),
         TakeOptional(results[0], "the values", kFp8, {num, n, k}, &call->turned),
         TakeOptional(results[1], "the transposed values", kFp8, {num, k, n}, &call->plain),
         Take(results[2], "the scales", kFloat32, {num, n / kFp8Block, k / kFp8Block},
              &call->scales)});
  }
};

struct FillSlotsCall : ProductCall<FillSlots, LoadFillSlots, LaunchFillSlots> {
  int64_t most, min_rows;

  static constexpr const char* kTarget = "moe_a2a_fill_slots";
  static constexpr bool kRunsOnAllGpus = true;

  bool Read(const AttributeReader& read) {
    return read("most", &most) && read("min_rows", &min_rows);
  }

  Problem Describe(ArraySlice args, ArraySlice results, FillSlots* params) const {
    MOE_A2A_TRY(CheckCounts(args, 2, 2, results, 2));
    const Array &experts = args[0], &slots = results[0];
    if (experts.dimensions.size() != 3 || slots.dimensions.size() != 3) {
      return "fill_slots needs arrays of three axes; got " + ToString(experts) + " and " +
             ToString(slots);
    }
    const int64_t batch = experts.dimensions[0], ranks = experts.dimensions[1],
                  local = experts.dimensions[2], width = slots.dimensions[2];
    if (ranks < 1 || ranks > kMaxRanks || local < 1 || local > kMaxPlannedExperts / ranks ||
        width < local || most < 1 || min_rows < 1) {
      return Concat("fill_slots cannot fill ", ToString(slots), " from ", ToString(experts),
                    " with ", most, " slots of an expert and ", min_rows, " rows of a replica");
    }
    params->batch = static_cast<int32_t>(batch);
    params->num_ranks = static_cast<int32_t>(ranks);
    params->num_local = static_cast<int32_t>(local);
    params->spare = static_cast<int32_t>(width - local);
    params->most = static_cast<int32_t>(most);
    params->min_rows = min_rows;
    const Axes given = {batch, ranks, local}, filled = {batch, ranks, width};
    return FirstOf({Take(experts, "experts", kInt32, given, &params->experts),
                    Take(args[1], "rows", kInt32, given, &params->rows),
                    Take(slots, "slots", kInt32, filled, &params->slot_experts),
                    Take(results[1], "rows of slots", kInt32, filled, &params->slot_rows)});
  }
};

// Chooses the experts of T tokens (router/choose.h). The mask has shape [T], or [0] for no mask.
struct ChooseCall : ProductCall<Choose, LoadChoose, LaunchChoose> {
  int64_t num_groups, top_groups, top_in_group, renormalizes, is_sigmoid;
  float scale;

  static constexpr const char* kTarget = "moe_a2a_choose";
  static constexpr bool kRunsOnAllGpus = true;

  bool Read(const AttributeReader& read) {
    return read("num_groups", &num_groups) && read("top_groups", &top_groups) &&
           read("top_in_group", &top_in_group) && read("renormalizes", &renormalizes) &&
           read("is_sigmoid", &is_sigmoid) && read("scale", &scale);
  }

  Problem Describe(ArraySlice args, ArraySlice results, Choose* params) const {
    MOE_A2A_TRY(CheckCounts(args, 3, 3, results, 3));
    const Array &keys = args[0], &mask = args[2], &ids = results[0];
    if (keys.dimensions.size() != 2 || ids.dimensions.size() != 2) {
      return "choose needs arrays of two axes; got " + ToString(keys) + " and " + ToString(ids);
    }
    const int64_t tokens = keys.dimensions[0], experts = keys.dimensions[1],
                  choices = ids.dimensions[1];
    if (!HasRoomForKeys(experts, num_groups) || top_groups < 1 || top_groups > num_groups ||
        top_in_group < 1 || top_in_group > experts / num_groups || choices < 1 ||
        choices > std::min<int64_t>(kMaxTopK, experts / num_groups * top_groups)) {
      return Concat("choose cannot choose ", ToString(ids), " from ", ToString(keys), " in ",
                    num_groups, " groups, from the best ", top_groups, " by ", top_in_group,
                    " keys");
    }
    params->num_tokens = tokens;
    params->num_experts = static_cast<int32_t>(experts);
    params->num_choices = static_cast<int32_t>(choices);
    params->num_groups = static_cast<int32_t>(num_groups);
    params->top_groups = static_cast<int32_t>(top_groups);
    params->top_in_group = static_cast<int32_t>(top_in_group);
    params->renormalizes = renormalizes != 0;
    params->is_sigmoid = is_sigmoid != 0;
    params->scale = scale;
    const bool has_mask = NumElements(mask, 0) != 0;
    const Axes of_experts = {tokens, experts}, of_choices = {tokens, choices};
    const Problem problem =
        FirstOf({Take(keys, "keys", kFloat32, of_experts, &params->keys),
                 Take(args[1], "values", kFloat32, of_experts, &params->values),
                 Take(mask, "the mask", kBool, {has_mask ? tokens : 0}, &params->mask),
                 Take(ids, "ids", kInt32, of_choices, &params->ids),
                 Take(results[1], "weights", kFloat32, of_choices, &params->weights),
                 Take(results[2], "chosen values", kFloat32, of_choices, &params->chosen)});
    if (!has_mask) params->mask = nullptr;
    return problem;
  }
};

#ifdef MOE_A2A_GROUPED_GEMM
using ProductCalls =
    Types<FillSlotsCall, ChooseCall, GroupedGemmCall, LibraryGemmCall, DotActCall, ActDotGradCall,
          Fp8GemmCall, ActEncodeCall, ActGradCall, EncodeSquaresCall>;
#else
using ProductCalls = Types<FillSlotsCall, ChooseCall>;
#endif

template <typename Call>
Problem DescribeProduct(const AttributeReader& read, ArraySlice args, ArraySlice results,
                        typename Call::Params* params, int64_t* num_sms) {
  Call call = {};
  MOE_A2A_TRY(ReadAttributes(read, &call));
  *num_sms = call.num_sms;
  if (*num_sms < 0) return Concat("num_sms must be at least 0; got ", *num_sms);
  return call.Describe(args, results, params);
}

}  // namespace moe_a2a
