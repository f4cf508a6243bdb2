// The table of all kernels, for the form in which this file is compiled (kernels/launch.h).
#include "kernels/launch.h"

namespace moe_a2a {
constexpr Kernels kKernels = {{
    Launcher<RouteParams>{LoadRoute, LaunchRoute},
    Launcher<DispatchParams>{LoadDispatch, LaunchDispatch},
    Launcher<FormatDispatchParams>{LoadFormatDispatch, LaunchFormatDispatch},
    Launcher<RoutedDispatchParams>{LoadRoutedDispatch, LaunchRoutedDispatch},
    Launcher<CombineParams>{LoadCombine, LaunchCombine},
}};

#ifdef MOE_A2A_COLOCATED
const Kernels& ColocatedKernels() { return kKernels; }
#else
const Kernels& DirectKernels() { return kKernels; }
#endif

}  // namespace moe_a2a
