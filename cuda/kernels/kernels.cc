// The table of all kernels, in the form for which this file is compiled.
#include "kernels/launch.h"
#include "kernels/load.h"

namespace moe_a2a {
namespace {

cudaError_t LoadKernels() {
  return LoadAll({LoadRoute, LoadDispatch, LoadFormatDispatch, LoadRoutedDispatch, LoadCombine});
}

constexpr Kernels kKernels = {LoadKernels,         LaunchRouteExchange, LaunchRouteAssign,
                              LaunchDispatch,      LaunchCombine,       LaunchFormatDispatch,
                              LaunchRoutedDispatch};

}  // namespace

#ifdef MOE_A2A_COLOCATED
const Kernels& ColocatedKernels() { return kKernels; }
#else
const Kernels& DirectKernels() { return kKernels; }
#endif

}  // namespace moe_a2a
