// A launch chooses its kernel from the table of a kernel family. All kernels are loaded when a
// workspace opens, because a launch that loads a kernel could block forever if a peer already waits
// for this launch.
//
// A family is a struct with
//
//   Key        identifies a kernel; comparable
//   Kernel     the type of all kernels
//   list(add)  calls add(key, kernel, shared_bytes) for each kernel; shared_bytes is the most
//              dynamic shared memory that a launch of the kernel requests
#pragma once

#include <cuda_runtime_api.h>

#include "device/ranks.cuh"

namespace moe_a2a {

inline namespace MOE_A2A_FORM {

// Launches the kernel of `key`. Returns only errors of this launch.
template <typename Family, typename Params>
cudaError_t LaunchListed(const typename Family::Key& key, const Params* ranks, int num_blocks,
                         size_t shared_bytes, cudaStream_t stream) {
  typename Family::Kernel chosen = nullptr;
  Family::list([&](const typename Family::Key& of, typename Family::Kernel kernel, size_t) {
    if (of == key) chosen = kernel;
  });
  if (chosen == nullptr) return cudaErrorInvalidValue;
  return Launch(chosen, ranks, num_blocks, kThreads, shared_bytes, stream);
}

template <typename Family>
cudaError_t LoadListed() {
  cudaError_t error = cudaSuccess;
  Family::list(
      [&](const typename Family::Key&, typename Family::Kernel kernel, size_t shared_bytes) {
        if (error != cudaSuccess) return;
        if (shared_bytes > 0) {
          error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       static_cast<int>(shared_bytes));
        } else {
          cudaFuncAttributes attributes;  // This request loads the kernel.
          error = cudaFuncGetAttributes(&attributes, kernel);
        }
      });
  return error;
}

}  // namespace MOE_A2A_FORM

}  // namespace moe_a2a
