#include "gemm/fp8_gemm.h"

#include "gemm/fp8_gemm.cuh"
#include "gemm/launch.cuh"

namespace moe_a2a {
namespace gemm {

template <typename F>
Problem MakeParams(const Fp8Gemm& gemm, Fp8Params* p) {
  const int bytes = element_bytes(gemm.type);
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

}  // namespace gemm

namespace {

constexpr int kFp8Stages = 4;
template <bool kWholeTurns>
using Many = gemm::Fp8Form<gemm::Axis::kM, gemm::kBaseRows, 192, 2, kFp8Stages, kWholeTurns>;
using Few = gemm::Fp8Form<gemm::Axis::kN, 256, 64, 1, kFp8Stages>;

// Calls body(Type<type of results>, Constant<kWholeTurns>, Types<forms...>) for every kernel.
template <typename Body>
void each_fp8_kernel(Body&& body) {
  for_each(Types<__nv_bfloat16, float>{}, [&](auto element) {
    for_each(Constants<true, false>{}, [&](auto whole_turns) {
      body(element, whole_turns, Types<Many<decltype(whole_turns)::value>, Few>{});
    });
  });
}

}  // namespace

cudaError_t LoadFp8Gemm() {
  cudaError_t error = cudaSuccess;
  each_fp8_kernel([&](auto element, auto, auto forms) {
    using Kernels = gemm::Fp8Kernels<typename decltype(element)::type>;
    if (error == cudaSuccess) error = gemm::Load<Kernels>(forms);
  });
  return error;
}

Problem LaunchFp8Gemm(const Fp8Gemm& gemm, cudaStream_t stream) {
  if (gemm.num_rows == 0 || gemm.num_groups == 0) return "";
  Problem problem = "the FP8 kernel has no such element type";
  const bool has_whole_turns = gemm.k % (kFp8Block * kFp8Stages) == 0;
  each_fp8_kernel([&](auto element, auto whole_turns, auto forms) {
    using T = typename decltype(element)::type;
    if (gemm.type != Element<T>::kType || has_whole_turns != whole_turns.value) return;
    problem = gemm::Launch<gemm::Fp8Kernels<T>>(gemm, stream, forms);
  });
  return problem;
}

}  // namespace moe_a2a
