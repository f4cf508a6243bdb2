// Launches the quantization of weights to BlockwiseFp8.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "element.h"
#include "runtime/problem.h"

namespace moe_a2a {

// L matrices of weights. K and N are multiples of 128; there are at most 2^31 - 1 squares.
struct EncodeSquares {
  ElementType type;     // of the weights: kBFloat16 or kFloat32
  const void* weights;  // [L, K, N]
  uint8_t* turned;      // [L, N, K], float8_e4m3fn: transposed; null to leave it out
  uint8_t* plain;       // [L, K, N], the same numbers; null to leave it out
  uint32_t* scales;     // [L, N / 128, K / 128], bits of float32
  int64_t num_matrices, k, n;
};

cudaError_t LoadEncodeSquares();
Problem LaunchEncodeSquares(const EncodeSquares& call, cudaStream_t stream);

}  // namespace moe_a2a
