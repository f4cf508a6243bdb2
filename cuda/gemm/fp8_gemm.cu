#include "gemm/fp8_gemm.h"

#include "gemm/fp8_gemm.cuh"
#include "gemm/launch.cuh"

namespace moe_a2a {
namespace gemm {
namespace {

template <typename F>
Problem MakeFp8Params(const Fp8Gemm& gemm, int bytes, Fp8Params* p) {
  constexpr int kRowsOfBox = F::kIsTurned ? F::kRowsOfBoxB : kBoxElements;
  constexpr int kColumnsOfBox = F::kIsTurned ? kBoxElements : F::kRowsOfBoxB;
  const TensorMap rows = {1, gemm.rows, gemm.k, true, 0, 0, kFp8Block, kRowsOfBox};
  const auto matrices_of = [&](const void* data, int64_t num) {
    return TensorMap{1, data, gemm.k, false, gemm.n, num, kFp8Block, kColumnsOfBox};
  };
  const TensorMap matrices = matrices_of(gemm.matrices, gemm.num_weights);
  const TensorMap d = {bytes, gemm.d, gemm.n, true, 0, 0, 128 / bytes, F::kStoreRows};

  MOE_A2A_TRY(EncodeTensorMap(F::kIsTurned ? matrices : rows, &p->a));
  MOE_A2A_TRY(EncodeTensorMap(F::kIsTurned ? rows : matrices, &p->b));
  MOE_A2A_TRY(EncodeTensorMap(d, &p->d));
  if (gemm.num_spare > 0) {
    MOE_A2A_TRY(EncodeTensorMap(matrices_of(gemm.spare, gemm.num_spare), &p->spare));
  }
  (F::kIsTurned ? p->m : p->n) = static_cast<int32_t>(gemm.n);
  p->k = static_cast<int32_t>(gemm.k);
  p->row_scales = gemm.row_scales;
  p->matrix_scales = gemm.matrix_scales;
  p->row_stride = static_cast<uint32_t>(gemm.row_stride);
  p->block_stride = static_cast<uint32_t>(gemm.block_stride);
  return {};
}

template <bool kWholeTurns>
using Fp8Many = Fp8Form<Axis::kM, 128, 192, 2, 4, kWholeTurns>;
using Fp8Few = Fp8Form<Axis::kN, 256, 64, 1, 4>;

template <typename T, typename F>
struct Fp8Kernel {
  static constexpr auto kKernel = fp8_gemm<T, F, Fp8Few>;
  static constexpr size_t kBytes = std::max(sizeof(Fp8Shared<F>), sizeof(Fp8Shared<Fp8Few>));

  static cudaError_t Load() {
    return cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  }
  static Problem Launch(const Fp8Gemm& gemm, cudaStream_t stream) {
    ParamsOf<Fp8Params, F, Fp8Few> params = {};
    auto& [many, few] = params.of;
    MOE_A2A_TRY(MakeFp8Params<F>(gemm, Element<T>::kBytes, &many));
    MOE_A2A_TRY(MakeFp8Params<Fp8Few>(gemm, Element<T>::kBytes, &few));
    MOE_A2A_TRY(SetGroups<Fp8Few>(gemm, {&few, &many}, stream));
    return LaunchKernel(kKernel, params, F::kBlocks, kBytes, gemm.num_sms, stream);
  }
};

}  // namespace
}  // namespace gemm

namespace {

// Calls body(Type<type of results>, Type<form for many rows>) for every kernel.
template <typename Body>
void each_fp8_kernel(Body&& body) {
  for_each(Types<__nv_bfloat16, float>{}, [&](auto element) {
    for_each(Types<gemm::Fp8Many<true>, gemm::Fp8Many<false>>{},
             [&](auto form) { body(element, form); });
  });
}

}  // namespace

cudaError_t LoadFp8Gemm() {
  cudaError_t error = cudaSuccess;
  each_fp8_kernel([&](auto element, auto form) {
    using Kernel = gemm::Fp8Kernel<typename decltype(element)::type, typename decltype(form)::type>;
    if (error == cudaSuccess) error = Kernel::Load();
  });
  return error;
}

Problem LaunchFp8Gemm(const Fp8Gemm& gemm, cudaStream_t stream) {
  if (gemm.num_rows == 0 || gemm.num_groups == 0) return "";
  Problem problem = "the FP8 kernel has no such element type";
  bool is_launched = false;
  each_fp8_kernel([&](auto element, auto form) {
    using T = typename decltype(element)::type;
    using F = typename decltype(form)::type;
    if (is_launched || gemm.type != Element<T>::kType) return;
    if (F::kWholeTurns && gemm.k % (F::kStepK * F::kStages) != 0) return;
    is_launched = true;
    problem = gemm::Fp8Kernel<T, F>::Launch(gemm, stream);
  });
  return problem;
}

}  // namespace moe_a2a
