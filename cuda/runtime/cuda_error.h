#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "runtime/problem.h"

namespace moe_a2a {

// Returns the problem of an error of the CUDA runtime. `doing` names the operation that failed.
inline Problem ProblemOf(cudaError_t error, const std::string& doing) {
  if (error == cudaSuccess) return {};
  return {doing + ": " + cudaGetErrorString(error), error == cudaErrorMemoryAllocation};
}

}  // namespace moe_a2a
