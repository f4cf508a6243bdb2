// The launchers, one per kernel. They only launch: no allocation, no synchronization.
#ifndef MOE_A2A_KERNELS_LAUNCH_H_
#define MOE_A2A_KERNELS_LAUNCH_H_

#include <cuda_runtime_api.h>

#include "params.h"

// The form in which the kernels of a file are compiled: for ranks on devices of their own, or for ranks that
// share one device (cuda/colocated/). It names a namespace, so that both forms can be linked together.
#ifdef MOE_A2A_COLOCATED
#define MOE_A2A_FORM colocated
#else
#define MOE_A2A_FORM direct
#endif

namespace moe_a2a {

// Each launcher receives the parameters of the device's rank; where ranks share a device, those of ranks 0
// and 1, one after the other (device/ranks.cuh). `num_blocks` is for each rank.
inline namespace MOE_A2A_FORM {

cudaError_t LaunchRouteExchange(const RouteParams* ranks, int num_blocks, cudaStream_t stream);
cudaError_t LaunchRouteAssign(const RouteParams* ranks, cudaStream_t stream);
cudaError_t LaunchDispatch(const DispatchParams* ranks, int num_blocks, cudaStream_t stream);
cudaError_t LaunchFormatDispatch(const FormatDispatchParams* ranks, int num_blocks,
                                 cudaStream_t stream);
cudaError_t LaunchRoutedDispatch(const RoutedDispatchParams* ranks, int num_blocks,
                                 cudaStream_t stream);
cudaError_t LaunchCombine(const CombineParams* ranks, int num_blocks, cudaStream_t stream);

}  // namespace MOE_A2A_FORM

// The kernels in one of the forms in which they are compiled. Those that reach ranks beyond the load/store
// domain (runtime/network.h) lack `format_dispatch` and `routed_dispatch`.
struct Kernels {
  // Loads every kernel on the current device and sets its limits, so that no call does so later.
  cudaError_t (*load)();
  cudaError_t (*route_exchange)(const RouteParams* ranks, int num_blocks, cudaStream_t stream);
  cudaError_t (*route_assign)(const RouteParams* ranks, cudaStream_t stream);
  cudaError_t (*dispatch)(const DispatchParams* ranks, int num_blocks, cudaStream_t stream);
  cudaError_t (*combine)(const CombineParams* ranks, int num_blocks, cudaStream_t stream);
  cudaError_t (*format_dispatch)(const FormatDispatchParams* ranks, int num_blocks,
                                 cudaStream_t stream);
  cudaError_t (*routed_dispatch)(const RoutedDispatchParams* ranks, int num_blocks,
                                 cudaStream_t stream);
};

// For ranks on devices of their own, and for ranks that share one device.
const Kernels& DirectKernels();
const Kernels& ColocatedKernels();

// The most local experts for which LaunchRouteAssign fits into shared memory.
constexpr int kMaxLocalExperts = 8192;
// The most counts, levels of the local experts, for which LaunchRouteExchange fits into shared memory.
constexpr int kMaxRouteCounts = 16384;
// Tokens that share a flag and a place in the counts: one for each thread of a route block.
constexpr int kMaxTokensPerRouteChunk = kThreads / 2;

}  // namespace moe_a2a

#endif  // MOE_A2A_KERNELS_LAUNCH_H_
