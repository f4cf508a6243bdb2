#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "runtime/problem.h"

namespace moe_a2a {

// Converts an error of the CUDA runtime to a problem. `doing` says which operation failed.
inline Problem ProblemOf(cudaError_t error, const std::string& doing) {
  if (error == cudaSuccess) return {};
  return {doing + ": " + cudaGetErrorString(error), error == cudaErrorMemoryAllocation};
}

}  // namespace moe_a2a
