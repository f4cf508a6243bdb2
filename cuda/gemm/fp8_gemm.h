// Launches grouped GEMMs of FP8 numbers with blockwise scales.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "element.h"
#include "runtime/problem.h"

namespace moe_a2a {

// A scale is for this many numbers of a row, or for a block of weights with this side.
constexpr int kFp8Block = 128;

// Multiplies rows [C, K] by weights [L, N, K]. The result d is [C, N].
struct Fp8Gemm {
  ElementType type;             // of d: kBFloat16 or kFloat32
  const void *rows, *matrices;  // float8_e4m3fn, K contiguous; K is a multiple of kFp8Block
  const float* row_scales;      // row c and block i of K: at c * row_stride + i * block_stride
  int64_t row_stride, block_stride;
  const float* matrix_scales;  // [L + num_spare, ceil(N / kFp8Block), K / kFp8Block]
  void* d;
  int64_t num_rows, num_weights, k, n;      // C, L, K, N
  const int32_t *starts, *sizes, *weights;  // as in GroupedGemm
  int32_t num_groups;
  int32_t* counter;  // device memory, which the launch may overwrite
  int num_sms;       // the most blocks to launch, but at least one cluster
  // More matrices [num_spare, N, K], or null. Matrix indices count `matrices` and then these.
  const void* spare = nullptr;
  int64_t num_spare = 0;
};

// Returns a problem if the kernels cannot compute all products of these sizes. Does not check for
// compute capability 9.0.
Problem WhyNotFp8Gemm(int64_t num_rows, int64_t num_groups, int64_t k, int64_t n);

cudaError_t LoadFp8Gemm();
Problem LaunchFp8Gemm(const Fp8Gemm& gemm, cudaStream_t stream);

}  // namespace moe_a2a
