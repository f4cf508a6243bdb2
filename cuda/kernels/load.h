// Loading of all kernels on the current device, for those who know nothing of their parameters.
#ifndef MOE_A2A_KERNELS_LOAD_H_
#define MOE_A2A_KERNELS_LOAD_H_

#include <cuda_runtime_api.h>

#include <initializer_list>

namespace moe_a2a {

cudaError_t LoadRoute();
cudaError_t LoadDispatch();
cudaError_t LoadFormatDispatch();
cudaError_t LoadRoutedDispatch();
cudaError_t LoadCombine();

inline cudaError_t LoadAll(std::initializer_list<cudaError_t (*)()> loads) {
  for (cudaError_t (*load)() : loads) {
    if (const cudaError_t error = load(); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// Loads every kernel and sets its limits, so that no call does so later.
inline cudaError_t LoadKernels() {
  return LoadAll({LoadRoute, LoadDispatch, LoadFormatDispatch, LoadRoutedDispatch, LoadCombine});
}

}  // namespace moe_a2a

#endif  // MOE_A2A_KERNELS_LOAD_H_
