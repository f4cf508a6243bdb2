// Launchers of the kernels. A launcher does not allocate and does not synchronize.
#pragma once

#include <cuda_runtime_api.h>

#include <tuple>

#include "params.h"

// The form of a file's kernels: for ranks that have a device each, or for ranks that share one
// device (cuda/colocated/). Each form has its own namespace, so that both can be linked together.
#ifdef MOE_A2A_COLOCATED
#define MOE_A2A_FORM colocated
#else
#define MOE_A2A_FORM direct
#endif

namespace moe_a2a {

// A Launch function receives the parameters of the device's rank, or of ranks 0 and 1 if ranks
// share a device (device/ranks.cuh). A Load function loads kernels on the current device.
inline namespace MOE_A2A_FORM {

cudaError_t LaunchRoute(const RouteParams* ranks, int num_blocks, cudaStream_t stream);
cudaError_t LoadRoute();
cudaError_t LaunchDispatch(const DispatchParams* ranks, int num_blocks, cudaStream_t stream);
cudaError_t LoadDispatch();
cudaError_t LaunchFormatDispatch(const FormatDispatchParams* ranks, int num_blocks,
                                 cudaStream_t stream);
cudaError_t LoadFormatDispatch();
cudaError_t LaunchRoutedDispatch(const RoutedDispatchParams* ranks, int num_blocks,
                                 cudaStream_t stream);
cudaError_t LoadRoutedDispatch();
cudaError_t LaunchCombine(const CombineParams* ranks, int num_blocks, cudaStream_t stream);
cudaError_t LoadCombine();

}  // namespace MOE_A2A_FORM

template <typename Params>
struct Launcher {
  cudaError_t (*load)();
  cudaError_t (*launch)(const Params* ranks, int num_blocks, cudaStream_t stream);
};

struct Kernels {
  std::tuple<Launcher<RouteParams>, Launcher<DispatchParams>, Launcher<FormatDispatchParams>,
             Launcher<RoutedDispatchParams>, Launcher<CombineParams>>
      launchers;

  cudaError_t load() const {
    cudaError_t error = cudaSuccess;
    const auto load_next = [&](const auto& launcher) {
      if (error == cudaSuccess) error = launcher.load();
    };
    std::apply([&](const auto&... each) { (load_next(each), ...); }, launchers);
    return error;
  }

  template <typename Params>
  cudaError_t launch(const Params* ranks, int num_blocks, cudaStream_t stream) const {
    return std::get<Launcher<Params>>(launchers).launch(ranks, num_blocks, stream);
  }
};

const Kernels& DirectKernels();
const Kernels& ColocatedKernels();

constexpr int kMaxLocalExperts = 8192;     // limited by route_assign's shared memory
constexpr int kMaxRouteCounts = 16384;     // levels * local experts: route_exchange's shared memory
constexpr int kMaxRouteExperts = 1 << 19;  // an index of a count has 32 bits
constexpr int64_t kMaxColocatedBlocks = 65535;         // of a rank: the grid's second dimension
constexpr int kMaxTokensPerRouteChunk = kThreads / 2;  // one for each thread of a route block
#ifndef MOE_A2A_EMULATION                              // its blocks and chunks are smaller
static_assert(Tuning::kRouteMostTokens <= kMaxTokensPerRouteChunk);
#endif

}  // namespace moe_a2a
