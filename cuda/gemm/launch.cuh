// Launches a kernel of one or two forms.
#pragma once

#include <algorithm>
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

// Returns true if clusters take tiles in turn. With few tiles, a counter costs more time than it
// saves. It saves none if each cluster gets work at most once: a group has at most as many tiles of
// rows as rows.
template <typename F, typename Gemm>
bool TakesInTurn(const Gemm& gemm, const GemmParams& p) {
  const int64_t columns = F::kIsTurned ? ceil_div(p.m, F::kResultM) : ceil_div(p.n, F::kResultN);
  const int64_t rows = std::max<int64_t>(gemm.num_groups, gemm.num_rows / kBaseRows);
  return F::kRows != Axis::kK &&
         (gemm.num_rows * ceil_div(columns, F::kBlocks) <= gemm.num_sms / F::kBlocks ||
          rows * columns <= int64_t{Tuning::kGemmTilesInTurn} * gemm.num_sms);
}

template <typename Gemm>
void SetGroups(const Gemm& gemm, int32_t* next_tile, GemmParams* p) {
  p->starts = gemm.starts;
  p->sizes = gemm.sizes;
  p->weights = gemm.weights;
  p->num_groups = gemm.num_groups;
  p->first_spare = static_cast<int32_t>(gemm.num_weights);
  p->next_tile = next_tile;
}

// Prepares all kernels that Launch() may launch with these forms.
template <typename Kernels, typename F, typename... Few>
cudaError_t Load(Types<F, Few...>) {
  if constexpr (sizeof...(Few) > 0) {
    if (const cudaError_t error = Load<Kernels>(Types<Few...>{}); error != cudaSuccess)
      return error;
  }
  return cudaFuncSetAttribute(grouped_gemm<Kernels, F, Few...>,
                              cudaFuncAttributeMaxDynamicSharedMemorySize,
                              kSharedBytes<Kernels, F, Few...>);
}

// Launches the kernel of F, or of F and its form for few rows.
template <typename Kernels, typename Gemm, typename F, typename... Few>
Problem Launch(const Gemm& gemm, cudaStream_t stream, Types<F, Few...>) {
  if constexpr (sizeof...(Few) > 0) {
    // If groups have at most half a tile of rows on average, the kernel need not choose.
    if (((2 * gemm.num_rows <= int64_t{Few::kTileN} * gemm.num_groups) && ...)) {
      return Launch<Kernels>(gemm, stream, Types<Few...>{});
    }
  }
  ParamsOf<typename Kernels::Params, F, Few...> params = {};
  MOE_A2A_TRY(MakeParams<F>(gemm, &params.of[0]));
  bool is_in_turn = TakesInTurn<F>(gemm, params.of[0]);
  if constexpr (sizeof...(Few) > 0) {
    MOE_A2A_TRY(MakeParams<Few...>(gemm, &params.of[1]));
    // The form for few rows decides, because it has at least as many tiles.
    is_in_turn = TakesInTurn<Few...>(gemm, params.of[1]);
  }
  for (GemmParams& p : params.of) SetGroups(gemm, is_in_turn ? nullptr : gemm.counter, &p);
  if (!is_in_turn) {
    MOE_A2A_TRY(ProblemOf(cudaMemsetAsync(gemm.counter, 0, sizeof(int32_t), stream)));
  }
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {F::kBlocks, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = std::max(1, gemm.num_sms / F::kBlocks) * F::kBlocks;
  config.blockDim = kGemmThreads;
  config.dynamicSmemBytes = kSharedBytes<Kernels, F, Few...>;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return ProblemOf(cudaLaunchKernelEx(&config, grouped_gemm<Kernels, F, Few...>, params));
}

}  // namespace moe_a2a::gemm
