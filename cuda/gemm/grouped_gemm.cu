#include "gemm/grouped_gemm.h"

#include "gemm/launch.cuh"

namespace moe_a2a {
namespace {

using gemm::Forward;
using gemm::ForwardFew;
using gemm::Transposed;
using gemm::WeightGradient;

// Calls `body` with each form.
template <typename T, typename Body>
auto WithForm(GroupedProduct product, Body&& body) {
  switch (product) {
    case GroupedProduct::kForward: return body(T{}, Forward{});
    case GroupedProduct::kForwardFew: return body(T{}, ForwardFew{});
    case GroupedProduct::kTransposed: return body(T{}, Transposed{});
    default: return body(T{}, WeightGradient{});
  }
}

template <typename Body>
auto WithKernel(GroupedProduct product, ElementType type, Body&& body) {
  return type == ElementType::kBFloat16 ? WithForm<__nv_bfloat16>(product, body)
                                        : WithForm<__half>(product, body);
}

}  // namespace

cudaError_t LoadGroupedGemm() {
  for (const auto type : {ElementType::kBFloat16, ElementType::kFloat16}) {
    for (const auto product : {GroupedProduct::kForward, GroupedProduct::kForwardFew,
                               GroupedProduct::kTransposed, GroupedProduct::kWeightGradient}) {
      const cudaError_t error = WithKernel(product, type, [](auto element, auto form) {
        return gemm::Load<decltype(element), decltype(form)>();
      });
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

Problem WhyNotGroupedGemm(const GroupedGemm& gemm) {
  if (gemm.type != ElementType::kBFloat16 && gemm.type != ElementType::kFloat16) {
    return "elements must be bfloat16 or float16";
  }
  if (gemm.k == 0 || gemm.n == 0 || gemm.k % 8 != 0 || gemm.n % 8 != 0) {
    return "the last axes of rows and weights must be multiples of 8 elements; got " +
           std::to_string(gemm.k) + " and " + std::to_string(gemm.n);
  }
  constexpr int64_t kMaxTiles = 1 << 15;  // along an axis (Work::tile)
  if (gemm.num_rows > 32 * kMaxTiles || gemm.k > 128 * kMaxTiles || gemm.n > 128 * kMaxTiles) {
    return "an axis is too large";
  }
  const int64_t rows = gemm.num_rows / 32 + gemm.num_groups;
  const int64_t tiles = gemm.product == GroupedProduct::kWeightGradient
                            ? (gemm.k / 128 + 1) * (gemm.n / 256 + 1) * gemm.num_groups
                            : rows * (std::max(gemm.k, gemm.n) / 128 + 1);
  if (tiles >= int64_t{1} << 30) return "there are too many tiles";
  return "";
}

Problem LaunchGroupedGemm(const GroupedGemm& gemm, cudaStream_t stream) {
  const bool is_empty =
      gemm.product == GroupedProduct::kWeightGradient ? gemm.num_weights == 0 : gemm.num_rows == 0;
  if (is_empty || gemm.num_groups == 0) return "";
  return WithKernel(gemm.product, gemm.type, [&](auto element, auto form) {
    return gemm::Launch<decltype(element), decltype(form)>(gemm, stream);
  });
}

}  // namespace moe_a2a
