// The targets of products.
#ifndef MOE_A2A_FFI_GROUPED_GEMM_H_
#define MOE_A2A_FFI_GROUPED_GEMM_H_

#include <cstdint>
#include <vector>

#include "ffi/targets.h"
#include "xla/ffi/api/ffi.h"

namespace moe_a2a {

// Loads all kernels of products on a device, once.
xla::ffi::Error LoadProducts(int32_t ordinal);

// Adds the targets of ProductCalls. XLA may capture these calls in a CUDA graph.
void AddProductTargets(std::vector<Target>& targets);

}  // namespace moe_a2a

#endif  // MOE_A2A_FFI_GROUPED_GEMM_H_
