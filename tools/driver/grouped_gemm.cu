// Times each form of the grouped GEMM's kernels without XLA. It compares samples of each result
// with plain sums; tests/test_grouped_dot.py compares the results of the package. Build and run:
//   nvcc -std=c++17 -O3 -DNDEBUG -gencode arch=compute_90a,code=sm_90a -Icuda -o grouped_gemm \
//     tools/driver/grouped_gemm.cu cuda/gemm/tensor_map.cc cuda/runtime/driver.cc
//   ./grouped_gemm
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

// Included and not linked, because two files with the same kernels would set attributes of
// different copies.
#include "compare.cuh"
#include "driver.h"
#include "gemm/grouped_gemm.cu"

namespace moe_a2a {
namespace {

using gemm::Axis;
using gemm::Epilogue;
using gemm::Form;
using gemm::Launch;
using gemm::Load;
using gemm::Major;
using Forward = gemm::Forward<Epilogue::kStore>;
using ForwardFew = gemm::ForwardFew<Epilogue::kStore>;
using Transposed = gemm::Transposed<Epilogue::kStore>;
using WeightGradient = gemm::WeightGradient<Epilogue::kStore>;
using P = GroupedProduct;
using T = __nv_bfloat16;

const char* NameOf(P p) {
  switch (p) {
    case P::kForward: return "forward";
    case P::kForwardFew: return "few";
    case P::kTransposed: return "transposed";
    default: return "gradient";
  }
}

int num_sms = 132;
int failures = 0;

// Returns a sum of four uniform numbers.
__global__ void Fill(T* data, int64_t size, uint64_t seed) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < size; i += stride) {
    const uint64_t h = Hash(seed, i);
    float sum = 0;
    for (int b = 0; b < 4; ++b) sum += ((h >> (8 * b)) & 255) / 255.f - 0.5f;
    data[i] = T(sum * 1.7f);
  }
}

__global__ void FillWeights(float* data, int64_t size) {
  for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < size; i += gridDim.x * blockDim.x) {
    data[i] = i % 7 == 0 ? 0.f : 0.1f + i % 13 * 0.1f;
  }
}

template <typename X>
X* Allocate(int64_t size) {
  X* data;
  CHECK(cudaMalloc(&data, std::max<int64_t>(1, size) * sizeof(X)));
  return data;
}

int32_t* Upload(const std::vector<int>& values) {
  int32_t* data = Allocate<int32_t>(values.size());
  CHECK(cudaMemcpy(data, values.data(), values.size() * 4, cudaMemcpyHostToDevice));
  return data;
}

struct Variant {
  std::string name;
  P product;
  std::function<Problem(const GroupedGemm&)> launch;
  bool is_activated = false, keeps = false, has_bias = false;
};

// With SwiGLU: forward, or its gradient.
template <typename F>
Variant Activated(const std::string& name, P product, bool keeps = false, bool has_bias = false) {
  CHECK((Load<T, F>()));
  return {name, product, [](const GroupedGemm& g) { return Launch<T, F>(g, nullptr); },
          true, keeps,   has_bias};
}

template <typename F>
Variant Of(const std::string& name, P product) {
  CHECK((Load<T, F>()));
  return {name, product, [](const GroupedGemm& g) { return Launch<T, F>(g, nullptr); }};
}
double TimeOf(const std::function<Problem()>& launch, double target_ms) {
  static cudaEvent_t start = nullptr, end = nullptr;
  if (start == nullptr) {
    CHECK(cudaEventCreate(&start));
    CHECK(cudaEventCreate(&end));
  }
  const auto run = [&](int times) {
    CHECK(cudaEventRecord(start));
    for (int i = 0; i < times; ++i) CHECK(launch());
    CHECK(cudaEventRecord(end));
    CHECK(cudaEventSynchronize(end));
    float ms;
    CHECK(cudaEventElapsedTime(&ms, start, end));
    return ms / times;
  };
  const double first = run(2);
  return 1e3 * run(std::max(3, static_cast<int>(target_ms / first)));
}

struct Arrays {
  int num_weights, num_rows, k, n;
  T *rows, *ct, *w, *out, *d_rows, *d_w;
  // For SwiGLU: n is the columns of gate and up in a forward product, and k those of the
  // activations in a gradient.
  T *pre, *d_pre, *bias;
  float *row_weights, *partial_dots;
  int32_t* counter;

  Arrays(int num_weights, int num_rows, int k, int n)
      : num_weights(num_weights), num_rows(num_rows), k(k), n(n) {
    const int64_t size_w = int64_t{num_weights} * k * n;
    rows = Allocate<T>(int64_t{num_rows} * k);
    ct = Allocate<T>(int64_t{num_rows} * n);
    out = Allocate<T>(int64_t{num_rows} * n);
    d_rows = Allocate<T>(int64_t{num_rows} * k);
    w = Allocate<T>(size_w);
    d_w = Allocate<T>(size_w);
    counter = Allocate<int32_t>(1);
    const int64_t width = std::max(n, 2 * k);
    pre = Allocate<T>(int64_t{num_rows} * width);
    d_pre = Allocate<T>(int64_t{num_rows} * width);
    bias = Allocate<T>(int64_t{num_weights} * width);
    row_weights = Allocate<float>(num_rows);
    partial_dots = Allocate<float>(int64_t{num_rows} * (k / kDotColumns + 1));
    Fill<<<1024, 256>>>(pre, int64_t{num_rows} * width, 4);
    Fill<<<1024, 256>>>(bias, int64_t{num_weights} * width, 5);
    FillWeights<<<64, 256>>>(row_weights, num_rows);
    Fill<<<1024, 256>>>(rows, int64_t{num_rows} * k, 1);
    Fill<<<1024, 256>>>(ct, int64_t{num_rows} * n, 2);
    Fill<<<1024, 256>>>(w, size_w, 3);
  }
  ~Arrays() {
    for (void* p :
         {(void*)rows, (void*)ct, (void*)out, (void*)d_rows, (void*)w, (void*)d_w, (void*)counter,
          (void*)pre, (void*)d_pre, (void*)bias, (void*)row_weights, (void*)partial_dots}) {
      CHECK(cudaFree(p));
    }
  }
  ActivatedProduct ActivatedOf(const Variant& v) const {
    const bool is_forward = v.product != P::kTransposed;
    return {true,
            moe_a2a::Activation::kSilu,
            1,
            1,
            row_weights,
            v.has_bias ? bias : nullptr,
            is_forward ? v.keeps ? d_pre : nullptr : pre,
            d_pre,
            partial_dots};
  }
  // The groups are adjacent, and group i uses weights i.
  GroupedGemm Gemm(P product, const std::vector<int>& sizes) const {
    const bool is_gradient = product == P::kWeightGradient;
    const bool is_transposed = product == P::kTransposed;
    std::vector<int> starts(sizes.size()), weights(sizes.size());
    std::exclusive_scan(sizes.begin(), sizes.end(), starts.begin(), 0);
    std::iota(weights.begin(), weights.end(), 0);
    T* d = is_gradient ? d_w : is_transposed ? d_rows : out;
    return {product,
            ElementType::kBFloat16,
            is_transposed ? ct : rows,
            is_gradient ? ct : w,
            d,
            num_rows,
            num_weights,
            k,
            n,
            Upload(starts),
            Upload(sizes),
            Upload(weights),
            num_weights,
            counter,
            num_sms};
  }
};

void Time(const std::string& title, const Arrays& arrays, const std::vector<int>& sizes,
          const std::vector<Variant>& variants, int rounds = 3, double target_ms = 15) {
  static auto* const wrong = Allocate<unsigned long long>(1);
  const double used = std::accumulate(sizes.begin(), sizes.end(), 0.);
  const double flops = 2. * used * arrays.k * arrays.n;
  const double weight_bytes = 2. * arrays.num_weights * arrays.k * arrays.n;
  std::printf("\n%s: %d groups, %d rows, k %d, n %d; largest group %d\n", title.c_str(),
              static_cast<int>(sizes.size()), static_cast<int>(used), arrays.k, arrays.n,
              *std::max_element(sizes.begin(), sizes.end()));
  std::vector<std::vector<double>> times(variants.size());
  std::vector<GroupedGemm> gemms;
  std::vector<ActivatedProduct> activated;
  for (const Variant& v : variants) activated.push_back(arrays.ActivatedOf(v));
  for (size_t i = 0; i < variants.size(); ++i) {
    gemms.push_back(arrays.Gemm(variants[i].product, sizes));
    if (variants[i].is_activated) gemms.back().activated = &activated[i];
  }
  for (int round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < variants.size(); ++i) {
      times[i].push_back(TimeOf([&] { return variants[i].launch(gemms[i]); }, target_ms));
    }
  }
  for (size_t i = 0; i < variants.size(); ++i) {
    std::sort(times[i].begin(), times[i].end());
    const GroupedGemm& g = gemms[i];
    const int64_t size_d = g.product == P::kWeightGradient
                               ? g.num_weights * g.k * g.n
                               : int64_t(used) * (g.product == P::kTransposed ? g.k
                                                  : variants[i].is_activated  ? g.n / 2
                                                                              : g.n);
    CHECK(cudaMemset(g.d, 0x7b, size_d * 2));
    CHECK(cudaMemset(wrong, 0, sizeof(*wrong)));
    CHECK(variants[i].launch(gemms[i]));
    if (variants[i].is_activated) {
      CompareActivated<<<160, 128>>>(g, activated[i], static_cast<int64_t>(used), 20000, wrong);
    } else {
      CompareProduct<<<160, 128>>>(g, static_cast<int64_t>(used), 20000, wrong);
    }
    unsigned long long found = 0;
    CHECK(cudaMemcpy(&found, wrong, sizeof(found), cudaMemcpyDeviceToHost));
    failures += found > 0;
    const double us = times[i][times[i].size() / 2];
    std::printf("  %-12s %-28s %9.1f us (%.1f to %.1f)  %6.1f TFLOP/s  %7.1f GB/s of weights %s\n",
                NameOf(variants[i].product), variants[i].name.c_str(), us, times[i].front(),
                times[i].back(), flops / us * 1e-6, weight_bytes / us * 1e-3,
                found > 0 ? "WRONG" : "");
    std::fflush(stdout);
  }
}

using Few64 = Form<Axis::kN, Major::kMN, Major::kK, 256, 64, 1, 4>;

void TimeAll() {
  const P f = P::kForward, t = P::kTransposed, d = P::kWeightGradient, few = P::kForwardFew;
  const int rows = 32768;
  const std::vector<int> equal(32, rows / 32);
  const std::vector<Variant> products = {Of<Forward>("", f), Of<Transposed>("", t),
                                         Of<WeightGradient>("", d)};
  using Gated = gemm::Forward<Epilogue::kActivateGated>;
  using FewGated = gemm::ForwardFew<Epilogue::kActivateGated>;
  using Derived = gemm::Transposed<Epilogue::kDeriveGated>;
  const std::vector<Variant> first = {Of<Forward>("", f), Activated<Gated>("SwiGLU", f),
                                      Activated<Gated>("SwiGLU, bias", f, false, true),
                                      Activated<Gated>("SwiGLU, kept", f, true),
                                      Activated<Gated>("SwiGLU, kept, bias", f, true, true)};
  const std::vector<Variant> second = {Of<Transposed>("", t),
                                       Activated<Derived>("SwiGLU's gradient", t)};
  {
    const Arrays arrays(32, rows, 4096, 3072);
    Time("A GEMM 1", arrays, equal, products, 5);
    Time("A first product", arrays, equal, first, 9);
    Time("A first product, sigma 1.1", arrays, SkewedSizes(1.1, 32, rows), first);
    Time("A GEMM 1, sigma 1.1", arrays, SkewedSizes(1.1, 32, rows), products);
    for (const int each : {4, 16, 32, 64, 128, 256}) {
      Time("A GEMM 1, few rows", arrays, std::vector<int>(32, each),
           {Of<ForwardFew>("256x32, 5 stages", few), Of<Few64>("256x64, 4 stages", few),
            Of<Forward>("as for many rows", f), Activated<FewGated>("SwiGLU", few),
            Activated<FewGated>("SwiGLU, kept, bias", few, true, true)},
           3, 4);
    }
  }
  for (const auto& [name, k, n] :
       {std::tuple{"A GEMM 2", 1536, 4096}, {"B GEMM 1", 7168, 4096}, {"B GEMM 2", 2048, 7168}}) {
    const Arrays arrays(32, rows, k, n);
    Time(name, arrays, equal, products);
    if (k < n) {
      Time(name, arrays, equal, second, 9);
      Time(std::string(name) + ", sigma 1.1", arrays, SkewedSizes(1.1, 32, rows), second);
    } else {
      Time(name, arrays, equal, first, 9);
    }
  }
  {  // sizes that fit no tile
    const Arrays arrays(32, 9001, 1224, 1104);
    const std::vector<int> odd = SkewedSizes(1.1, 32, 8990);
    Time("odd, first", arrays, odd, first, 1, 1);
    Time("odd, few", arrays, odd, {Activated<FewGated>("SwiGLU, kept, bias", few, true, true)}, 1,
         1);
    Time("odd, second", arrays, odd, second, 1, 1);
  }
}

}  // namespace
}  // namespace moe_a2a

int main() {
  using namespace moe_a2a;
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 0));
  num_sms = properties.multiProcessorCount;
  std::printf("%s, %d SMs\n", properties.name, num_sms);
  CHECK(LoadGroupedGemm());
  TimeAll();
  std::printf("%d failures\n", failures);
  return failures != 0;
}
