// Launches grouped GEMMs.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string_view>

#include "gemm/activation.h"
#include "params.h"
#include "runtime/problem.h"
#include "tuning.h"

namespace moe_a2a {

// The only compute capability that the kernels run on.
constexpr const char* kGemmCapability = "9.0";

enum class GroupedProduct : int32_t {
  kForward,         // a: rows [C, K], b: weights [L, K, N], d: [C, N]
  kTransposed,      // a: rows [C, N], b: weights [L, K, N], d: [C, K]
  kWeightGradient,  // a: rows [C, K], b: rows [C, N], d: [L, K, N]
};

// The additional operands and results of a product with an activation. P is I. For a gated
// activation, P is 2 I, and the gate columns come first.
//
// kForward computes d [C, I] = row_weights * function(a b + bias), with weights [L, K, P].
// kTransposed has weights [L, I, N] and g = a b^T. It computes d [C, I] = row_weights *
// function(pre), and d_pre [C, P], the gradient of pre. partial_dots [ceil(I / kDotColumns), C] are
// the dots of g and function(pre) over kDotColumns columns each.
struct ActivatedProduct {
  bool is_gated;
  Activation function;
  float alpha, limit;        // of kClampedSwiglu
  const float* row_weights;  // [C]
  const void* bias;          // [L + num_spare, P], or null
  void* pre;                 // [C, P]; kForward stores it unless it is null
  void* d_pre;
  float* partial_dots;
};
constexpr int kDotColumns = Tuning::kTransposed.n;

struct GroupedGemm {
  GroupedProduct product;
  ElementType type;  // kBFloat16 or kFloat16
  const void *a, *b;
  void* d;
  int64_t num_rows, num_weights, k, n;  // C, L, K, N
  // [groups] in device memory: each group's first row, number of rows, and weight index. With a
  // negative index, the results are zeros; kWeightGradient writes no results.
  const int32_t *starts, *sizes, *weights;
  int32_t num_groups;
  int32_t* counter;   // device memory, which the launch may overwrite
  int num_sms;        // the most blocks to launch, but at least one cluster
  bool adds = false;  // kWeightGradient: adds the products to d, in float32
  const ActivatedProduct* activated = nullptr;
  // More matrices [num_spare, K, N], or null. Indices count b and then these.
  const void* spare = nullptr;
  int64_t num_spare = 0;
};

cudaError_t LoadGroupedGemm();
// Returns a problem if the kernels cannot compute all products of these sizes. Does not check for
// compute capability 9.0. `type` is the dtype's name in Python.
Problem WhyNotGroupedGemm(std::string_view type, int64_t num_rows, int64_t num_groups, int64_t k,
                          int64_t n);

Problem LaunchGroupedGemm(const GroupedGemm& gemm, cudaStream_t stream);

}  // namespace moe_a2a
