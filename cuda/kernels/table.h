// The kernels of a family, which launches choose from and loading goes through: a kernel that is not listed cannot be
// launched. Otherwise it would be loaded at its first launch, which can wait forever while a peer already waits.
//
// A family is a struct with
//   Key        what a launch chooses a kernel by; comparable
//   Kernel     the type of all its kernels
//   list(add)  calls add(key, kernel, the most dynamic shared memory that a launch asks for), a line for each kernel
#ifndef MOE_A2A_KERNELS_TABLE_H_
#define MOE_A2A_KERNELS_TABLE_H_

#include <cuda_runtime_api.h>

#include "device/ranks.cuh"

namespace moe_a2a {

inline namespace MOE_A2A_FORM {

// The key of a family of one kernel.
struct OnlyKernel {
  bool operator==(const OnlyKernel&) const { return true; }
};

// Launches the kernel of a family that `key` chooses, with `num_blocks` blocks for each rank. The error is of this launch
// alone; a key that is not listed is one.
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

// Loads all kernels of a family on the current device.
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
          cudaFuncAttributes attributes;  // Asking for them loads the kernel.
          error = cudaFuncGetAttributes(&attributes, kernel);
        }
      });
  return error;
}

}  // namespace MOE_A2A_FORM

}  // namespace moe_a2a

#endif  // MOE_A2A_KERNELS_TABLE_H_
