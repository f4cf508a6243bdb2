// The handlers of the calls in calls/products.h.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "calls/products.h"
#include "ffi/attributes.h"
#include "ffi/buffers.h"
#include "ffi/errors.h"
#include "ffi/targets.h"
#include "runtime/cuda_error.h"
#include "runtime/driver.h"
#include "xla/ffi/api/ffi.h"

namespace moe_a2a {
namespace {

// Kernels that have one block for each work item do not accept a limit on their blocks.
template <typename Call, typename Params>
Problem Launch(Params& params, int num_sms, cudaStream_t stream) {
  if constexpr (std::is_invocable_v<decltype(Call::kLaunch), Params&, int, cudaStream_t>) {
    return Call::kLaunch(params, num_sms, stream);
  } else {
    if constexpr (std::is_base_of_v<GroupedGemm, Params> || std::is_same_v<Params, Fp8Gemm>) {
      params.num_sms = num_sms;
    }
    return Call::kLaunch(params, stream);
  }
}

template <typename Call>
Problem Run(cudaStream_t stream, int32_t ordinal, const ffi::Dictionary& attributes,
            const ffi::RemainingArgs& operands, const ffi::RemainingRets& outputs) {
  Arrays args, results;
  MOE_A2A_TRY(
      DecodeArrays(operands, /*first_index=*/0, /*ranks_of_device=*/1, Alignment::kVector, &args));
  MOE_A2A_TRY(
      DecodeArrays(outputs, args.size(), /*ranks_of_device=*/1, Alignment::kVector, &results));
  typename Call::Params params = {};
  int64_t limit = 0;
  if (const Problem problem =
          DescribeProduct<Call>(ReaderOf(attributes), {args.data(), args.size()},
                                {results.data(), results.size()}, &params, &limit);
      !problem.empty()) {
    return Invalid(problem);
  }
  int num_sms = 0;
  MOE_A2A_TRY(ProblemOf(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, ordinal),
                        "asking for the device's multiprocessors"));
  if (limit > 0) num_sms = static_cast<int>(std::min<int64_t>(limit, num_sms));
  return Launch<Call>(params, num_sms, stream);
}

template <typename Call>
ffi::Error Execute(cudaStream_t stream, int32_t ordinal, ffi::Dictionary attributes,
                   ffi::RemainingArgs operands, ffi::RemainingRets outputs) {
  Problem problem = Run<Call>(stream, ordinal, attributes, operands, outputs);
  if (!problem.empty()) problem.insert(0, std::string(Call::kTarget) + ": ");
  return ToError(problem);
}

Problem CheckCapability(int32_t ordinal) {
  int major = 0, minor = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal);
  }
  MOE_A2A_TRY(ProblemOf(error, "asking for the compute capability"));
  const std::string capability = Concat(major, ".", minor);
  if (capability == kGemmCapability) return {};
  return Invalid("the kernel of grouped_dot needs compute capability " +
                 std::string(kGemmCapability) + "; got " + capability +
                 ". The program was lowered for another GPU; lower it again");
}

// Loads the kernels once for each device, because no load is possible while a graph is captured.
template <typename Call>
ffi::Error Load(int32_t ordinal, ffi::Dictionary) {
  static std::atomic<uint64_t> loaded{0};
  const uint64_t device = ordinal < 64 ? uint64_t{1} << ordinal : 0;
  if ((loaded & device) != 0) return ffi::Error::Success();
  const DeviceScope scope;
  Problem problem = Call::kRunsOnAllGpus ? Problem() : CheckCapability(ordinal);
  if (problem.empty()) problem = ProblemOf(cudaSetDevice(ordinal), "choosing a device");
  if (problem.empty()) problem = ProblemOf(Call::kLoad(), "loading the kernels");
  if (problem.empty()) loaded |= device;
  return ToError(problem);
}

template <typename Call>
XLA_FFI_Error* ExecuteHandler(XLA_FFI_CallFrame* frame) {
  // A graph must not capture cuBLASLt, which loads a kernel at the kernel's first launch.
  constexpr bool kMayBeCaptured = !std::is_same_v<Call, LibraryGemmCall>;
  static const auto* handler =
      MakeHandler<kMayBeCaptured>(ffi::Ffi::Bind()
                                      .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                      .Ctx<ffi::DeviceOrdinal>()
                                      .Attrs()
                                      .RemainingArgs()
                                      .RemainingRets(),
                                  Execute<Call>);
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
