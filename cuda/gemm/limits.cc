#include <algorithm>
#include <string>
#include <string_view>

#include "gemm/form.h"
#include "gemm/fp8_gemm.h"
#include "gemm/grouped_gemm.h"

namespace moe_a2a {
namespace {

std::string WeightsOf(int64_t k, int64_t n) {
  return "weights of " + std::to_string(k) + " by " + std::to_string(n);
}

Problem WhyTooLarge(int64_t num_rows, int64_t num_groups, int64_t k, int64_t n) {
  using gemm::kMaxTiles;
  constexpr int64_t kMaxAllTiles = 1 << 30;
  // Count tiles of the smallest extents of all forms (gemm/form.h).
  const int64_t tiles_k = k / gemm::kLeastTileColumns + 1,
                tiles_n = n / gemm::kLeastTileColumns + 1;
  const int64_t tiles_of_rows = num_rows / gemm::kLeastTileRows + num_groups;
  if (num_rows / gemm::kLeastTileRows >= kMaxTiles || tiles_k > kMaxTiles || tiles_n > kMaxTiles ||
      num_groups > kMaxAllTiles || tiles_of_rows * std::max(tiles_k, tiles_n) > kMaxAllTiles ||
      tiles_k * tiles_n * num_groups > kMaxAllTiles) {
    return Unsupported("the kernel cannot count the tiles of so large a product; got " +
                       std::to_string(num_rows) + " rows, " + std::to_string(num_groups) +
                       " groups and " + WeightsOf(k, n));
  }
  return "";
}

}  // namespace

Problem WhyNotGroupedGemm(std::string_view type, int64_t num_rows, int64_t num_groups, int64_t k,
                          int64_t n) {
  if (type != "bfloat16" && type != "float16") {
    return Unsupported("the kernel needs bfloat16 or float16; got " + std::string(type));
  }
  if (k < 1 || n < 1 || k % 8 != 0 || n % 8 != 0) {
    return Unsupported("the kernel needs columns in multiples of 8; got " + WeightsOf(k, n));
  }
  return WhyTooLarge(num_rows, num_groups, k, n);
}

Problem WhyNotFp8Gemm(int64_t num_rows, int64_t num_groups, int64_t k, int64_t n) {
  if (k < 1 || n < 1 || k % kFp8Block != 0 || n % 8 != 0) {
    return Unsupported("the FP8 kernel needs K in multiples of " + std::to_string(kFp8Block) +
                       " and N in multiples of 8; got " + WeightsOf(k, n));
  }
  return WhyTooLarge(num_rows, num_groups, k, n);
}

}  // namespace moe_a2a
