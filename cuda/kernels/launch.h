// Launchers of the kernels. They only launch: no allocation, no synchronization.
#ifndef MOE_A2A_KERNELS_LAUNCH_H_
#define MOE_A2A_KERNELS_LAUNCH_H_

#include <cuda_runtime_api.h>

#include "params.h"

// The form in which the kernels of a file are compiled: for ranks with a device each, or for ranks
// that share one device (cuda/colocated/). It names a namespace, so that both forms can be linked
// together.
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

cudaError_t LaunchRouteExchange(const RouteParams* ranks, int num_blocks, cudaStream_t stream);
cudaError_t LoadRouteExchange();
cudaError_t LaunchRouteAssign(const RouteParams* ranks, cudaStream_t stream);
cudaError_t LoadRouteAssign();
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

// Loads and launches the kernels of one operation. Both functions are null if a form lacks the
// kernels.
template <typename... Arguments>
struct Operator {
  cudaError_t (*load)() = nullptr;
  cudaError_t (*launch)(Arguments...) = nullptr;

  cudaError_t operator()(Arguments... arguments) const {
    return launch == nullptr ? cudaErrorUnknown : launch(arguments...);
  }
};

// The kernels in one form.
struct Kernels {
  Operator<const RouteParams*, int, cudaStream_t> route_exchange;
  Operator<const RouteParams*, cudaStream_t> route_assign;
  Operator<const DispatchParams*, int, cudaStream_t> dispatch;
  Operator<const CombineParams*, int, cudaStream_t> combine;
  Operator<const FormatDispatchParams*, int, cudaStream_t> format_dispatch;
  Operator<const RoutedDispatchParams*, int, cudaStream_t> routed_dispatch;

  // Loads every kernel on the current device, so that no later call does.
  cudaError_t load() const {
    const auto& [a, b, c, d, e, f] = *this;  // all members; any other number does not compile
    for (cudaError_t (*load)() : {a.load, b.load, c.load, d.load, e.load, f.load}) {
      if (const cudaError_t error = load(); error != cudaSuccess) return error;
    }
    return cudaSuccess;
  }
};

// The forms for ranks with a device each, and for ranks that share one device.
const Kernels& DirectKernels();
const Kernels& ColocatedKernels();

// The most local experts for which LaunchRouteAssign fits into shared memory.
constexpr int kMaxLocalExperts = 8192;
// The most counts (levels times local experts) for which LaunchRouteExchange fits into shared
// memory.
constexpr int kMaxRouteCounts = 16384;
// The most blocks of each of the ranks that share a device: the limit of a grid's second dimension.
constexpr int64_t kMaxColocatedBlocks = 65535;
// The most tokens of a chunk of route: one for each thread of a block.
constexpr int kMaxTokensPerRouteChunk = kThreads / 2;
#ifndef MOE_A2A_EMULATION  // The emulator has smaller blocks, and its own chunks.
static_assert(Tuning::kRouteTokensPerChunk <= kMaxTokensPerRouteChunk &&
              Tuning::kRouteManyTokensPerChunk <= kMaxTokensPerRouteChunk);
#endif

}  // namespace moe_a2a

#endif  // MOE_A2A_KERNELS_LAUNCH_H_
