// Compares samples of a grouped product in bfloat16 with plain sums, on the device.
#ifndef MOE_A2A_TOOLS_COMPARE_CUH_
#define MOE_A2A_TOOLS_COMPARE_CUH_

#include <cuda_bf16.h>

#include "driver.h"
#include "gemm/grouped_gemm.h"

namespace moe_a2a {

// Adds the number of wrong samples to `wrong`. The groups are adjacent, and group i uses weights i. `rows`: the sum of
// their sizes.
static __global__ void CompareProduct(GroupedGemm g, int64_t rows, int64_t samples,
                                      unsigned long long* wrong) {
  const auto *a = static_cast<const __nv_bfloat16*>(g.a),
             *b = static_cast<const __nv_bfloat16*>(g.b);
  const auto* d = static_cast<const __nv_bfloat16*>(g.d);
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t s = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; s < samples; s += stride) {
    const uint64_t drawn = Hash(3, s);
    const int64_t row = drawn % rows;
    int group = 0;
    while (row >= g.starts[group] + g.sizes[group]) ++group;
    const int64_t first = g.starts[group], w = int64_t{group} * g.k * g.n;
    float sum = 0, squares = 0, found;
    const auto add = [&](const __nv_bfloat16& x, const __nv_bfloat16& y) {
      const float term = __bfloat162float(x) * __bfloat162float(y);
      sum += term;
      squares += term * term;
    };
    if (g.product == GroupedProduct::kWeightGradient) {
      const int64_t k = (drawn >> 20) % g.k, n = (drawn >> 40) % g.n;
      for (int64_t r = first; r < first + g.sizes[group]; ++r) add(a[r * g.k + k], b[r * g.n + n]);
      found = __bfloat162float(d[w + k * g.n + n]);
    } else {
      const bool is_transposed = g.product == GroupedProduct::kTransposed;
      const int64_t columns = is_transposed ? g.k : g.n, inner = is_transposed ? g.n : g.k;
      const int64_t column = (drawn >> 32) % columns;
      for (int64_t i = 0; i < inner; ++i) {
        add(a[row * inner + i], b[w + (is_transposed ? column * g.n + i : i * g.n + column)]);
      }
      found = __bfloat162float(d[row * columns + column]);
    }
    const float error = fabsf(found - sum);
    const bool is_right = error <= fabsf(sum) / 100 + 2e-3f * sqrtf(squares) + 1e-30f;
    if (!is_right) atomicAdd(wrong, 1ull);  // also for NaN
  }
}

}  // namespace moe_a2a

#endif  // MOE_A2A_TOOLS_COMPARE_CUH_
