// The table of all kernels, in the form for which this file is compiled.
#include "kernels/launch.h"

namespace moe_a2a {
namespace {

constexpr Kernels kKernels = {
    {LoadRouteExchange, LaunchRouteExchange},
    {LoadRouteAssign, LaunchRouteAssign},
    {LoadDispatch, LaunchDispatch},
    {LoadCombine, LaunchCombine},
#ifndef MOE_A2A_NETWORK
    {LoadFormatDispatch, LaunchFormatDispatch},
    {LoadRoutedDispatch, LaunchRoutedDispatch},
#endif
};

}  // namespace

#if defined(MOE_A2A_NETWORK)
const Kernels& NetworkKernels() { return kKernels; }
#elif defined(MOE_A2A_COLOCATED)
const Kernels& ColocatedKernels() { return kKernels; }
#else
const Kernels& DirectKernels() { return kKernels; }
#endif

}  // namespace moe_a2a
