#include "variant.h"

namespace emulation {

#ifdef MOE_A2A_COLOCATED
const bool kColocated = true;
const moe_a2a::Kernels& variant_kernels() { return moe_a2a::ColocatedKernels(); }
#else
const bool kColocated = false;
const moe_a2a::Kernels& variant_kernels() { return moe_a2a::DirectKernels(); }
#endif

#ifdef MOE_A2A_EMULATION_TSAN
const bool kHasSanitizer = true;
#else
const bool kHasSanitizer = false;
#endif

}  // namespace emulation
