// The handlers of the grouped GEMM: they decode and check a call, and launch the kernel
// (gemm/grouped_gemm.h, gemm/fp8_gemm.h, gemm/act_encode.h, gemm/encode_squares.h).
//
// moe_a2a_grouped_gemm: operands a, b and the table of groups; results d and the kernel's counter,
// int32 [1]. moe_a2a_dot_act, an activated product of rows [C, K] and weights [L, K, P]: operands
// rows, weights, table, biases [L, P] or [0], router weights, float32 [C]; results activations [C,
// I], pre-activations [C, P] or [0], counter. moe_a2a_act_dot_grad, the gradient of activations [C,
// I] times weights [L, I, N]: operands gradient [C, N], weights, table, pre-activations [C, P],
// router weights; results gradient of the pre-activations [C, P], weighted activations [C, I],
// partial dots, float32 [ceil(I / kDotColumns), C], counter. moe_a2a_fp8_gemm: operands rows [C, K]
// and weights [L, N, K], float8_e4m3fn; the table; scales of rows [C, K / 128] and of weights [L,
// ceil(N / 128), K / 128], float32; results d [C, N], bfloat16 or float32, and the counter. The
// kernel reads the scales of rows where they are: a lane loads the scales of its own rows, so their
// order costs nothing. moe_a2a_act_encode, the pass between two products in FP8: operands product
// [B, C, P], bfloat16 or float32; the table of B times L groups; router weights, float32 [B, C], or
// [0] to encode the product itself; results values [B, C, I], float8_e4m3fn, and scales [B, C, I /
// 128], float32. It needs no counter. moe_a2a_encode_squares, the quantization of weights: operand
// weights [L, K, N], bfloat16 or float32; results values [L, N, K] or [0], the same values [L, K,
// N] or [0], float8_e4m3fn, and scales [L, N / 128, K / 128], float32.
//
// Products accept one more operand after these, except kWeightGradient: spare weights, [S, K, N] or
// [S, N, K], which follow the weights. Biases are then [L + S, P], and scales of weights [L + S, N
// / 128, K / 128].
//
// The table of groups is int32 [3, groups]: first rows, numbers of rows, and indices of weights.
// Its values are not checked. Groups must lie within the rows, and indices within the weights; the
// lowering in Python ensures both.
#include "ffi/grouped_gemm.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>

#include "gemm/act_encode.h"
#include "gemm/encode_squares.h"
#include "gemm/fp8_gemm.h"
#include "gemm/grouped_gemm.h"
#include "runtime/driver.h"
#include "xla/ffi/api/ffi.h"

namespace moe_a2a {
namespace {

namespace ffi = xla::ffi;

ffi::Error Invalid(std::string message) {
  return ffi::Error::InvalidArgument("jax_moe_a2a: " + std::move(message));
}

ffi::Error Internal(const std::string& message) {
  return ffi::Error::Internal("jax_moe_a2a: grouped_dot: " + message);
}

ffi::Error ToError(cudaError_t error) {
  return error == cudaSuccess ? ffi::Error::Success() : Internal(cudaGetErrorString(error));
}

std::string Describe(ffi::Span<const int64_t> axes) {
  std::string text = "[";
  for (size_t i = 0; i < axes.size(); ++i) text += (i ? "," : "") + std::to_string(axes[i]);
  return text + "]";
}

ffi::Error CheckShape(const ffi::AnyBuffer& array, const char* name, ffi::DataType type,
                      std::initializer_list<int64_t> axes) {
  const auto found = array.dimensions();
  if (array.element_type() == type &&
      std::equal(axes.begin(), axes.end(), found.begin(), found.end())) {
    return ffi::Error::Success();
  }
  return Invalid(std::string(name) + " of grouped_dot must have the shape " +
                 Describe({axes.begin(), axes.size()}) + " and the right dtype; got " +
                 Describe(found));
}

// Returns the first error.
ffi::Error First(std::initializer_list<ffi::Error> errors) {
  for (const ffi::Error& error : errors) {
    if (error.failure()) return error;
  }
  return ffi::Error::Success();
}

// The part that all calls have in common.
struct Call {
  cudaStream_t stream;
  int32_t ordinal;
  int64_t num_sms;
  ffi::AnyBuffer rows, weights, table, counter;
};

ffi::Error CheckAxes(const Call& call) {
  const auto rows = call.rows.dimensions(), weights = call.weights.dimensions(),
             table = call.table.dimensions();
  if (rows.size() == 2 && weights.size() == 3 && table.size() == 2) return ffi::Error::Success();
  return Invalid("grouped_dot needs rows of two axes, weights of three and a table of two; got " +
                 Describe(rows) + ", " + Describe(weights) + " and " + Describe(table));
}

// Sets the number of multiprocessors to use. 0 means all.
ffi::Error ReadSms(int32_t ordinal, int64_t limit, int* num_sms) {
  if (limit < 0) return Invalid("num_sms must be at least 0; got " + std::to_string(limit));
  const cudaError_t error =
      cudaDeviceGetAttribute(num_sms, cudaDevAttrMultiProcessorCount, ordinal);
  if (limit > 0) *num_sms = static_cast<int>(std::min<int64_t>(limit, *num_sms));
  return ToError(error);
}

// Sets the groups and the launch, after checks. The table has two axes.
template <typename Gemm>
ffi::Error ReadLaunch(const Call& call, Gemm* gemm) {
  const int64_t num_groups = call.table.dimensions()[1];
  const ffi::Error error =
      First({CheckShape(call.table, "the table of groups", ffi::DataType::S32, {3, num_groups}),
             CheckShape(call.counter, "the counter", ffi::DataType::S32, {1})});
  if (error.failure()) return error;
  gemm->starts = static_cast<const int32_t*>(call.table.untyped_data());
  gemm->sizes = gemm->starts + num_groups;
  gemm->weights = gemm->sizes + num_groups;
  gemm->num_groups = static_cast<int32_t>(num_groups);
  gemm->counter = static_cast<int32_t*>(call.counter.untyped_data());
  return ReadSms(call.ordinal, call.num_sms, &gemm->num_sms);
}

// Sets what all products of 16-bit numbers have in common, after checks.
ffi::Error ReadCall(const Call& call, GroupedGemm* gemm) {
  if (ffi::Error error = CheckAxes(call); error.failure()) return error;
  const auto shape_weights = call.weights.dimensions();
  const ffi::DataType type = call.rows.element_type();
  gemm->type = type == ffi::DataType::BF16 ? ElementType::kBFloat16 : ElementType::kFloat16;
  const char* name = type == ffi::DataType::BF16  ? "bfloat16"
                     : type == ffi::DataType::F16 ? "float16"
                                                  : "another type";
  gemm->num_rows = call.rows.dimensions()[0];
  gemm->num_weights = shape_weights[0];
  gemm->k = shape_weights[1];
  gemm->n = shape_weights[2];
  // Before the comparison of dtypes: a dtype that no kernel has is the reason to tell.
  if (const Problem problem =
          WhyNotGroupedGemm(name, gemm->num_rows, call.table.dimensions()[1], gemm->k, gemm->n);
      !problem.empty()) {
    return Invalid(problem);
  }
  const bool is_transposed = gemm->product == GroupedProduct::kTransposed;
  return First(
      {CheckShape(call.rows, "rows", type, {gemm->num_rows, is_transposed ? gemm->n : gemm->k}),
       CheckShape(call.weights, "weights", type, {gemm->num_weights, gemm->k, gemm->n}),
       ReadLaunch(call, gemm)});
}

// Sets the second array of weights, if the call has one; it may have `most` of them. `like` is the
// first.
template <typename Gemm>
ffi::Error ReadSpare(const ffi::RemainingArgs& spare, size_t most, const ffi::AnyBuffer& like,
                     Gemm* gemm) {
  if (spare.size() == 0) return ffi::Error::Success();
  if (spare.size() > most) {
    return Invalid("grouped_dot has " + std::to_string(spare.size()) +
                   " arrays of spare weights; expected at most " + std::to_string(most));
  }
  const auto found = spare.get<ffi::AnyBuffer>(0);
  if (!found.has_value()) return found.error();
  const auto axes = like.dimensions();
  if (found->dimensions().size() != 3) return Invalid("spare weights must have three axes");
  gemm->spare = found->untyped_data();
  gemm->num_spare = found->dimensions()[0];
  return CheckShape(*found, "spare weights", like.element_type(),
                    {gemm->num_spare, axes[1], axes[2]});
}

ffi::Error Launch(const GroupedGemm& gemm, cudaStream_t stream) {
  const Problem problem = LaunchGroupedGemm(gemm, stream);
  return problem.empty() ? ffi::Error::Success() : Internal(problem);
}

ffi::Error Run(cudaStream_t stream, int32_t ordinal, int64_t product, int64_t num_sms,
               ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::AnyBuffer table, ffi::RemainingArgs spare,
               ffi::Result<ffi::AnyBuffer> d, ffi::Result<ffi::AnyBuffer> counter) {
  GroupedGemm gemm = {};
  if (product < 0 || product > static_cast<int64_t>(GroupedProduct::kWeightGradient)) {
    return Invalid("grouped_dot has no product " + std::to_string(product));
  }
  gemm.product = static_cast<GroupedProduct>(product);
  const bool is_gradient = gemm.product == GroupedProduct::kWeightGradient;
  const ffi::AnyBuffer weights = is_gradient ? ffi::AnyBuffer(*d) : b;
  ffi::Error error = ReadCall({stream, ordinal, num_sms, a, weights, table, *counter}, &gemm);
  if (error.failure()) return error;
  const ffi::DataType type = a.element_type();
  const bool is_transposed = gemm.product == GroupedProduct::kTransposed;
  error = First({ReadSpare(spare, is_gradient ? 0 : 1, b, &gemm),
                 is_gradient ? CheckShape(b, "b", type, {gemm.num_rows, gemm.n})
                             : CheckShape(*d, "the result", type,
                                          {gemm.num_rows, is_transposed ? gemm.k : gemm.n})});
  if (error.failure()) return error;
  gemm.a = a.untyped_data();
  gemm.b = b.untyped_data();
  gemm.d = d->untyped_data();
  return Launch(gemm, stream);
}

// Reads what describes an activation of an ActivatedProduct or an ActEncode.
template <typename Activated>
ffi::Error ReadActivation(int64_t function, int64_t is_gated, float alpha, float limit,
                          Activated* activated) {
  const auto last = Activation::kScaledBias;
  activated->function = static_cast<Activation>(function);
  activated->is_gated = is_gated != 0;
  activated->alpha = alpha;
  activated->limit = limit;
  const bool needs_gate = activated->function == Activation::kClampedSwiglu,
             needs_none = activated->function == last;
  if (function < 0 || function > static_cast<int64_t>(last) ||
      (activated->is_gated ? needs_none : needs_gate)) {
    return Invalid("no kernel has the activation " + std::to_string(function) +
                   (activated->is_gated ? ", gated" : ", not gated"));
  }
  return ffi::Error::Success();
}

bool IsEmpty(const ffi::AnyBuffer& array) { return array.element_count() == 0; }

ffi::Error CheckGated(const GroupedGemm& gemm, const ActivatedProduct& activated, int64_t pre) {
  if (!activated.is_gated || pre % 16 == 0) return ffi::Error::Success();
  return Invalid("a gated activation needs pre-activations in multiples of 16 columns; got " +
                 std::to_string(pre));
}

ffi::Error DotAct(cudaStream_t stream, int32_t ordinal, int64_t product, int64_t function,
                  int64_t is_gated, float alpha, float limit, int64_t num_sms, ffi::AnyBuffer rows,
                  ffi::AnyBuffer weights, ffi::AnyBuffer table, ffi::AnyBuffer bias,
                  ffi::AnyBuffer row_weights, ffi::RemainingArgs spare,
                  ffi::Result<ffi::AnyBuffer> act, ffi::Result<ffi::AnyBuffer> pre,
                  ffi::Result<ffi::AnyBuffer> counter) {
  ActivatedProduct activated = {};
  GroupedGemm gemm = {};
  gemm.product = static_cast<GroupedProduct>(product);
  if (gemm.product != GroupedProduct::kForward && gemm.product != GroupedProduct::kForwardFew) {
    return Invalid("an activation has no product " + std::to_string(product));
  }
  ffi::Error error =
      First({ReadActivation(function, is_gated, alpha, limit, &activated),
             ReadCall({stream, ordinal, num_sms, rows, weights, table, *counter}, &gemm)});
  if (error.failure()) return error;
  error = First({ReadSpare(spare, 1, weights, &gemm), CheckGated(gemm, activated, gemm.n)});
  if (error.failure()) return error;
  const ffi::DataType type = rows.element_type();
  const int64_t columns = activated.is_gated ? gemm.n / 2 : gemm.n;
  const bool has_bias = !IsEmpty(bias), keeps = pre->dimensions().size() == 2;
  error = First({has_bias
                     ? CheckShape(bias, "biases", type, {gemm.num_weights + gemm.num_spare, gemm.n})
                     : ffi::Error::Success(),
                 CheckShape(row_weights, "router weights", ffi::DataType::F32, {gemm.num_rows}),
                 CheckShape(*act, "activations", type, {gemm.num_rows, columns}),
                 keeps ? CheckShape(*pre, "pre-activations", type, {gemm.num_rows, gemm.n})
                       : ffi::Error::Success()});
  if (error.failure()) return error;
  gemm.a = rows.untyped_data();
  gemm.b = weights.untyped_data();
  gemm.d = act->untyped_data();
  activated.row_weights = static_cast<const float*>(row_weights.untyped_data());
  activated.bias = has_bias ? bias.untyped_data() : nullptr;
  activated.pre = keeps ? pre->untyped_data() : nullptr;
  gemm.activated = &activated;
  return Launch(gemm, stream);
}

ffi::Error ActDotGrad(cudaStream_t stream, int32_t ordinal, int64_t function, int64_t is_gated,
                      float alpha, float limit, int64_t num_sms, ffi::AnyBuffer gradient,
                      ffi::AnyBuffer weights, ffi::AnyBuffer table, ffi::AnyBuffer pre,
                      ffi::AnyBuffer row_weights, ffi::RemainingArgs spare,
                      ffi::Result<ffi::AnyBuffer> d_pre, ffi::Result<ffi::AnyBuffer> act,
                      ffi::Result<ffi::AnyBuffer> partial_dots,
                      ffi::Result<ffi::AnyBuffer> counter) {
  ActivatedProduct activated = {};
  GroupedGemm gemm = {};
  gemm.product = GroupedProduct::kTransposed;
  ffi::Error error =
      First({ReadActivation(function, is_gated, alpha, limit, &activated),
             ReadCall({stream, ordinal, num_sms, gradient, weights, table, *counter}, &gemm)});
  if (error.failure()) return error;
  if (activated.function == Activation::kScaledBias)
    return Invalid("no activation has no gradient");
  const ffi::DataType type = gradient.element_type();
  const int64_t columns = gemm.k, width = activated.is_gated ? 2 * columns : columns;
  const int64_t num_dots = (columns + kDotColumns - 1) / kDotColumns;
  error = First(
      {ReadSpare(spare, 1, weights, &gemm), CheckGated(gemm, activated, width),
       CheckShape(pre, "pre-activations", type, {gemm.num_rows, width}),
       CheckShape(row_weights, "router weights", ffi::DataType::F32, {gemm.num_rows}),
       CheckShape(*d_pre, "the gradient of pre-activations", type, {gemm.num_rows, width}),
       CheckShape(*act, "activations", type, {gemm.num_rows, columns}),
       CheckShape(*partial_dots, "partial dots", ffi::DataType::F32, {num_dots, gemm.num_rows})});
  if (error.failure()) return error;
  gemm.a = gradient.untyped_data();
  gemm.b = weights.untyped_data();
  gemm.d = act->untyped_data();
  activated.row_weights = static_cast<const float*>(row_weights.untyped_data());
  activated.pre = pre.untyped_data();
  activated.d_pre = d_pre->untyped_data();
  activated.partial_dots = static_cast<float*>(partial_dots->untyped_data());
  gemm.activated = &activated;
  return Launch(gemm, stream);
}

ffi::Error Fp8Dot(cudaStream_t stream, int32_t ordinal, int64_t product, int64_t num_sms,
                  ffi::AnyBuffer rows, ffi::AnyBuffer weights, ffi::AnyBuffer table,
                  ffi::AnyBuffer row_scales, ffi::AnyBuffer weight_scales, ffi::RemainingArgs spare,
                  ffi::Result<ffi::AnyBuffer> d, ffi::Result<ffi::AnyBuffer> counter) {
  const Call call = {stream, ordinal, num_sms, rows, weights, table, *counter};
  if (ffi::Error error = CheckAxes(call); error.failure()) return error;
  Fp8Gemm gemm = {};
  gemm.product = static_cast<Fp8Product>(product);
  if (gemm.product != Fp8Product::kForward && gemm.product != Fp8Product::kForwardFew) {
    return Invalid("grouped_dot in FP8 has no product " + std::to_string(product));
  }
  gemm.num_rows = rows.dimensions()[0];
  gemm.num_weights = weights.dimensions()[0];
  gemm.n = weights.dimensions()[1];
  gemm.k = weights.dimensions()[2];
  if (const Problem problem = WhyNotFp8Gemm(gemm.num_rows, table.dimensions()[1], gemm.k, gemm.n);
      !problem.empty()) {
    return Invalid(problem);
  }
  const auto fp8 = ffi::DataType::F8E4M3FN, float32 = ffi::DataType::F32;
  const bool is_float = d->element_type() == float32;
  gemm.type = is_float ? ElementType::kFloat32 : ElementType::kBFloat16;
  const int64_t blocks_k = gemm.k / kFp8Block, blocks_n = (gemm.n + kFp8Block - 1) / kFp8Block;
  ffi::Error error = ReadSpare(spare, 1, weights, &gemm);
  if (error.failure()) return error;
  error = First({CheckShape(rows, "rows", fp8, {gemm.num_rows, gemm.k}),
                 CheckShape(weights, "weights", fp8, {gemm.num_weights, gemm.n, gemm.k}),
                 CheckShape(row_scales, "the scales of rows", float32, {gemm.num_rows, blocks_k}),
                 CheckShape(weight_scales, "the scales of weights", float32,
                            {gemm.num_weights + gemm.num_spare, blocks_n, blocks_k}),
                 CheckShape(*d, "the result", is_float ? float32 : ffi::DataType::BF16,
                            {gemm.num_rows, gemm.n}),
                 ReadLaunch(call, &gemm)});
  if (error.failure()) return error;
  gemm.rows = rows.untyped_data();
  gemm.matrices = weights.untyped_data();
  gemm.row_scales = static_cast<const float*>(row_scales.untyped_data());
  gemm.row_stride = blocks_k;
  gemm.block_stride = 1;
  gemm.matrix_scales = static_cast<const float*>(weight_scales.untyped_data());
  gemm.d = d->untyped_data();
  const Problem problem = LaunchFp8Gemm(gemm, stream);
  return problem.empty() ? ffi::Error::Success() : Internal(problem);
}

ffi::Error RunActEncode(cudaStream_t stream, int32_t ordinal, int64_t function, int64_t is_gated,
                        float alpha, float limit, int64_t num_sms, ffi::AnyBuffer product,
                        ffi::AnyBuffer table, ffi::AnyBuffer row_weights,
                        ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> scales) {
  const auto shape = product.dimensions(), groups = table.dimensions();
  if (shape.size() != 3 || groups.size() != 2) {
    return Invalid("act_encode needs a product of three axes and a table of two; got " +
                   Describe(shape) + " and " + Describe(groups));
  }
  ActEncode call = {};
  ffi::Error error = ReadActivation(function, is_gated, alpha, limit, &call);
  if (error.failure()) return error;
  if (call.function == Activation::kScaledBias) return Invalid("act_encode needs an activation");
  const auto float32 = ffi::DataType::F32;
  const bool is_float = product.element_type() == float32;
  const bool is_weighted = call.is_gated || row_weights.dimensions().size() != 1;
  const int64_t batch = shape[0], rows = shape[1], halves = call.is_gated ? 2 : 1;
  const int64_t columns = shape[2] / halves, num_groups = groups[1];
  if (shape[2] % (halves * kFp8Block) != 0 || batch < 1 || num_groups < 1 ||
      num_groups % batch != 0) {
    return Invalid(
        "act_encode needs columns in multiples of 128 and the same number of groups for each "
        "element of the batch; got a product " +
        Describe(shape) + " and a table " + Describe(groups));
  }
  int sms = 0;
  error = First({CheckShape(product, "the product", is_float ? float32 : ffi::DataType::BF16,
                            {batch, rows, shape[2]}),
                 CheckShape(table, "the table of groups", ffi::DataType::S32, {3, num_groups}),
                 is_weighted ? CheckShape(row_weights, "router weights", float32, {batch, rows})
                             : CheckShape(row_weights, "router weights", float32, {0}),
                 CheckShape(*values, "the values", ffi::DataType::F8E4M3FN, {batch, rows, columns}),
                 CheckShape(*scales, "the scales", float32, {batch, rows, columns / kFp8Block}),
                 ReadSms(ordinal, num_sms, &sms)});
  if (error.failure()) return error;
  call.type = is_float ? ElementType::kFloat32 : ElementType::kBFloat16;
  call.product = product.untyped_data();
  call.row_weights = is_weighted ? static_cast<const float*>(row_weights.untyped_data()) : nullptr;
  call.starts = static_cast<const int32_t*>(table.untyped_data());
  call.sizes = call.starts + num_groups;
  call.values = static_cast<uint8_t*>(values->untyped_data());
  call.scales = static_cast<uint32_t*>(scales->untyped_data());
  call.num_rows = batch * rows;
  call.batch = static_cast<int32_t>(batch);
  call.num_groups = static_cast<int32_t>(num_groups / batch);
  call.columns = static_cast<int32_t>(columns);
  const Problem problem = LaunchActEncode(call, sms, stream);
  return problem.empty() ? ffi::Error::Success() : Internal(problem);
}

ffi::Error RunEncodeSquares(cudaStream_t stream, ffi::AnyBuffer weights,
                            ffi::Result<ffi::AnyBuffer> turned, ffi::Result<ffi::AnyBuffer> plain,
                            ffi::Result<ffi::AnyBuffer> scales) {
  const auto shape = weights.dimensions();
  if (shape.size() != 3 || shape[1] % kFp8Block != 0 || shape[2] % kFp8Block != 0) {
    return Invalid("encode_squares needs weights [L, K, N], with multiples of 128; got " +
                   Describe(shape));
  }
  const auto float32 = ffi::DataType::F32;
  const bool is_float = weights.element_type() == float32;
  const int64_t num = shape[0], k = shape[1], n = shape[2];
  const auto check_values = [](const ffi::AnyBuffer& values, const char* name, int64_t num,
                               int64_t rows, int64_t columns) {
    const bool is_there = values.dimensions().size() == 3;
    return is_there ? CheckShape(values, name, ffi::DataType::F8E4M3FN, {num, rows, columns})
                    : CheckShape(values, name, ffi::DataType::F8E4M3FN, {0});
  };
  const ffi::Error error =
      First({CheckShape(weights, "weights", is_float ? float32 : ffi::DataType::BF16, {num, k, n}),
             check_values(*turned, "the values", num, n, k),
             check_values(*plain, "the transposed values", num, k, n),
             CheckShape(*scales, "the scales", float32, {num, n / kFp8Block, k / kFp8Block})});
  if (error.failure()) return error;
  const auto values_of = [](const ffi::AnyBuffer& values) {
    return IsEmpty(values) ? nullptr : static_cast<uint8_t*>(values.untyped_data());
  };
  const EncodeSquares call = {is_float ? ElementType::kFloat32 : ElementType::kBFloat16,
                              weights.untyped_data(),
                              values_of(*turned),
                              values_of(*plain),
                              static_cast<uint32_t*>(scales->untyped_data()),
                              num,
                              k,
                              n};
  const Problem problem = LaunchEncodeSquares(call, stream);
  return problem.empty() ? ffi::Error::Success() : Internal(problem);
}

// What handlers have in common: the parameters that they begin with, an activation and the SMs
// after it, arrays.
auto OnDevice() {
  return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().Ctx<ffi::DeviceOrdinal>();
}
template <typename Binding>
auto WithActivation(Binding binding) {
  return std::move(binding)
      .template Attr<int64_t>("activation")
      .template Attr<int64_t>("gated")
      .template Attr<float>("alpha")
      .template Attr<float>("limit")
      .template Attr<int64_t>("num_sms");
}
template <int kNum, typename Binding>
auto WithOperands(Binding binding) {
  if constexpr (kNum == 1) {
    return std::move(binding).template Arg<ffi::AnyBuffer>();
  } else {
    return WithOperands<kNum - 1>(std::move(binding).template Arg<ffi::AnyBuffer>());
  }
}
template <int kNum, typename Binding>
auto WithResults(Binding binding) {
  if constexpr (kNum == 1) {
    return std::move(binding).template Ret<ffi::AnyBuffer>();
  } else {
    return WithResults<kNum - 1>(std::move(binding).template Ret<ffi::AnyBuffer>());
  }
}

// Loads the kernels, once for each device, because they cannot be loaded while a graph is captured.
ffi::Error Initialize(int32_t ordinal, ffi::Dictionary) {
  static std::atomic<uint64_t> loaded{0};
  const uint64_t device = ordinal < 64 ? uint64_t{1} << ordinal : 0;
  if ((loaded & device) != 0) return ffi::Error::Success();
  int major = 0, minor = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal);
  }
  if (error != cudaSuccess) return ToError(error);
  if (major != 9 || minor != 0) {
    return Invalid("the kernel of grouped_dot needs compute capability 9.0; got " +
                   std::to_string(major) + "." + std::to_string(minor) +
                   ". The program was lowered for another GPU; lower it again");
  }
  const DeviceScope scope;
  error = cudaSetDevice(ordinal);
  if (error == cudaSuccess) error = LoadGroupedGemm();
  if (error == cudaSuccess) error = LoadFp8Gemm();
  if (error == cudaSuccess) error = LoadActEncode();
  if (error == cudaSuccess) error = LoadEncodeSquares();
  if (error == cudaSuccess) loaded |= device;
  return ToError(error);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_a2a_grouped_gemm_initialize, Initialize,
                              ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    moe_a2a_grouped_gemm, Run,
    WithResults<2>(WithOperands<3>(OnDevice().Attr<int64_t>("product").Attr<int64_t>("num_sms"))
                       .RemainingArgs()),
    {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    moe_a2a_dot_act, DotAct,
    WithResults<3>(
        WithOperands<5>(WithActivation(OnDevice().Attr<int64_t>("product"))).RemainingArgs()),
    {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    moe_a2a_act_dot_grad, ActDotGrad,
    WithResults<4>(WithOperands<5>(WithActivation(OnDevice())).RemainingArgs()),
    {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    moe_a2a_fp8_gemm, Fp8Dot,
    WithResults<2>(WithOperands<5>(OnDevice().Attr<int64_t>("product").Attr<int64_t>("num_sms"))
                       .RemainingArgs()),
    {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_a2a_act_encode, RunActEncode,
                              WithResults<2>(WithOperands<3>(WithActivation(OnDevice()))),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    moe_a2a_encode_squares, RunEncodeSquares,
    WithResults<3>(WithOperands<1>(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>())),
    {ffi::Traits::kCmdBufferCompatible});

}  // namespace moe_a2a
