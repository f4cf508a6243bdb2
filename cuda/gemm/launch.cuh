// Launches one form of the kernel.
#pragma once

#include <algorithm>

#include "gemm/grouped_gemm.cuh"
#include "gemm/grouped_gemm.h"
#include "gemm/tensor_map.h"

namespace moe_a2a::gemm {

inline Problem ProblemOf(cudaError_t error) {
  return error == cudaSuccess ? "" : cudaGetErrorString(error);
}

template <typename F>
Problem MakeParams(const GroupedGemm& gemm, GemmParams* p) {
  const int bytes = element_bytes(gemm.type);
  const auto rows_of = [&](const void* data, int64_t columns) {
    // Nothing is loaded from an array without rows, but its map needs an address.
    return TensorMap{bytes, gemm.num_rows == 0 ? gemm.d : data, columns, true, 0, 0, 0, 0};
  };
  const auto weights_of = [&](const void* data, int64_t num) {
    return TensorMap{bytes, data, gemm.n, false, gemm.k, num, 0, 0};
  };
  const int32_t k = static_cast<int32_t>(gemm.k), n = static_cast<int32_t>(gemm.n);
  const int32_t results = F::kIsGated ? n / 2 : n;
  TensorMap a, b, d;
  switch (gemm.product) {
    case GroupedProduct::kForward:
      a = rows_of(gemm.a, k), b = weights_of(gemm.b, gemm.num_weights),
      d = rows_of(gemm.d, results);
      p->m = 0, p->n = results, p->k = k;
      break;
    case GroupedProduct::kForwardFew:
      a = weights_of(gemm.b, gemm.num_weights), b = rows_of(gemm.a, k),
      d = rows_of(gemm.d, results);
      p->m = results, p->n = 0, p->k = k;
      break;
    case GroupedProduct::kTransposed:
      a = rows_of(gemm.a, n), b = weights_of(gemm.b, gemm.num_weights), d = rows_of(gemm.d, k);
      p->m = 0, p->n = k, p->k = n;
      break;
    case GroupedProduct::kWeightGradient:
      a = rows_of(gemm.a, k), b = rows_of(gemm.b, n), d = weights_of(gemm.d, gemm.num_weights);
      if (F::kAdds) d.element_bytes = sizeof(float);
      p->m = k, p->n = n, p->k = 0;
      break;
  }
  const auto encode = [](TensorMap& map, int columns, int rows, CUtensorMap* encoded) {
    map.box_columns = columns, map.box_rows = rows;
    return EncodeTensorMap(map, encoded);
  };
  Problem problem = encode(a, kBoxElements, kBoxElements, &p->a);
  if (problem.empty()) problem = encode(b, kBoxElements, F::kRowsOfBoxB, &p->b);
  if constexpr (F::kVaries) {
    if (problem.empty()) problem = encode(b, kBoxElements, F::kRowsOfLastBoxB, &p->last_b);
  }
  if (problem.empty()) problem = encode(d, F::kStoreColumns, F::kStoreRows, &p->d);
  if (problem.empty() && F::kAdds) {
    problem = encode(d, F::kStoreColumns, kBoxElements, &p->read[0]);
  }
  if (problem.empty() && gemm.num_spare > 0) {
    TensorMap spare = weights_of(gemm.spare, gemm.num_spare);
    problem =
        encode(spare, kBoxElements, F::kWeightsAreA ? kBoxElements : F::kRowsOfBoxB, &p->spare);
  }
  if (const ActivatedProduct* activated = gemm.activated; activated != nullptr) {
    const int32_t columns = static_cast<int32_t>(d.columns), halves = activated->is_gated ? 2 : 1;
    const auto encode_half = [&](void* pre, int half, int box_columns, int box_rows,
                                 CUtensorMap* encoded) {
      if (!problem.empty()) return;
      TensorMap map = rows_of(static_cast<char*>(pre) + half * columns * bytes, columns);
      map.row_elements = columns * halves;
      problem = encode(map, box_columns, box_rows, encoded);
    };
    void* stored = F::kDerives ? activated->d_pre : activated->pre;
    for (int half = 0; half < halves && stored != nullptr; ++half) {
      encode_half(stored, half, F::kStoreColumns, F::kStoreRows, &p->pre[half]);
      if (!F::kDerives) continue;
      encode_half(activated->pre, half, kBoxElements, kBoxElements, &p->read[half]);
    }
    p->activation = {
        activated->function, activated->alpha,        activated->limit, activated->row_weights,
        activated->bias,     activated->partial_dots, columns,          stored != nullptr,
        gemm.num_rows};
  }
  p->starts = gemm.starts;
  p->sizes = gemm.sizes;
  p->weights = gemm.weights;
  p->num_groups = gemm.num_groups;
  p->first_spare = static_cast<int32_t>(gemm.num_weights);
  p->next_tile = gemm.counter;
  return problem;
}

template <typename T, typename F>
cudaError_t Load() {
  return cudaFuncSetAttribute(grouped_gemm<T, F>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              sizeof(GemmShared<F>));
}

template <typename F, typename Shared, typename Params>
Problem LaunchForm(void (*kernel)(Params), Params params, int num_sms, cudaStream_t stream) {
  // With few rows and few tiles, a counter costs more time than it saves.
  const int64_t columns_of_tiles = ceil_div(params.m, F::kResultM);
  if (F::kRows == Axis::kN &&
      params.num_groups * columns_of_tiles <= int64_t{Tuning::kGemmTilesInTurn} * num_sms) {
    params.next_tile = nullptr;
  } else {
    Problem problem = ProblemOf(cudaMemsetAsync(params.next_tile, 0, sizeof(int32_t), stream));
    if (!problem.empty()) return problem;
  }
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {F::kBlocks, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = std::max(1, num_sms / F::kBlocks) * F::kBlocks;
  config.blockDim = kGemmThreads;
  config.dynamicSmemBytes = sizeof(Shared);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return ProblemOf(cudaLaunchKernelEx(&config, kernel, params));
}

template <typename T, typename F>
Problem Launch(const GroupedGemm& gemm, cudaStream_t stream) {
  GemmParams params = {};
  Problem problem = MakeParams<F>(gemm, &params);
  if (!problem.empty()) return problem;
  return LaunchForm<F, GemmShared<F>>(grouped_gemm<T, F>, params, gemm.num_sms, stream);
}

}  // namespace moe_a2a::gemm
