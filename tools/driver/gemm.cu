// Times the grouped GEMMs without XLA, each in turn, and compares samples of the results with plain
// sums. Use it to try another form of a kernel, and with compute-sanitizer and ncu. Only the tests
// compare every result. Build at the root of the repository, and run:
//
//   nvcc -std=c++17 -O3 -DNDEBUG -gencode arch=compute_90a,code=sm_90a -Icuda -o build/gemm_bench
//        tools/driver/gemm.cu cuda/gemm/tensor_map.cc cuda/runtime/driver.cc
//   timeout 120 build/gemm_bench [--rows 32768,256] [--groups 32] [--k 4096] [--n 3072]
//                                [--sigma 0] [--rounds 9] [--times 5]
//
// --rows has the rows of all groups together, whose sizes differ by --sigma (SkewedSizes). A
// product without SwiGLU has weights of k by n elements. The ratio is the median of a round's
// ratios to the first line of its kind.
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

// Included and not linked, because two files with the same kernels would set attributes of
// different copies.
#include "devices.h"
#include "driver.h"
#include "gemm/fp8_gemm.cu"
#include "gemm/grouped_gemm.cu"

namespace moe_a2a {
namespace {

using T = __nv_bfloat16;
using P = GroupedProduct;

// Forms that the package does not use, to compare them with its own.
using Few64 = gemm::Form<gemm::Axis::kN, gemm::Major::kMN, gemm::Major::kK, 256, 64, 1, 4>;
using Fp8Few32 = gemm::Fp8Form<gemm::Axis::kN, 256, 32, 1, 5>;

struct Options {
  std::vector<int> rows = {32768, 256};
  int groups = 32, k = 4096, n = 3072, rounds = 9, times = 5;
  double sigma = 0;
};

// ---- Arrays

// A sum of four uniform numbers.
__device__ float RandomNormal(uint64_t seed, int64_t i) {
  const uint64_t h = Hash(seed, i);
  float sum = 0;
  for (int b = 0; b < 4; ++b) sum += ((h >> (8 * b)) & 255) / 255.f - 0.5f;
  return sum * 1.7f;
}

__device__ void Draw(T* to, uint64_t seed, int64_t i) { *to = T(RandomNormal(seed, i)); }
__device__ void Draw(uint8_t* to, uint64_t seed, int64_t i) {
  *to = __nv_cvt_float_to_fp8(RandomNormal(seed, i) * 100, __NV_SATFINITE, __NV_E4M3);
}
__device__ void Draw(float* to, uint64_t seed, int64_t i) {  // a scale, or a weight of a row
  *to = 0.004f + (Hash(seed, i) & 1023) / 65536.f;
}

template <typename X>
__global__ void Fill(X* to, int64_t count, uint64_t seed) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    Draw(&to[i], seed, i);
  }
}

// Device memory for as long as the program runs.
template <typename X>
X* Allocate(int64_t count) {
  X* data;
  CHECK(cudaMalloc(&data, std::max<int64_t>(1, count) * sizeof(X)));
  return data;
}

template <typename X>
X* Random(int64_t count) {
  static uint64_t seed = 0;
  X* data = Allocate<X>(count);
  Fill<<<1024, 256>>>(data, count, ++seed);
  CHECK(cudaGetLastError());
  return data;
}

int32_t* Upload(const std::vector<int>& values) {
  int32_t* data = Allocate<int32_t>(values.size());
  CHECK(cudaMemcpy(data, values.data(), values.size() * 4, cudaMemcpyHostToDevice));
  return data;
}

// ---- Checks

__device__ bool IsGradient(const GroupedGemm& g) { return g.product == P::kWeightGradient; }
__device__ bool IsGradient(const Fp8Gemm&) { return false; }

// A result is element (x, y) of d, or of a group's part of d in a gradient, and a sum of terms.
__device__ float Term(const GroupedGemm& g, int group, int64_t x, int64_t y, int64_t i) {
  const T *a = static_cast<const T*>(g.a), *b = static_cast<const T*>(g.b);
  const int64_t w = int64_t{group} * g.k * g.n, row = g.starts[group] + i;
  switch (g.product) {
    case P::kWeightGradient: return float(a[row * g.k + x]) * float(b[row * g.n + y]);
    case P::kTransposed: return float(a[x * g.n + i]) * float(b[w + y * g.n + i]);
    default: return float(a[x * g.k + i]) * float(b[w + i * g.n + y]);
  }
}
__device__ float Term(const Fp8Gemm& g, int group, int64_t x, int64_t y, int64_t i) {
  const auto decode = [](const void* values, int64_t at) {
    return float(
        __half(__nv_cvt_fp8_to_halfraw(static_cast<const uint8_t*>(values)[at], __NV_E4M3)));
  };
  const int64_t block = i / kFp8Block, blocks_n = (g.n + kFp8Block - 1) / kFp8Block;
  const int64_t of_w = (group * blocks_n + y / kFp8Block) * (g.k / kFp8Block) + block;
  return decode(g.rows, x * g.k + i) * decode(g.matrices, (group * g.n + y) * g.k + i) *
         g.row_scales[x * g.row_stride + block * g.block_stride] * g.matrix_scales[of_w];
}

// Adds the number of wrong samples to `wrong`. The groups are adjacent, and group i uses weights i.
template <typename Gemm>
__global__ void Compare(Gemm g, bool is_transposed, int64_t rows, int64_t samples,
                        unsigned long long* wrong) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  const int64_t columns = is_transposed ? g.k : g.n;
  for (int64_t s = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; s < samples; s += stride) {
    const uint64_t drawn = Hash(3, s);
    const int64_t row = drawn % rows, y = (drawn >> 40) % columns;
    int group = 0;
    while (row >= g.starts[group] + g.sizes[group]) ++group;
    const int64_t x = IsGradient(g) ? (drawn >> 20) % g.k : row;
    const int64_t inner = IsGradient(g) ? g.sizes[group] : is_transposed ? g.n : g.k;
    float sum = 0, squares = 0;
    for (int64_t i = 0; i < inner; ++i) {
      const float term = Term(g, group, x, y, i);
      sum += term;
      squares += term * term;
    }
    const int64_t d = (IsGradient(g) ? int64_t{group} * g.k * g.n : 0) + x * columns + y;
    const float error = fabsf(float(static_cast<const T*>(g.d)[d]) - sum);
    // FP8: tensor cores add with fewer bits.
    const float part = std::is_same_v<Gemm, Fp8Gemm> ? 0.01f : 2e-3f;
    const bool is_right = error <= fabsf(sum) / 100 + part * sqrtf(squares) + 1e-30f;
    if (!is_right) atomicAdd(wrong, 1ull);  // also for NaN
  }
}

// ---- What is timed

struct Contender {
  std::string name;
  std::function<Problem()> launch;
  double flops, weight_bytes;
  std::function<void(unsigned long long*)> compare = nullptr;  // none with SwiGLU
  std::vector<double> us = {};
};

class Bench {
 public:
  Bench(const Options& options, int num_sms) : o_(options), num_sms_(num_sms) {
    CHECK(LoadGroupedGemm());
    CHECK(LoadFp8Gemm());
    CHECK((gemm::Load<T, Few64>()));
    CHECK((gemm::LoadFp8<T, Fp8Few32>()));
    CHECK((gemm::LoadFp8<T, Fp8Forward<false>>()));
    const int64_t c = *std::max_element(o_.rows.begin(), o_.rows.end()), l = o_.groups;
    const int64_t k = o_.k, n = o_.n, width = std::max(n, 2 * k), blocks = k / kFp8Block;
    CHECK(k % kFp8Block == 0 ? Problem()
                             : "--k must be a multiple of " + std::to_string(kFp8Block));
    rows_ = Random<T>(c * k), ct_ = Random<T>(c * n), w_ = Random<T>(l * k * n);
    out_ = Allocate<T>(std::max(c * width, l * k * n));
    pre_ = Random<T>(c * width), d_pre_ = Allocate<T>(c * width), bias_ = Random<T>(l * width);
    row_weights_ = Random<float>(c), dots_ = Allocate<float>(c * (k / kDotColumns + 1));
    fp8_ = {};
    fp8_.type = ElementType::kBFloat16;
    fp8_.rows = Random<uint8_t>(c * k), fp8_.matrices = Random<uint8_t>(l * n * k);
    fp8_.row_scales = Random<float>(c * blocks), fp8_.row_stride = blocks, fp8_.block_stride = 1;
    fp8_.matrix_scales = Random<float>(l * ((n + kFp8Block - 1) / kFp8Block) * blocks);
    fp8_.d = out_, fp8_.counter = Allocate<int32_t>(1);
    CHECK(cudaDeviceSynchronize());
  }

  // Returns true if all samples are right.
  bool Run(int rows) {
    const std::vector<int> sizes = SkewedSizes(o_.sigma, o_.groups, rows);
    std::vector<int> starts(sizes.size()), weights(sizes.size());
    std::exclusive_scan(sizes.begin(), sizes.end(), starts.begin(), 0);
    std::iota(weights.begin(), weights.end(), 0);
    starts_ = Upload(starts), sizes_ = Upload(sizes), weights_ = Upload(weights), used_ = rows;
    std::printf("\n%d groups, %d rows, k %d, n %d; largest group %d\n", o_.groups, rows, o_.k, o_.n,
                *std::max_element(sizes.begin(), sizes.end()));
    const ActivatedProduct plain = Activated(nullptr, nullptr), kept = Activated(bias_, d_pre_),
                           derived = Activated(nullptr, pre_);
    const auto few64 = gemm::Launch<T, Few64>;
    bool is_right = Time({Of("forward", P::kForward), Of("forward, few rows", P::kForwardFew),
                          Of("forward, few rows, 256x64", P::kForwardFew, nullptr, few64),
                          Of("forward, SwiGLU", P::kForward, &plain),
                          Of("forward, SwiGLU, bias, kept", P::kForward, &kept),
                          Of("few rows, SwiGLU", P::kForwardFew, &plain)});
    is_right &= Time({Of("transposed", P::kTransposed),
                      Of("transposed, SwiGLU's gradient", P::kTransposed, &derived),
                      Of("gradient of weights", P::kWeightGradient)});
    is_right &= Time(
        {OfFp8("FP8", Fp8Product::kForward),
         OfFp8("FP8, any k", Fp8Product::kForward, gemm::LaunchFp8<T, Fp8Forward<false>>),
         OfFp8("FP8, few rows", Fp8Product::kForwardFew),
         OfFp8("FP8, few rows, 256x32", Fp8Product::kForwardFew, gemm::LaunchFp8<T, Fp8Few32>)});
    return is_right;
  }

 private:
  ActivatedProduct Activated(const T* bias, T* pre) const {
    return {true, Activation::kSilu, 1, 1, row_weights_, bias, pre, d_pre_, dots_};
  }

  double flops() const { return 2. * used_ * o_.k * o_.n; }
  double weight_elements() const { return double(o_.groups) * o_.k * o_.n; }

  template <typename Gemm>
  void AddGroups(Gemm* g) const {
    g->num_rows = used_, g->num_weights = o_.groups, g->k = o_.k, g->n = o_.n;
    g->starts = starts_, g->sizes = sizes_, g->weights = weights_;
    g->num_groups = o_.groups, g->counter = fp8_.counter, g->num_sms = num_sms_;
  }

  Contender Of(const std::string& name, P product, const ActivatedProduct* activated = nullptr,
               Problem (*launch)(const GroupedGemm&, cudaStream_t) = LaunchGroupedGemm) const {
    const bool is_gradient = product == P::kWeightGradient, turns = product == P::kTransposed;
    GroupedGemm g = {};
    g.product = product, g.type = ElementType::kBFloat16;
    g.a = turns ? ct_ : rows_, g.b = is_gradient ? ct_ : w_, g.d = out_;
    g.activated = activated;
    AddGroups(&g);
    Contender c = {name, [=] { return launch(g, nullptr); }, flops(), 2 * weight_elements()};
    if (activated != nullptr) return c;
    c.compare = [=](auto* wrong) { Compare<<<160, 128>>>(g, turns, g.num_rows, 20000, wrong); };
    return c;
  }

  Contender OfFp8(const std::string& name, Fp8Product product,
                  Problem (*launch)(const Fp8Gemm&, cudaStream_t) = LaunchFp8Gemm) const {
    Fp8Gemm g = fp8_;
    g.product = product;
    AddGroups(&g);
    return {name, [=] { return launch(g, nullptr); }, flops(), weight_elements(),
            [=](auto* wrong) { Compare<<<160, 128>>>(g, false, g.num_rows, 20000, wrong); }};
  }

  bool IsRight(const Contender& c) {
    static auto* const wrong = Allocate<unsigned long long>(1);
    unsigned long long found = 0;
    if (c.compare == nullptr) return true;
    CHECK(cudaMemset(out_, 0x7b, sizeof(T) * int64_t{used_} * std::min(o_.k, o_.n)));
    CHECK(cudaMemset(wrong, 0, sizeof(*wrong)));
    CHECK(c.launch());
    c.compare(wrong);
    CHECK(cudaMemcpy(&found, wrong, sizeof(found), cudaMemcpyDeviceToHost));
    return found == 0;
  }

  // Times contenders in turns, in another random order in each round.
  bool Time(std::vector<Contender> contenders) {
    std::vector<size_t> order(contenders.size());
    std::iota(order.begin(), order.end(), 0);
    for (int round = 0; round < o_.rounds; ++round) {
      std::shuffle(order.begin(), order.end(), random_);
      for (size_t i : order) {
        Contender& c = contenders[i];
        CHECK(c.launch());
        stream_.Begin();
        for (int t = 0; t < o_.times; ++t) CHECK(c.launch());
        stream_.End();
        c.us.push_back(stream_.Microseconds() / o_.times);
      }
    }
    bool is_right = true;
    for (const Contender& c : contenders) {
      std::vector<double> ratios;
      for (size_t r = 0; r < c.us.size(); ++r) ratios.push_back(c.us[r] / contenders[0].us[r]);
      const Summary us(c.us);
      const bool is_this_right = IsRight(c);
      std::printf("  %-30s %9.1f us (%.1f to %.1f)  %6.1f TFLOP/s  %7.1f GB/s of weights  %.3f%s\n",
                  c.name.c_str(), us.median, us.least, us.greatest, c.flops / us.median * 1e-6,
                  c.weight_bytes / us.median * 1e-3, Summary(ratios).median,
                  is_this_right ? "" : "  WRONG");
      std::fflush(stdout);
      is_right &= is_this_right;
    }
    return is_right;
  }

  const Options o_;
  const int num_sms_;
  T *rows_, *ct_, *w_, *out_, *pre_, *d_pre_, *bias_;
  float *row_weights_, *dots_;
  Fp8Gemm fp8_;  // without groups
  int32_t *starts_, *sizes_, *weights_;
  int used_ = 0;
  TimedStream stream_;
  std::mt19937 random_{5};
};

}  // namespace
}  // namespace moe_a2a

int main(int argc, char** argv) {
  using namespace moe_a2a;
  Options o;
  ReadOptions(argc, argv,
              {{"--rows", &o.rows},
               {"--groups", &o.groups},
               {"--k", &o.k},
               {"--n", &o.n},
               {"--sigma", &o.sigma},
               {"--rounds", &o.rounds},
               {"--times", &o.times}});
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 0));
  std::printf("%s, %d SMs\n", properties.name, properties.multiProcessorCount);
  Bench bench(o, properties.multiProcessorCount);
  bool is_right = true;
  for (int rows : o.rows) is_right &= bench.Run(rows);
  return is_right ? 0 : 1;
}
