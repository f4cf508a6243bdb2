#include "gemm/grouped_gemm.h"

#include "gemm/launch.cuh"

namespace moe_a2a {
namespace {

using Elements = Types<__nv_bfloat16, __half>;
using Products = Constants<GroupedProduct::kForward, GroupedProduct::kForwardFew,
                           GroupedProduct::kTransposed, GroupedProduct::kWeightGradient>;

template <GroupedProduct P>
struct FormOf;
template <>
struct FormOf<GroupedProduct::kForward> : Type<gemm::Forward> {};
template <>
struct FormOf<GroupedProduct::kForwardFew> : Type<gemm::ForwardFew> {};
template <>
struct FormOf<GroupedProduct::kTransposed> : Type<gemm::Transposed> {};
template <>
struct FormOf<GroupedProduct::kWeightGradient> : Type<gemm::WeightGradient> {};

// Calls body(product, Type<element>, Type<form>) for every kernel, to load it or to launch it.
template <typename Body>
void each_kernel(Body&& body) {
  for_each(Elements{}, [&](auto element) {
    for_each(Products{},
             [&](auto product) { body(product, element, Type<typename FormOf<product>::type>{}); });
  });
}

}  // namespace

cudaError_t LoadGroupedGemm() {
  cudaError_t error = cudaSuccess;
  each_kernel([&](auto, auto element, auto form) {
    if (error != cudaSuccess) return;
    error = gemm::Load<typename decltype(element)::type, typename decltype(form)::type>();
  });
  return error;
}

Problem LaunchGroupedGemm(const GroupedGemm& gemm, cudaStream_t stream) {
  const bool is_empty =
      gemm.product == GroupedProduct::kWeightGradient ? gemm.num_weights == 0 : gemm.num_rows == 0;
  if (is_empty || gemm.num_groups == 0) return "";
  Problem problem = "grouped_dot has no kernel for this product and element type";
  each_kernel([&](auto product, auto element, auto form) {
    using T = typename decltype(element)::type;
    if (gemm.product != product || gemm.type != Element<T>::kType) return;
    problem = gemm::Launch<T, typename decltype(form)::type>(gemm, stream);
  });
  return problem;
}

}  // namespace moe_a2a
