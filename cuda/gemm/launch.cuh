// Launches a kernel of one or two forms.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <utility>

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
    // An array without rows may have no address, but a tensor map needs one.
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
  if (F::kIsTurned) std::swap(a, b), std::swap(p->m, p->n);
  const auto encode = [](TensorMap& map, int columns, int rows, CUtensorMap* encoded) {
    map.box_columns = columns, map.box_rows = rows;
    return EncodeTensorMap(map, encoded);
  };
  MOE_A2A_TRY(encode(a, kBoxElements, kBoxElements, &p->a));
  MOE_A2A_TRY(encode(b, kBoxElements, F::kRowsOfBoxB, &p->b));
  if (F::kVaries) MOE_A2A_TRY(encode(b, kBoxElements, F::kRowsOfLastBoxB, &p->last_b));
  MOE_A2A_TRY(encode(d, F::kStoreColumns, F::kStoreRows, &p->d));
  if (gemm.num_spare > 0) {
    TensorMap spare = weights_of(gemm.spare, gemm.num_spare);
    constexpr int kRows = F::kWeightsAreA ? kBoxElements : F::kRowsOfBoxB;
    MOE_A2A_TRY(encode(spare, kBoxElements, kRows, &p->spare));
  }
  if (const ActivatedProduct* activated = gemm.activated; activated != nullptr) {
    const int32_t columns = static_cast<int32_t>(d.columns), halves = activated->is_gated ? 2 : 1;
    const auto encode_half = [&](void* pre, int half, CUtensorMap* encoded) {
      TensorMap map = rows_of(static_cast<char*>(pre) + half * columns * bytes, columns);
      map.row_elements = columns * halves;
      return encode(map, F::kStoreColumns, F::kStoreRows, encoded);
    };
    void* stored = F::kDerives ? activated->d_pre : activated->pre;
    for (int half = 0; half < halves && stored != nullptr; ++half) {
      MOE_A2A_TRY(encode_half(stored, half, &p->pre[half]));
      if (F::kDerives) MOE_A2A_TRY(encode_half(activated->pre, half, &p->read[half]));
    }
    p->activation = {
        activated->function, activated->alpha,        activated->limit, activated->row_weights,
        activated->bias,     activated->partial_dots, columns,          stored != nullptr,
        gemm.num_rows};
  }
  return {};
}

// Prepares a launch: copies the groups to the parameters of each form, and sets the counter of
// tiles to 0. F is the first form.
template <typename F, typename Gemm>
Problem SetGroups(const Gemm& gemm, std::initializer_list<GemmParams*> forms, cudaStream_t stream) {
  // With few tiles, a counter costs more time than it saves.
  const int32_t columns = F::kIsTurned ? (*forms.begin())->m : (*forms.begin())->n;
  const int64_t columns_of_tiles = ceil_div(columns, F::kIsTurned ? F::kResultM : F::kResultN),
                rows_of_tiles = std::max<int64_t>(gemm.num_groups, gemm.num_rows / RowTiles::kBase);
  const bool is_in_turn =
      F::kRows != Axis::kK &&
      rows_of_tiles * columns_of_tiles <= int64_t{Tuning::kGemmTilesInTurn} * gemm.num_sms;
  for (GemmParams* params : forms) {
    params->starts = gemm.starts;
    params->sizes = gemm.sizes;
    params->weights = gemm.weights;
    params->num_groups = gemm.num_groups;
    params->first_spare = static_cast<int32_t>(gemm.num_weights);
    params->next_tile = is_in_turn ? nullptr : gemm.counter;
  }
  if (is_in_turn) return {};
  return ProblemOf(cudaMemsetAsync(gemm.counter, 0, sizeof(int32_t), stream));
}

template <typename Params>
Problem LaunchKernel(void (*kernel)(Params), const Params& params, unsigned blocks, size_t bytes,
                     int num_sms, cudaStream_t stream) {
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {blocks, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = std::max(1u, num_sms / blocks) * blocks;
  config.blockDim = kGemmThreads;
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return ProblemOf(cudaLaunchKernelEx(&config, kernel, params));
}

template <typename T, typename... Forms>
cudaError_t Load(Types<Forms...>) {
  return cudaFuncSetAttribute(grouped_gemm<T, Forms...>,
                              cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes<Forms...>);
}

template <typename T, typename F, typename... Few>
Problem Launch(const GroupedGemm& gemm, cudaStream_t stream, Types<F, Few...>) {
  ParamsOf<GemmParams, F, Few...> params = {};
  GemmParams* const last = &params.of[sizeof...(Few)];
  MOE_A2A_TRY(MakeParams<F>(gemm, params.of));
  if constexpr (sizeof...(Few) > 0) MOE_A2A_TRY(MakeParams<Few...>(gemm, last));
  MOE_A2A_TRY(SetGroups<F>(gemm, {params.of, last}, stream));
  return LaunchKernel(grouped_gemm<T, F, Few...>, params, F::kBlocks, kSharedBytes<F, Few...>,
                      gemm.num_sms, stream);
}

}  // namespace moe_a2a::gemm
