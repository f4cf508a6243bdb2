// group_arrays: writes the arrays that cuBLASLt reads for a grouped product.
//
// Holds afterwards: the arrays have each group's sizes, and pointers to its operands and its
// result. A group without weights has size 0 there, and the rows of its result are zeros.
//
// Launch: any number of blocks. The first block writes the arrays. All blocks write the zeros.
#include "library/library_gemm.h"

namespace moe_a2a {
namespace {

constexpr int kArrayThreads = 256;

__device__ char* element_of(const GroupedArray& array, int32_t start, int32_t weights) {
  if (array.num_weights < 0) return array.data + start * array.bytes;
  const int64_t index = max(weights, 0), spare = index - array.num_weights;
  return spare < 0 ? array.data + index * array.bytes : array.spare + spare * array.bytes;
}

__global__ void __launch_bounds__(kArrayThreads) group_arrays_kernel(const GroupArrays p) {
  if (blockIdx.x == 0) {
    if (threadIdx.x < 2) p.factors[threadIdx.x] = threadIdx.x == 0 ? 1.0f : 0.0f;
    for (int g = threadIdx.x; g < p.num_groups; g += kArrayThreads) {
      const int32_t weights = p.weights[g];
      const int32_t sizes[] = {weights < 0 ? 0 : p.sizes[g], p.num_k, p.num_n};
      for (int i = 0; i < 3; ++i) {
        p.dimensions[i * p.stride + g] = sizes[i];
        p.pointers[i * p.stride + g] = element_of(p.arrays[i], p.starts[g], weights);
      }
    }
  }
  const GroupedArray& d = p.arrays[2];
  for (int g = 0; g < p.num_groups; ++g) {
    if (p.weights[g] >= 0) continue;
    auto* const zeros = reinterpret_cast<uint4*>(element_of(d, p.starts[g], 0));
    const int64_t num = p.sizes[g] * d.bytes / static_cast<int64_t>(sizeof(uint4));
    for (int64_t i = int64_t{blockIdx.x} * kArrayThreads + threadIdx.x; i < num;
         i += int64_t{gridDim.x} * kArrayThreads) {
      zeros[i] = {};
    }
  }
}

}  // namespace

cudaError_t LoadGroupArrays() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, group_arrays_kernel);
}

cudaError_t LaunchGroupArrays(const GroupArrays& arrays, int num_sms, cudaStream_t stream) {
  GroupArrays params = arrays;
  void* arguments[] = {&params};
  return cudaLaunchKernel(reinterpret_cast<const void*>(group_arrays_kernel), dim3(num_sms),
                          dim3(kArrayThreads), arguments, 0, stream);
}

}  // namespace moe_a2a
