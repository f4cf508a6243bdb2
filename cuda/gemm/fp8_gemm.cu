#include "gemm/fp8_gemm.h"

#include "gemm/fp8_gemm.cuh"
#include "gemm/launch.cuh"

namespace moe_a2a {
namespace gemm {
namespace {

template <typename T, typename F>
Problem LaunchFp8(const Fp8Gemm& gemm, cudaStream_t stream) {
  constexpr int kRowsOfBox = F::kIsTurned ? F::kRowsOfBoxB : kBoxElements;
  constexpr int kColumnsOfBox = F::kIsTurned ? kBoxElements : F::kRowsOfBoxB;
  const TensorMap rows = {1, gemm.rows, gemm.k, true, 0, 0, kFp8Block, kRowsOfBox};
  const auto matrices_of = [&](const void* data, int64_t num) {
    return TensorMap{1, data, gemm.k, false, gemm.n, num, kFp8Block, kColumnsOfBox};
  };
  const TensorMap matrices = matrices_of(gemm.matrices, gemm.num_weights);
  constexpr int kBytes = Element<T>::kBytes;
  const TensorMap d = {kBytes, gemm.d, gemm.n, true, 0, 0, 128 / kBytes, F::kStoreRows};

  Fp8Params p = {};
  MOE_A2A_TRY(EncodeTensorMap(F::kIsTurned ? matrices : rows, &p.a));
  MOE_A2A_TRY(EncodeTensorMap(F::kIsTurned ? rows : matrices, &p.b));
  MOE_A2A_TRY(EncodeTensorMap(d, &p.d));
  if (gemm.num_spare > 0) {
    MOE_A2A_TRY(EncodeTensorMap(matrices_of(gemm.spare, gemm.num_spare), &p.spare));
  }
  (F::kIsTurned ? p.m : p.n) = static_cast<int32_t>(gemm.n);
  p.k = static_cast<int32_t>(gemm.k);
  p.row_scales = gemm.row_scales;
  p.matrix_scales = gemm.matrix_scales;
  p.row_stride = static_cast<uint32_t>(gemm.row_stride);
  p.block_stride = static_cast<uint32_t>(gemm.block_stride);
  return LaunchForm<F, Fp8Shared<F>>(fp8_gemm<T, F>, p, gemm, stream);
}

}  // namespace
}  // namespace gemm

namespace {

template <bool kWholeTurns>
using Fp8Forward = gemm::Fp8Form<gemm::Axis::kM, 128, 192, 2, 4, kWholeTurns>;
using Fp8ForwardFew = gemm::Fp8Form<gemm::Axis::kN, 256, 64, 1, 4>;

// Calls body(product, Type<type of results>, Type<form>) for every kernel.
template <typename Body>
void each_fp8_kernel(Body&& body) {
  for_each(Types<__nv_bfloat16, float>{}, [&](auto element) {
    body(Fp8Product::kForward, element, Type<Fp8Forward<true>>{});
    body(Fp8Product::kForward, element, Type<Fp8Forward<false>>{});
    body(Fp8Product::kForwardFew, element, Type<Fp8ForwardFew>{});
  });
}

}  // namespace

cudaError_t LoadFp8Gemm() {
  cudaError_t error = cudaSuccess;
  each_fp8_kernel([&](Fp8Product, auto element, auto form) {
    using T = typename decltype(element)::type;
    using F = typename decltype(form)::type;
    if (error != cudaSuccess) return;
    error = cudaFuncSetAttribute(gemm::fp8_gemm<T, F>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 sizeof(gemm::Fp8Shared<F>));
  });
  return error;
}

Problem LaunchFp8Gemm(const Fp8Gemm& gemm, cudaStream_t stream) {
  if (gemm.num_rows == 0 || gemm.num_groups == 0) return "";
  Problem problem = "the FP8 kernel has no such product and element type";
  bool is_launched = false;
  each_fp8_kernel([&](Fp8Product product, auto element, auto form) {
    using T = typename decltype(element)::type;
    using F = typename decltype(form)::type;
    if (is_launched || gemm.product != product || gemm.type != Element<T>::kType) return;
    if (F::kWholeTurns && gemm.k % (F::kStepK * F::kStages) != 0) return;
    is_launched = true;
    problem = gemm::LaunchFp8<T, F>(gemm, stream);
  });
  return problem;
}

}  // namespace moe_a2a
