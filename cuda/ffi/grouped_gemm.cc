// The handlers of products (calls/products.h): they decode a call, describe it and launch it.
#include "ffi/grouped_gemm.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>
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

NumberType NumberTypeOf(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::BF16: return NumberType::kBFloat16;
    case ffi::DataType::F16: return NumberType::kFloat16;
    case ffi::DataType::F32: return NumberType::kFloat32;
    case ffi::DataType::S32: return NumberType::kInt32;
    case ffi::DataType::F8E4M3FN: return NumberType::kFp8;
    default: return NumberType::kOther;
  }
}

// The operands or results of one execution.
class ArrayList {
 public:
  // Returns false if an argument is no buffer, or if no call has that number of buffers.
  template <typename Buffers>
  bool Read(const Buffers& buffers) {
    if (buffers.size() > kMost) return false;
    count_ = buffers.size();
    for (size_t i = 0; i < count_; ++i) {
      const auto any = buffers.template get<ffi::AnyBuffer>(i);
      if (!any) return false;
      const ffi::AnyBuffer buffer = BufferOf(*any);
      const auto axes = buffer.dimensions();
      list_[i] = {
          NumberTypeOf(buffer.element_type()), {axes.begin(), axes.size()}, buffer.untyped_data()};
    }
    return true;
  }

  ProductArrays arrays() const { return {list_, count_}; }

 private:
  static constexpr size_t kMost = 8;

  ProductArray list_[kMost];
  size_t count_ = 0;
};

template <typename Call>
ffi::Error Execute(cudaStream_t stream, int32_t ordinal, ffi::Dictionary attributes,
                   ffi::RemainingArgs operands, ffi::RemainingRets outputs) {
  ArrayList args, results;
  if (!args.Read(operands) || !results.Read(outputs)) {
    return Internal("an operand or a result of the call is not an array, or the call has too many");
  }
  typename Call::Params params = {};
  int64_t limit = 0;
  if (const Problem problem = DescribeProduct<Call>(AttributeReader(attributes), args.arrays(),
                                                    results.arrays(), &params, &limit);
      !problem.empty()) {
    return Invalid(problem);
  }
  int num_sms = 0;
  if (const cudaError_t error =
          cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, ordinal);
      error != cudaSuccess) {
    return ToError(error);
  }
  if (limit > 0) num_sms = static_cast<int>(std::min<int64_t>(limit, num_sms));
  const Problem problem = Call::Launch(params, num_sms, stream);
  return problem.empty() ? ffi::Error::Success() : Internal("grouped_dot: " + problem);
}

// Loads the kernels, once for each device, because they cannot be loaded while a graph is captured.
ffi::Error LoadProducts(int32_t ordinal) {
  static std::atomic<uint64_t> loaded{0};
  const uint64_t device = ordinal < 64 ? uint64_t{1} << ordinal : 0;
  if ((loaded & device) != 0) return ffi::Error::Success();
  int major = 0, minor = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal);
  }
  if (error != cudaSuccess) return ToError(error);
  const std::string capability = std::to_string(major) + "." + std::to_string(minor);
  if (capability != kGemmCapability) {
    return Invalid("the kernel of grouped_dot needs compute capability " +
                   std::string(kGemmCapability) + "; got " + capability +
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

template <typename Call>
XLA_FFI_Error* ExecuteHandler(XLA_FFI_CallFrame* frame) {
  static const auto* handler = ffi::Ffi::Bind()
                                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                   .Ctx<ffi::DeviceOrdinal>()
                                   .Attrs()
                                   .RemainingArgs()
                                   .RemainingRets()
                                   .To(Execute<Call>, {ffi::Traits::kCmdBufferCompatible})
                                   .release();
  return handler->Call(frame);
}

XLA_FFI_Error* InitializeHandler(XLA_FFI_CallFrame* frame) {
  static const auto* handler =
      ffi::Ffi::BindInitialize()
          .Ctx<ffi::DeviceOrdinal>()
          .Attrs()
          .To([](int32_t ordinal, ffi::Dictionary) { return LoadProducts(ordinal); })
          .release();
  return handler->Call(frame);
}

}  // namespace

void AddProductTargets(std::vector<Target>& targets) {
  for_each(ProductCalls{}, [&](auto of) {
    using Call = typename decltype(of)::type;
    targets.push_back({Call::kTarget, nullptr, InitializeHandler, ExecuteHandler<Call>});
  });
}

}  // namespace moe_a2a
