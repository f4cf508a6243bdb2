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

Problem WhyNotGroupedGemm(int64_t num_rows, int64_t num_groups, int64_t k, int64_t n) {
  if (k < 1 || n < 1 || k % 8 != 0 || n % 8 != 0) {
    return "the kernel needs columns in multiples of 8; got weights of " + std::to_string(k) +
           " by " + std::to_string(n);
  }
  constexpr int64_t kMaxTiles = 1 << 15;  // along an axis (Work::tile)
  constexpr int64_t kMaxAllTiles = 1 << 30;
  const int64_t tiles_k = k / 128 + 1, tiles_n = n / 128 + 1;
  const int64_t tiles_of_rows = num_rows / 32 + num_groups;
  if (num_rows / 32 >= kMaxTiles || tiles_k > kMaxTiles || tiles_n > kMaxTiles ||
      num_groups > kMaxAllTiles || tiles_of_rows * std::max(tiles_k, tiles_n) > kMaxAllTiles ||
      tiles_k * tiles_n * num_groups > kMaxAllTiles) {
    return "the kernel cannot count the tiles of so large a product; got " +
           std::to_string(num_rows) + " rows, " + std::to_string(num_groups) +
           " groups and weights of " + std::to_string(k) + " by " + std::to_string(n);
  }
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
