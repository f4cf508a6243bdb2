// Launches the kernels between two FP8 matrix products (gemm/act_encode.cu).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "element.h"
#include "gemm/activation.h"
#include "runtime/problem.h"

namespace moe_a2a {

// Arrays of B batch elements of C rows. P = I; for a gated activation P = 2 I: gate, then up.
struct ActEncode {
  ElementType type;     // of the product: kBFloat16 or kFloat32
  const void* product;  // [B, C, P]
  // [B, C]; a weight of 0 gives zeros. Null: encodes the product itself, without activation.
  const float* row_weights;
  const int32_t *starts, *sizes;  // [B, L]: each group's first row and number of rows
  uint8_t* values;                // [B, C, I], float8_e4m3fn
  uint32_t* scales;               // [B, C, I / 128], bits of float32
  int64_t num_rows;               // B * C
  int32_t batch, num_groups;      // B, L: at least 1
  int32_t columns;                // I, a multiple of 128
  Activation function;
  bool is_gated;
  float alpha, limit;  // of kClampedSwiglu
};

// The arrays of act_grad. `values` [B, C, P] and `scales` [B, C, P / 128] encode the gradient of
// the product. `row_weights` is not null. A row whose weight is 0 has zeros, except in d_weights.
struct ActGrad : ActEncode {
  const void* ct;    // [B, C, I]: the gradient of the weighted activations
  void* d_pre;       // [B, C, P]: the gradient of the product
  void* h;           // [B, C, I]: weighted activations; may be the same memory as ct
  float* d_weights;  // [B, C]: the dots of rows of ct and of activations
};

cudaError_t LoadActEncode();
// These functions launch at most `num_sms` blocks, one per multiprocessor.
Problem LaunchActEncode(const ActEncode& call, int num_sms, cudaStream_t stream);
Problem LaunchActGrad(const ActGrad& call, int num_sms, cudaStream_t stream);

}  // namespace moe_a2a
