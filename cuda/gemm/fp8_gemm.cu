#include "gemm/fp8_gemm.h"

#include "gemm/fp8_launch.cuh"

namespace moe_a2a {
namespace {

using Fp8Results = Types<__nv_bfloat16, float>;
template <bool kWholeTurns>
using Fp8Forward = gemm::Fp8Form<gemm::Axis::kM, 128, 192, 2, 4, kWholeTurns>;
using Fp8ForwardFew = gemm::Fp8Form<gemm::Axis::kN, 256, 64, 1, 4>;

// Calls body(product, Type<element of results>, Type<form>) for every kernel.
template <typename Body>
void each_fp8_kernel(Body&& body) {
  for_each(Fp8Results{}, [&](auto element) {
    body(Fp8Product::kForward, element, Type<Fp8Forward<true>>{});
    body(Fp8Product::kForward, element, Type<Fp8Forward<false>>{});
    body(Fp8Product::kForwardFew, element, Type<Fp8ForwardFew>{});
  });
}

}  // namespace

cudaError_t LoadFp8Gemm() {
  cudaError_t error = cudaSuccess;
  each_fp8_kernel([&](Fp8Product, auto element, auto form) {
    if (error != cudaSuccess) return;
    error = gemm::LoadFp8<typename decltype(element)::type, typename decltype(form)::type>();
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
