// The handler of the grouped GEMM: it decodes and checks a call, and launches the kernel.
//
// Operands: a and b of the product (gemm/grouped_gemm.h), and the table of groups, int32 [3, groups]: first rows,
// numbers of rows, and indices of weights. Results: d, and the kernel's counter, int32 [1]. The values of the table are
// not checked. Groups must lie within the rows, and indices within the weights; jax_moe_a2a/_src/grouped/lowering.py
// ensures both.
#include "ffi/grouped_gemm.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>

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
  if (error == cudaSuccess) loaded |= device;
  return ToError(error);
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

ffi::Error Run(cudaStream_t stream, int32_t ordinal, int64_t product, int64_t num_sms,
               ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::AnyBuffer table,
               ffi::Result<ffi::AnyBuffer> d, ffi::Result<ffi::AnyBuffer> counter) {
  GroupedGemm gemm = {};
  if (product < 0 || product > static_cast<int64_t>(GroupedProduct::kWeightGradient)) {
    return Invalid("grouped_dot has no product " + std::to_string(product));
  }
  gemm.product = static_cast<GroupedProduct>(product);
  const bool is_gradient = gemm.product == GroupedProduct::kWeightGradient;
  const bool is_transposed = gemm.product == GroupedProduct::kTransposed;
  const ffi::AnyBuffer weights = is_gradient ? ffi::AnyBuffer(*d) : b;
  const auto shape_a = a.dimensions(), shape_weights = weights.dimensions(),
             shape_table = table.dimensions();
  if (shape_a.size() != 2 || shape_weights.size() != 3 || shape_table.size() != 2) {
    return Invalid("grouped_dot needs rows of two axes, weights of three and a table of two; got " +
                   Describe(shape_a) + ", " + Describe(shape_weights) + " and " +
                   Describe(shape_table));
  }
  const ffi::DataType type = a.element_type();
  if (type != ffi::DataType::BF16 && type != ffi::DataType::F16) {
    return Invalid("the kernel of grouped_dot needs bfloat16 or float16");
  }
  gemm.type = type == ffi::DataType::BF16 ? ElementType::kBFloat16 : ElementType::kFloat16;
  gemm.num_rows = shape_a[0];
  gemm.num_weights = shape_weights[0];
  gemm.k = shape_weights[1];
  gemm.n = shape_weights[2];
  const int64_t columns = is_transposed ? gemm.n : gemm.k;
  const int64_t num_groups = shape_table[1];
  const auto check_d = [&] {
    if (is_gradient) return CheckShape(b, "b", type, {gemm.num_rows, gemm.n});
    return CheckShape(*d, "the result", type, {gemm.num_rows, is_transposed ? gemm.k : gemm.n});
  };
  for (const ffi::Error& error :
       {CheckShape(a, "rows", type, {gemm.num_rows, columns}),
        CheckShape(weights, "weights", type, {gemm.num_weights, gemm.k, gemm.n}), check_d(),
        CheckShape(table, "the table of groups", ffi::DataType::S32, {3, num_groups}),
        CheckShape(*counter, "the counter", ffi::DataType::S32, {1})}) {
    if (error.failure()) return error;
  }
  if (const Problem problem = WhyNotGroupedGemm(gemm.num_rows, num_groups, gemm.k, gemm.n);
      !problem.empty()) {
    return Invalid(problem);
  }
  gemm.a = a.untyped_data();
  gemm.b = b.untyped_data();
  gemm.d = d->untyped_data();
  gemm.starts = static_cast<const int32_t*>(table.untyped_data());
  gemm.sizes = gemm.starts + num_groups;
  gemm.weights = gemm.sizes + num_groups;
  gemm.num_groups = static_cast<int32_t>(num_groups);
  gemm.counter = static_cast<int32_t*>(counter->untyped_data());
  int sms = 0;
  if (const cudaError_t error =
          cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, ordinal);
      error != cudaSuccess) {
    return ToError(error);
  }
  if (num_sms < 0) return Invalid("num_sms must be at least 0; got " + std::to_string(num_sms));
  gemm.num_sms = num_sms == 0 ? sms : static_cast<int>(std::min<int64_t>(num_sms, sms));
  const Problem problem = LaunchGroupedGemm(gemm, stream);
  return problem.empty() ? ffi::Error::Success() : Internal(problem);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_a2a_grouped_gemm_initialize, Initialize,
                              ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_a2a_grouped_gemm, Run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Attr<int64_t>("product")
                                  .Attr<int64_t>("num_sms")
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace moe_a2a
