// Launches one form of the FP8 kernel.
#pragma once

#include "gemm/fp8_gemm.cuh"
#include "gemm/launch.cuh"

namespace moe_a2a::gemm {

template <typename T, typename F>
cudaError_t LoadFp8() {
  return cudaFuncSetAttribute(fp8_gemm<T, F>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              sizeof(Fp8Shared<F>));
}

template <typename T, typename F>
Problem LaunchFp8(const Fp8Gemm& gemm, cudaStream_t stream) {
  constexpr int kRowsOfBox = F::kIsTurned ? F::kRowsOfBoxB : kBoxElements;
  constexpr int kColumnsOfBox = F::kIsTurned ? kBoxElements : F::kRowsOfBoxB;
  const TensorMap rows = {1, gemm.rows, gemm.k, true, 0, 0, kFp8Block, kRowsOfBox};
  const auto matrices_of = [&](const void* data, int64_t num) {
    return TensorMap{1, data, gemm.k, false, gemm.n, num, kFp8Block, kColumnsOfBox};
  };
  const TensorMap matrices = matrices_of(gemm.matrices, gemm.num_weights);
  constexpr bool kIsFloat = std::is_same_v<T, float>;
  constexpr int kAlongM = 16, kAlongN = kIsFloat       ? FloatWriter<F>::kColumns
                                        : F::kIsTurned ? F::kStoreRows
                                                       : F::kStoreColumns;
  TensorMap d = {Element<T>::kBytes, gemm.d, gemm.n, true, 0, 0, kAlongN, kAlongM};
  if (F::kIsTurned) std::swap(d.box_columns, d.box_rows);

  Fp8Params p = {};
  Problem problem = EncodeTensorMap(F::kIsTurned ? matrices : rows, &p.a);
  if (problem.empty()) problem = EncodeTensorMap(F::kIsTurned ? rows : matrices, &p.b);
  if (problem.empty()) problem = EncodeTensorMap(d, &p.d);
  if (problem.empty() && gemm.num_spare > 0) {
    problem = EncodeTensorMap(matrices_of(gemm.spare, gemm.num_spare), &p.spare);
  }
  if (!problem.empty()) return problem;
  (F::kIsTurned ? p.m : p.n) = static_cast<int32_t>(gemm.n);
  p.k = static_cast<int32_t>(gemm.k);
  p.starts = gemm.starts;
  p.sizes = gemm.sizes;
  p.weights = gemm.weights;
  p.num_groups = gemm.num_groups;
  p.first_spare = static_cast<int32_t>(gemm.num_weights);
  p.next_tile = gemm.counter;
  p.row_scales = gemm.row_scales;
  p.matrix_scales = gemm.matrix_scales;
  p.row_stride = static_cast<uint32_t>(gemm.row_stride);
  p.block_stride = static_cast<uint32_t>(gemm.block_stride);
  return LaunchForm<F, Fp8Shared<F>>(fp8_gemm<T, F>, p, gemm.num_sms, stream);
}

}  // namespace moe_a2a::gemm
