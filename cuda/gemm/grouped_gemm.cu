#include "gemm/grouped_gemm.h"

#include "gemm/launch.cuh"

namespace moe_a2a {
namespace {

using gemm::Epilogue;

// Calls body(product, epilogue, Type<element>, Types<forms...>) for every kernel.
template <typename Body>
void each_kernel(Body&& body) {
  const auto of = [&](GroupedProduct product, auto epilogues, auto forms_of) {
    for_each(Types<__nv_bfloat16, __half>{}, [&](auto element) {
      for_each(epilogues, [&](auto epilogue) {
        body(product, decltype(epilogue)::value, element, forms_of(epilogue));
      });
    });
  };
  constexpr Constants<Epilogue::kStore, Epilogue::kAdd> kGradient;
  constexpr Constants<Epilogue::kStore, Epilogue::kActivate, Epilogue::kActivateGated> kForward;
  constexpr Constants<Epilogue::kDerive, Epilogue::kDeriveGated> kDerivative;
  of(GroupedProduct::kForward, kForward, [](auto e) {
    constexpr Epilogue kEpilogue = decltype(e)::value;
    return Types<gemm::Forward<kEpilogue>, gemm::ForwardFew<kEpilogue>>{};
  });
  of(GroupedProduct::kTransposed, Constants<Epilogue::kStore>{}, [](auto e) {
    constexpr Epilogue kEpilogue = decltype(e)::value;
    return Types<gemm::Transposed<kEpilogue>, gemm::TransposedFew<kEpilogue>>{};
  });
  of(GroupedProduct::kTransposed, kDerivative,
     [](auto e) { return Types<gemm::Transposed<decltype(e)::value>>{}; });
  of(GroupedProduct::kWeightGradient, kGradient,
     [](auto e) { return Types<gemm::WeightGradient<decltype(e)::value>>{}; });
}

Epilogue EpilogueOf(const GroupedGemm& gemm) {
  if (gemm.activated == nullptr) return gemm.adds ? Epilogue::kAdd : Epilogue::kStore;
  const bool is_gated = gemm.activated->is_gated;
  if (gemm.product == GroupedProduct::kTransposed) {
    return is_gated ? Epilogue::kDeriveGated : Epilogue::kDerive;
  }
  return is_gated ? Epilogue::kActivateGated : Epilogue::kActivate;
}

}  // namespace

cudaError_t LoadGroupedGemm() {
  cudaError_t error = cudaSuccess;
  each_kernel([&](GroupedProduct, Epilogue, auto element, auto forms) {
    using T = typename decltype(element)::type;
    if (error == cudaSuccess) error = gemm::Load<gemm::GroupedKernels<T>>(forms);
  });
  return error;
}

Problem LaunchGroupedGemm(const GroupedGemm& gemm, cudaStream_t stream) {
  const bool is_empty =
      gemm.product == GroupedProduct::kWeightGradient ? gemm.num_weights == 0 : gemm.num_rows == 0;
  if (is_empty || gemm.num_groups == 0) return "";
  Problem problem = "grouped_dot has no kernel for this product and element type";
  const Epilogue wanted = EpilogueOf(gemm);
  each_kernel([&](GroupedProduct product, Epilogue epilogue, auto element, auto forms) {
    using T = typename decltype(element)::type;
    if (gemm.product != product || wanted != epilogue || gemm.type != Element<T>::kType) return;
    problem = gemm::Launch<gemm::GroupedKernels<T>>(gemm, stream, forms);
  });
  return problem;
}

}  // namespace moe_a2a
