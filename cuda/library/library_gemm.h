// Grouped products with cuBLASLt.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "gemm/grouped_gemm.h"
#include "runtime/problem.h"

namespace moe_a2a {

// A product without an activation. Its `counter` is scratch memory.
struct LibraryGemm : GroupedGemm {
  int64_t mean_rows;  // the rows per group that the library plans for
};

// Returns how many int32 numbers a product's scratch memory has.
int64_t LibraryScratch(int64_t num_groups);

// Computes a product on the current device. The first call with new sizes chooses an algorithm.
Problem LaunchLibraryGemm(const LibraryGemm& params, int num_sms, cudaStream_t stream);

// An operand or result of all groups: each group has some of the rows, or one of the matrices.
struct GroupedArray {
  char* data;
  int64_t bytes;          // of a row, or of a matrix
  int64_t num_weights;    // matrices in `data`; -1: `data` has rows
  char* spare = nullptr;  // more matrices, counted after those of `data`
};

// The device arrays that the library reads for a product, and what they are computed from.
struct GroupArrays {
  const int32_t *starts, *sizes, *weights;  // the table of groups
  int32_t num_groups, num_k, num_n;
  GroupedArray arrays[3];  // a, b and d
  int32_t stride;          // at least num_groups
  void** pointers;         // [3, stride]
  int32_t* dimensions;     // [3, stride]: rows, k and n
  float* factors;          // [2]: 1 and 0
};

cudaError_t LoadGroupArrays();
// Launches a kernel that writes these arrays, and zeros to the rows of groups without weights.
cudaError_t LaunchGroupArrays(const GroupArrays& arrays, int num_sms, cudaStream_t stream);

}  // namespace moe_a2a
