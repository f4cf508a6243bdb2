// A table of the kernels of a family, from which launches choose. All kernels are loaded when a
// workspace opens, because a launch that loads a kernel could block forever if a peer already waits
// for this launch.
//
// A family is a struct with
//
//   Key        what a launch chooses a kernel by; comparable
//   Kernel     the type of all its kernels
//   list(add)  calls add(key, kernel, shared_bytes) for each kernel; shared_bytes is the most
//              dynamic shared memory that a launch of the kernel requests
#pragma once

#include <cuda_runtime_api.h>

#include "device/ranks.cuh"

namespace moe_a2a {

inline namespace MOE_A2A_FORM {

// The key of a family of one kernel.
struct OnlyKernel {
  bool operator==(const OnlyKernel&) const { return true; }
};

// Launches the kernel of `key`. Returns the error of this launch only.
template <typename Family, typename Params, typename... More>
cudaError_t LaunchListed(const typename Family::Key& key, const Params* ranks, int num_blocks,
                         int num_threads, size_t shared_bytes, cudaStream_t stream, More... more) {
  typename Family::Kernel chosen = nullptr;
  Family::list([&](const typename Family::Key& of, typename Family::Kernel kernel, size_t) {
    if (of == key) chosen = kernel;
  });
  if (chosen == nullptr) return cudaErrorInvalidValue;
  return Launch(chosen, ranks, num_blocks, num_threads, shared_bytes, stream, more...);
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
