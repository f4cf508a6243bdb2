// Loading of kernels on the current device, file by file.
#ifndef MOE_A2A_KERNELS_LOAD_H_
#define MOE_A2A_KERNELS_LOAD_H_

#include <cuda_runtime_api.h>

#include <initializer_list>

#include "kernels/launch.h"

namespace moe_a2a {

inline namespace MOE_A2A_FORM {

cudaError_t LoadRoute();
cudaError_t LoadDispatch();
cudaError_t LoadFormatDispatch();
cudaError_t LoadRoutedDispatch();
cudaError_t LoadCombine();

}  // namespace MOE_A2A_FORM

inline cudaError_t LoadAll(std::initializer_list<cudaError_t (*)()> loads) {
  for (cudaError_t (*load)() : loads) {
    if (const cudaError_t error = load(); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace moe_a2a

#endif  // MOE_A2A_KERNELS_LOAD_H_
