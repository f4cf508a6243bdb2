// The targets of products.
#ifndef MOE_A2A_FFI_GROUPED_GEMM_H_
#define MOE_A2A_FFI_GROUPED_GEMM_H_

#include <vector>

#include "ffi/targets.h"

namespace moe_a2a {

// Adds the targets of ProductCalls. XLA may capture these calls in a CUDA graph.
void AddProductTargets(std::vector<Target>& targets);

}  // namespace moe_a2a

#endif  // MOE_A2A_FFI_GROUPED_GEMM_H_
