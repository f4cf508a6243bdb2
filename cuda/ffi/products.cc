// The handlers of calls/products.h: they decode a call, describe it and launch it.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <type_traits>
#include <vector>

#include "calls/products.h"
#include "ffi/attributes.h"
#include "ffi/buffers.h"
#include "ffi/errors.h"
#include "ffi/targets.h"
#include "runtime/driver.h"
#include "xla/ffi/api/ffi.h"

namespace moe_a2a {
namespace {

template <typename Call>
ffi::Error Execute(cudaStream_t stream, int32_t ordinal, ffi::Dictionary attributes,
                   ffi::RemainingArgs operands, ffi::RemainingRets outputs) {
  const auto args = DecodeArrays(operands, /*ranks_of_device=*/1, Alignment::kVector);
  if (!args) return args.error();
  const auto results = DecodeArrays(outputs, /*ranks_of_device=*/1, Alignment::kVector);
  if (!results) return results.error();
  typename Call::Params params = {};
  int64_t limit = 0;
  if (const Problem problem =
          DescribeProduct<Call>(AttributeReader(attributes), {args->data(), args->size()},
                                {results->data(), results->size()}, &params, &limit);
      !problem.empty()) {
    return Invalid(std::string(Call::kTarget) + ": " + problem);
  }
  int num_sms = 0;
  if (const cudaError_t error =
          cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, ordinal);
      error != cudaSuccess) {
    return ToError(error);
  }
  if (limit > 0) num_sms = static_cast<int>(std::min<int64_t>(limit, num_sms));
  const Problem problem = Call::Launch(params, num_sms, stream);
  return problem.empty() ? ffi::Error::Success()
                         : Internal(std::string(Call::kTarget) + ": " + problem);
}

ffi::Error CheckCapability(int32_t ordinal) {
  int major = 0, minor = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal);
  }
  if (error != cudaSuccess) return ToError(error);
  const std::string capability = std::to_string(major) + "." + std::to_string(minor);
  if (capability == kGemmCapability) return ffi::Error::Success();
  return Invalid("the kernel of grouped_dot needs compute capability " +
                 std::string(kGemmCapability) + "; got " + capability +
                 ". The program was lowered for another GPU; lower it again");
}

// Loads the kernels, once for each device, because they cannot be loaded while a graph is captured.
template <typename Call>
ffi::Error Load(int32_t ordinal, ffi::Dictionary) {
  static std::atomic<uint64_t> loaded{0};
  const uint64_t device = ordinal < 64 ? uint64_t{1} << ordinal : 0;
  if ((loaded & device) != 0) return ffi::Error::Success();
  const DeviceScope scope;
  cudaError_t error = cudaSuccess;
  if constexpr (std::is_same_v<typename Call::Params, LibraryGemm>) {
    error = cudaSetDevice(ordinal);
    if (error == cudaSuccess) error = LoadGroupArrays();
  } else if constexpr (std::is_same_v<Call, FillSlotsCall>) {
    error = cudaSetDevice(ordinal);
    if (error == cudaSuccess) error = LoadFillSlots();
  } else if constexpr (std::is_same_v<Call, ChooseCall>) {
    error = cudaSetDevice(ordinal);
    if (error == cudaSuccess) error = LoadChoose();
  } else {
    if (ffi::Error refused = CheckCapability(ordinal); refused.failure()) return refused;
    error = cudaSetDevice(ordinal);
    if (error == cudaSuccess) error = LoadGroupedGemm();
    if (error == cudaSuccess) error = LoadFp8Gemm();
    if (error == cudaSuccess) error = LoadActEncode();
    if (error == cudaSuccess) error = LoadEncodeSquares();
  }
  if (error == cudaSuccess) loaded |= device;
  return ToError(error);
}

template <typename Call>
XLA_FFI_Error* ExecuteHandler(XLA_FFI_CallFrame* frame) {
  const auto bind = [](std::initializer_list<ffi::Traits> traits) {
    return ffi::Ffi::Bind()
        .Ctx<ffi::PlatformStream<cudaStream_t>>()
        .Ctx<ffi::DeviceOrdinal>()
        .Attrs()
        .RemainingArgs()
        .RemainingRets()
        .To(Execute<Call>, traits)
        .release();
  };
  // A graph must not capture a call of cuBLASLt, because the library loads a kernel when it first
  // launches this kernel.
  static const auto* handler = std::is_same_v<typename Call::Params, LibraryGemm>
                                   ? bind({})
                                   : bind({ffi::Traits::kCmdBufferCompatible});
  return handler->Call(frame);
}

template <typename Call>
XLA_FFI_Error* InitializeHandler(XLA_FFI_CallFrame* frame) {
  static const auto* handler =
      ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>().Attrs().To(Load<Call>).release();
  return handler->Call(frame);
}

}  // namespace

void AddProductTargets(std::vector<Target>& targets) {
  for_each(ProductCalls{}, [&](auto of) {
    using Call = typename decltype(of)::type;
    targets.push_back({Call::kTarget, nullptr, InitializeHandler<Call>, ExecuteHandler<Call>});
  });
}

}  // namespace moe_a2a
