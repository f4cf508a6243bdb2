// Converts problems to errors of XLA.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "runtime/problem.h"
#include "xla/ffi/api/ffi.h"

namespace moe_a2a {

namespace ffi = xla::ffi;

inline ffi::Error Invalid(const std::string& message) {
  return ffi::Error::InvalidArgument("jax_moe_a2a: " + message);
}

inline ffi::Error Internal(const std::string& message) {
  return ffi::Error::Internal("jax_moe_a2a: " + message);
}

// A lack of memory has the same error code as in XLA.
inline ffi::Error ToError(const Problem& problem) {
  if (problem.empty()) return ffi::Error::Success();
  if (!problem.lacks_memory) return Internal(problem);
  return ffi::Error(ffi::ErrorCode::kResourceExhausted, "jax_moe_a2a: " + problem);
}

inline ffi::Error ToError(cudaError_t error) {
  if (error == cudaSuccess) return ffi::Error::Success();
  return ToError(Problem(std::string("launching a kernel: ") + cudaGetErrorString(error),
                         error == cudaErrorMemoryAllocation));
}

}  // namespace moe_a2a
