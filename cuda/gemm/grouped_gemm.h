// Launches grouped GEMMs.
#ifndef MOE_A2A_GEMM_GROUPED_GEMM_H_
#define MOE_A2A_GEMM_GROUPED_GEMM_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "params.h"
#include "runtime/problem.h"

namespace moe_a2a {

enum class GroupedProduct : int32_t {
  kForward,         // a: rows [C, K], b: weights [L, K, N], d: [C, N]
  kForwardFew,      // the same product, for groups of few rows
  kTransposed,      // a: rows [C, N], b: weights [L, K, N], d: [C, K]
  kWeightGradient,  // a: rows [C, K], b: rows [C, N], d: [L, K, N]
};

struct GroupedGemm {
  GroupedProduct product;
  ElementType type;  // kBFloat16 or kFloat16
  const void *a, *b;
  void* d;
  int64_t num_rows, num_weights, k, n;  // C, L, K, N
  // For each group: its first row, its number of rows, and its matrix of weights. If the index of
  // the matrix is negative, the results are zeros; kWeightGradient has none. Device memory.
  const int32_t *starts, *sizes, *weights;
  int32_t num_groups;
  int32_t* counter;  // device memory; the launch sets it to zero
  int num_sms;       // the most blocks to launch
};

// Loads the kernels on the current device, so that no later call does.
cudaError_t LoadGroupedGemm();

// Returns why the kernels cannot compute every product of this many rows and groups with weights of
// k by n elements, or an empty string. Does not check for compute capability 9.0, which they need.
Problem WhyNotGroupedGemm(int64_t num_rows, int64_t num_groups, int64_t k, int64_t n);

// Launches only: no allocation, no synchronization.
Problem LaunchGroupedGemm(const GroupedGemm& gemm, cudaStream_t stream);

}  // namespace moe_a2a

#endif  // MOE_A2A_GEMM_GROUPED_GEMM_H_
