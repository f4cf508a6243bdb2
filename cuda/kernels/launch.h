// Launchers of the kernels. They only launch, and neither allocate nor synchronize.
#pragma once

#include <cuda_runtime_api.h>

#include <tuple>

#include "params.h"

// The form in which the kernels of a file are compiled: for ranks that each have a device, or for
// ranks that share one device (cuda/colocated/). The form is the name of a namespace, so that both
// forms can be linked together.
#ifdef MOE_A2A_COLOCATED
#define MOE_A2A_FORM colocated
#else
#define MOE_A2A_FORM direct
#endif

namespace moe_a2a {

// Each launcher receives the parameters of the device's rank. If ranks share a device, it receives
// the parameters of ranks 0 and 1, one after the other (device/ranks.cuh). Each rank has
// `num_blocks` blocks. Each Load function loads, on the current device, all kernels that its
// launcher may choose, and sets their limits (kernels/table.h).
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

// Loads and launches the kernels that have these parameters.
template <typename Params>
struct Launcher {
  cudaError_t (*load)();
  cudaError_t (*launch)(const Params* ranks, int num_blocks, cudaStream_t stream);
};

// The kernels in one form.
struct Kernels {
  std::tuple<Launcher<RouteParams>, Launcher<DispatchParams>, Launcher<FormatDispatchParams>,
             Launcher<RoutedDispatchParams>, Launcher<CombineParams>>
      launchers;

  // Loads every kernel on the current device, so that no later call does.
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

// The kernels for ranks that each have a device, and for ranks that share one device.
const Kernels& DirectKernels();
const Kernels& ColocatedKernels();

// The most local experts for which route_assign fits into shared memory.
constexpr int kMaxLocalExperts = 8192;
// The most counts (levels times local experts) for which route_exchange fits into shared memory.
constexpr int kMaxRouteCounts = 16384;
// The most experts of all ranks in route: an index of a chunk and an expert has 32 bits.
constexpr int kMaxRouteExperts = 1 << 19;
// The largest number of blocks of each rank if ranks share a device. It is the limit of a grid's
// second dimension.
constexpr int64_t kMaxColocatedBlocks = 65535;
// The most tokens of a chunk of route: one for each thread of a block.
constexpr int kMaxTokensPerRouteChunk = kThreads / 2;
#ifndef MOE_A2A_EMULATION  // The emulator has smaller blocks and chunks.
static_assert(Tuning::kRouteMostTokens <= kMaxTokensPerRouteChunk);
#endif

}  // namespace moe_a2a
