// Compares samples of a grouped product in bfloat16 with plain sums, on the device.
#ifndef MOE_A2A_TOOLS_COMPARE_CUH_
#define MOE_A2A_TOOLS_COMPARE_CUH_

#include <cuda_bf16.h>

#include "driver.h"
#include "gemm/grouped_gemm.h"

namespace moe_a2a {

// Adds the number of wrong samples to `wrong`. The groups are adjacent, and group i uses weights i.
// `rows`: the sum of their sizes.
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

// The same for a product with SwiGLU, and for its gradient: compares samples of activations,
// pre-activations and their gradients, and for a few rows the dots of all columns.
static __global__ void CompareActivated(GroupedGemm g, ActivatedProduct x, int64_t rows,
                                        int64_t samples, unsigned long long* wrong) {
  const auto read = [](const void* array, int64_t i) {
    return __bfloat162float(static_cast<const __nv_bfloat16*>(array)[i]);
  };
  const auto check = [&](float found, float expected, float scale) {
    if (!(fabsf(found - expected) <= 0.02f * fabsf(expected) + 0.01f * scale))
      atomicAdd(wrong, 1ull);
  };
  const bool is_forward = g.product != GroupedProduct::kTransposed;
  const int64_t columns = is_forward ? g.n / 2 : g.k;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t s = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; s < samples; s += stride) {
    const uint64_t drawn = Hash(5, s);
    const int64_t row = drawn % rows, column = (drawn >> 32) % columns;
    int group = 0;
    while (row >= g.starts[group] + g.sizes[group]) ++group;
    const int64_t w = int64_t{group} * g.k * g.n;
    const auto swish = [](float v) { return v / (1 + expf(-v)); };
    const float weight = x.row_weights[row];
    float gate = 0, up = 0;
    if (is_forward) {
      for (int64_t i = 0; i < g.k; ++i) {
        const float of_row = read(g.a, row * g.k + i);
        gate += of_row * read(g.b, w + i * g.n + column);
        up += of_row * read(g.b, w + i * g.n + columns + column);
      }
      if (x.bias != nullptr) {
        gate += read(x.bias, group * g.n + column),
            up += read(x.bias, group * g.n + columns + column);
      }
      if (x.pre != nullptr) {
        check(read(x.pre, row * g.n + column), gate, 1);
        check(read(x.pre, row * g.n + columns + column), up, 1);
      }
    } else {
      gate = read(x.pre, row * 2 * columns + column);
      up = read(x.pre, (row * 2 + 1) * columns + column);
    }
    check(read(g.d, row * columns + column), weight * swish(gate) * up,
          fabsf(weight) * (1 + fabsf(gate) + fabsf(up)));
    if (is_forward) continue;
    const auto gradient = [&](int64_t column) {
      float sum = 0;
      for (int64_t i = 0; i < g.n; ++i)
        sum += read(g.a, row * g.n + i) * read(g.b, w + column * g.n + i);
      return sum;
    };
    const float ct = gradient(column), sig = 1 / (1 + expf(-gate));
    const float scale = fabsf(weight * ct) + fabsf(weight);
    check(read(x.d_pre, row * 2 * columns + column),
          weight * ct * up * (sig + gate * sig * (1 - sig)), scale * fabsf(up));
    check(read(x.d_pre, (row * 2 + 1) * columns + column), weight * ct * gate * sig,
          scale * fabsf(gate));
    if (s % 256 != 0) continue;
    for (int64_t first = 0; first < columns; first += kDotColumns) {
      float sum = 0, squares = 0;
      for (int64_t c = first; c < min(columns, first + kDotColumns); ++c) {
        const float y =
            swish(read(x.pre, row * 2 * columns + c)) * read(x.pre, (row * 2 + 1) * columns + c);
        const float term = gradient(c) * y;
        sum += term, squares += term * term;
      }
      check(x.partial_dots[first / kDotColumns * g.num_rows + row], sum, sqrtf(squares));
    }
  }
}

}  // namespace moe_a2a

#endif  // MOE_A2A_TOOLS_COMPARE_CUH_
