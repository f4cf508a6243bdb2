// The launchers, one per kernel. They only launch: no allocation, no synchronization.
#ifndef MOE_A2A_KERNELS_LAUNCH_H_
#define MOE_A2A_KERNELS_LAUNCH_H_

#include <cuda_runtime_api.h>

#include "params.h"

namespace moe_a2a {

cudaError_t LaunchRouteExchange(const RouteParams& params, int num_blocks, cudaStream_t stream);
cudaError_t LaunchRouteAssign(const RouteParams& params, cudaStream_t stream);
cudaError_t LaunchDispatch(const DispatchParams& params, int num_blocks, cudaStream_t stream);
cudaError_t LaunchFormatDispatch(const FormatDispatchParams& params, int num_blocks,
                                 cudaStream_t stream);
cudaError_t LaunchRoutedDispatch(const RoutedDispatchParams& params, int num_blocks,
                                 cudaStream_t stream);
cudaError_t LaunchCombine(const CombineParams& params, int num_blocks, cudaStream_t stream);

// Those of the exchanges that reach ranks beyond the load/store domain too, where they are built with NVSHMEM
// (runtime/network.h).
struct Kernels {
  cudaError_t (*load)();
  cudaError_t (*route_exchange)(const RouteParams& params, int num_blocks, cudaStream_t stream);
  cudaError_t (*dispatch)(const DispatchParams& params, int num_blocks, cudaStream_t stream);
  cudaError_t (*combine)(const CombineParams& params, int num_blocks, cudaStream_t stream);
};

// The most local experts for which LaunchRouteAssign fits into shared memory.
constexpr int kMaxLocalExperts = 8192;
// Tokens that share a flag and a place in the counts: one for each thread of a route block.
constexpr int kMaxTokensPerRouteChunk = kThreads / 2;

// Launches a kernel; the error is of this launch alone.
template <typename... Params>
cudaError_t Launch(void (*kernel)(Params...), int num_blocks, int num_threads, size_t shared_bytes,
                   cudaStream_t stream, Params... params) {
  void* arguments[] = {&params...};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(num_blocks),
                          dim3(num_threads), arguments, shared_bytes, stream);
}

}  // namespace moe_a2a

#endif  // MOE_A2A_KERNELS_LAUNCH_H_
