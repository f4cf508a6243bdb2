// The launchers, one per kernel. They only launch: no allocation, no synchronization.
#ifndef MOE_A2A_KERNELS_LAUNCH_H_
#define MOE_A2A_KERNELS_LAUNCH_H_

#include <cuda_runtime_api.h>

#include "params.h"

namespace moe_a2a {

cudaError_t LaunchRouteExchange(const RouteParams& params, int num_blocks, cudaStream_t stream);
cudaError_t LaunchRouteAssign(const RouteParams& params, cudaStream_t stream);
cudaError_t LaunchDispatch(const DispatchParams& params, int num_blocks, cudaStream_t stream);
cudaError_t LaunchCombine(const CombineParams& params, int num_blocks, cudaStream_t stream);

// The most local experts for which LaunchRouteAssign fits into shared memory.
constexpr int kMaxLocalExperts = 8192;

}  // namespace moe_a2a

#endif  // MOE_A2A_KERNELS_LAUNCH_H_
