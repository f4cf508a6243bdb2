// Checks the FP8 grouped GEMM against plain sums, and times it in turns with the bf16 kernel,
// without XLA. Build and run:
//   nvcc -std=c++17 -O3 -DNDEBUG -gencode arch=compute_90a,code=sm_90a -Icuda -o fp8_gemm \
//     tools/driver/fp8_gemm.cu cuda/gemm/tensor_map.cc cuda/runtime/driver.cc
//   fp8_gemm [--check] [--quick] [--time] [--rounds 15]
// --quick times one shape, --time also the others and groups of few rows. A kernel that hangs ends
// the program.
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

// Included and not linked, because two files with the same kernels would set attributes of
// different copies.
#include "driver.h"
#include "gemm/fp8_gemm.cu"
#include "gemm/grouped_gemm.cu"

namespace moe_a2a {
namespace {

using gemm::Axis;
using gemm::Fp8Form;
using Launcher = Problem (*)(const Fp8Gemm&, cudaStream_t);

int num_sms = 132;
int failures = 0;
std::string summary;

// ---- Forms

struct Variant {
  std::string name;
  ElementType type;
  bool is_few;
  Launcher launch;
};

template <typename T, typename F>
Variant Of(const std::string& name) {
  CHECK((gemm::LoadFp8<T, F>()));
  return {name, Element<T>::kType, F::kIsTurned, gemm::LaunchFp8<T, F>};
}

using Few64 = Fp8Form<Axis::kN, 256, 64, 1, 4>;
using Few32 = Fp8Form<Axis::kN, 256, 32, 1, 5>;

// The package's form for many rows and this k, and its form for any k.
template <typename T>
std::vector<Variant> ManyRows() {
  CHECK(LoadFp8Gemm());
  const auto launch = [](const Fp8Gemm& gemm, cudaStream_t stream) {
    Fp8Gemm forward = gemm;
    forward.product = Fp8Product::kForward;
    return LaunchFp8Gemm(forward, stream);
  };
  return {{"as chosen", Element<T>::kType, false, launch}, Of<T, Fp8Forward<false>>("any k")};
}
template <typename T>
std::vector<Variant> FewRows() {
  return {Of<T, Few32>("few 256x32"), Of<T, Few64>("few 256x64")};
}

// ---- Waits with a bound: a kernel that never ends must not take the machine's time.

template <typename... Args>
void Say(const char* format, Args... args) {
  std::printf(format, args...);
  std::fflush(stdout);
}

void WaitFor(cudaEvent_t event, const std::string& what, double seconds = 10) {
  const auto start = std::chrono::steady_clock::now();
  while (true) {
    const cudaError_t error = cudaEventQuery(event);
    if (error == cudaSuccess) return;
    if (error != cudaErrorNotReady) {
      Say("ERROR in %s: %s\n", what.c_str(), cudaGetErrorString(error));
      std::_Exit(3);
    }
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start;
    if (passed.count() > seconds) {
      Say("HANGS: %s\n", what.c_str());
      std::_Exit(2);
    }
  }
}

void Finish(const std::string& what) {
  static cudaEvent_t event = nullptr;
  if (event == nullptr) CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  CHECK(cudaGetLastError());
  CHECK(cudaEventRecord(event));
  WaitFor(event, what);
}

// ---- Arrays

template <typename X>
X* Allocate(int64_t size) {
  X* data;
  CHECK(cudaMalloc(&data, std::max<int64_t>(1, size) * sizeof(X)));
  return data;
}

template <typename X>
X* Upload(const std::vector<X>& values) {
  X* data = Allocate<X>(values.size());
  CHECK(cudaMemcpy(data, values.data(), values.size() * sizeof(X), cudaMemcpyHostToDevice));
  return data;
}

__device__ float RandomNormal(uint64_t seed, int64_t i) {  // about; a sum of four uniform numbers
  const uint64_t h = Hash(seed, i);
  float sum = 0;
  for (int b = 0; b < 4; ++b) sum += ((h >> (8 * b)) & 255) / 255.f - 0.5f;
  return sum * 1.7f;
}

__global__ void FillBf16(__nv_bfloat16* data, int64_t size, uint64_t seed) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < size; i += stride) {
    data[i] = __nv_bfloat16(RandomNormal(seed, i));
  }
}

// Exact: numbers whose sums have few bits, so that results must be equal in any order of summation.
__global__ void FillValues(uint8_t* data, int64_t size, uint64_t seed, bool is_exact) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < size; i += stride) {
    const float x =
        is_exact ? (static_cast<int>(Hash(seed, i) % 5) - 2) * 0.5f : RandomNormal(seed, i) * 100;
    data[i] = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
  }
}

__global__ void FillScales(float* data, int64_t size, uint64_t seed, bool is_exact) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < size; i += stride) {
    const uint64_t h = Hash(seed, i);
    data[i] = is_exact ? exp2f(static_cast<int>(h % 5) - 2) : 0.004f + (h & 1023) / 65536.f;
  }
}

struct Group {
  int start, size, weight;
};

// Makes the rows outside of all groups NaN.
__global__ void SpoilRows(uint8_t* rows, float* scales, const int* group_of_row, int num_rows,
                          int64_t k, int64_t row_stride, int64_t block_stride) {
  const int row = blockIdx.x;
  if (row >= num_rows || group_of_row[row] >= 0) return;
  for (int64_t i = threadIdx.x; i < k; i += blockDim.x) rows[row * k + i] = 0x7F;
  for (int64_t i = threadIdx.x; i < k / kFp8Block; i += blockDim.x) {
    scales[row * row_stride + i * block_stride] = NAN;
  }
}

// The arrays of a product with E4M3 values, and its groups.
struct Arrays {
  int num_rows, num_weights, k, n;
  uint8_t *rows, *matrices;
  float *row_scales, *matrix_scales;
  int64_t row_stride, block_stride;
  char* out;
  int64_t out_bytes;
  int32_t* counter;
  std::vector<void*> owned;

  Arrays(int num_rows, int num_weights, int k, int n, bool has_columns, bool is_exact)
      : num_rows(num_rows), num_weights(num_weights), k(k), n(n) {
    const int64_t blocks = k / kFp8Block, padded = num_rows + (4 - num_rows % 4) % 4;
    const int64_t size_w = int64_t{num_weights} * n * k;
    const int64_t num_scales = int64_t{num_weights} * ((n + kFp8Block - 1) / kFp8Block) * blocks;
    row_stride = has_columns ? 1 : blocks;
    block_stride = has_columns ? padded : 1;
    rows = Keep(Allocate<uint8_t>(int64_t{num_rows} * k));
    matrices = Keep(Allocate<uint8_t>(size_w));
    row_scales = Keep(Allocate<float>(padded * blocks));
    matrix_scales = Keep(Allocate<float>(num_scales));
    out_bytes = int64_t{num_rows} * n * 4 + 4096;
    out = Keep(Allocate<char>(out_bytes));
    counter = Keep(Allocate<int32_t>(1));
    FillValues<<<1024, 256>>>(rows, int64_t{num_rows} * k, 1, is_exact);
    FillValues<<<1024, 256>>>(matrices, size_w, 2, is_exact);
    FillScales<<<256, 256>>>(row_scales, padded * blocks, 3, is_exact);
    FillScales<<<256, 256>>>(matrix_scales, num_scales, 4, is_exact);
    CHECK(cudaGetLastError());
  }
  Arrays(const Arrays&) = delete;
  ~Arrays() {
    CHECK(cudaDeviceSynchronize());
    for (void* p : owned) CHECK(cudaFree(p));
  }
  template <typename X>
  X* Keep(X* data) {
    owned.push_back(data);
    return data;
  }

  Fp8Gemm Gemm(const std::vector<Group>& groups, ElementType type) {
    std::vector<int32_t> starts, sizes, weights;
    for (const Group& g : groups) {
      starts.push_back(g.start), sizes.push_back(g.size), weights.push_back(g.weight);
    }
    Fp8Gemm gemm = {};
    gemm.type = type;
    gemm.rows = rows, gemm.matrices = matrices;
    gemm.row_scales = row_scales, gemm.matrix_scales = matrix_scales;
    gemm.row_stride = row_stride, gemm.block_stride = block_stride;
    gemm.d = out;
    gemm.num_rows = num_rows, gemm.num_weights = num_weights, gemm.k = k, gemm.n = n;
    gemm.starts = Keep(Upload(starts));
    gemm.sizes = Keep(Upload(sizes));
    gemm.weights = Keep(Upload(weights));
    gemm.num_groups = static_cast<int32_t>(groups.size());
    gemm.counter = counter;
    gemm.num_sms = num_sms;
    return gemm;
  }
};

// ---- Checks

__device__ float Decode(uint8_t bits) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(bits, __NV_E4M3)));
}

struct Found {
  unsigned long long checked, wrong, unequal, touched;
  unsigned long long first_wrong;  // row << 32 | column
  float found, expected;           // there
};

constexpr int kPattern = 0x7B;

// Compares results with sums in double precision: all of them, or `samples` if that is not 0.
__global__ void Compare(Fp8Gemm g, const int* group_of_row, int64_t samples, Found* result) {
  const int64_t all = g.num_rows * g.n, count = samples > 0 ? samples : all;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  const int64_t blocks_k = g.k / kFp8Block, blocks_n = (g.n + kFp8Block - 1) / kFp8Block;
  const bool is_float = g.type == ElementType::kFloat32;
  for (int64_t s = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; s < count; s += stride) {
    const int64_t i = samples > 0 ? static_cast<int64_t>(Hash(7, s) % all) : s;
    const int64_t row = i / g.n, column = i % g.n;
    const int group = group_of_row[row];
    atomicAdd(&result->checked, 1ull);
    if (group < 0) {  // a row of no group: not written
      const auto* bytes = static_cast<const uint8_t*>(g.d) + i * (is_float ? 4 : 2);
      for (int b = 0; b < (is_float ? 4 : 2); ++b) {
        if (bytes[b] != kPattern) atomicAdd(&result->touched, 1ull);
      }
      continue;
    }
    const float found = is_float ? static_cast<const float*>(g.d)[i]
                                 : float(static_cast<const __nv_bfloat16*>(g.d)[i]);
    const int w = g.weights[group];
    double sum = 0, squares = 0;
    for (int64_t block = 0; w >= 0 && block < blocks_k; ++block) {
      const float scale = g.row_scales[row * g.row_stride + block * g.block_stride] *
                          g.matrix_scales[(w * blocks_n + column / kFp8Block) * blocks_k + block];
      for (int64_t k = block * kFp8Block; k < (block + 1) * kFp8Block; ++k) {
        const float term =
            Decode(static_cast<const uint8_t*>(g.rows)[row * g.k + k]) *
            Decode(static_cast<const uint8_t*>(g.matrices)[(w * g.n + column) * g.k + k]);
        sum += double(scale) * term;
        squares += double(scale) * term * scale * term;
      }
    }
    const double error = fabs(found - sum);
    const float rounded = is_float ? float(sum) : float(__nv_bfloat16(float(sum)));
    if (found != rounded) atomicAdd(&result->unequal, 1ull);
    if (!(error <= fabs(sum) / 128 + 0.01 * sqrt(squares))) {  // also for NaN
      if (atomicAdd(&result->wrong, 1ull) == 0) {
        result->first_wrong = static_cast<unsigned long long>(row) << 32 | column;
        result->found = found, result->expected = sum;
      }
    }
  }
}

std::vector<int> GroupOfRow(const std::vector<Group>& groups, int num_rows) {
  std::vector<int> of_row(num_rows, -1);
  for (size_t g = 0; g < groups.size(); ++g) {
    for (int r = 0; r < groups[g].size; ++r) of_row[groups[g].start + r] = static_cast<int>(g);
  }
  return of_row;
}

// Launches once and compares. `is_exact`: results must be equal, not only close.
void Check(const std::string& title, Arrays& arrays, const std::vector<Group>& groups,
           const Variant& v, bool is_exact, int64_t samples = 0, bool says = true) {
  static auto* const result = Allocate<Found>(1);
  const std::string what =
      title + ", " + v.name + (v.type == ElementType::kFloat32 ? ", float32" : ", bf16");
  const int* of_row = arrays.Keep(Upload(GroupOfRow(groups, arrays.num_rows)));
  const Fp8Gemm gemm = arrays.Gemm(groups, v.type);
  // Rows of no group are NaN, so that nothing depends on them. Arrays that are only sampled are
  // used again.
  if (samples == 0)
    SpoilRows<<<arrays.num_rows, 128>>>(arrays.rows, arrays.row_scales, of_row, arrays.num_rows,
                                        arrays.k, arrays.row_stride, arrays.block_stride);
  CHECK(cudaMemset(arrays.out, kPattern, arrays.out_bytes));
  CHECK(cudaMemset(result, 0, sizeof(Found)));
  Finish("fills of " + what);
  CHECK(v.launch(gemm, nullptr));
  Finish(what);
  Compare<<<1056, 128>>>(gemm, of_row, samples, result);
  Finish("comparison of " + what);
  Found found;
  CHECK(cudaMemcpy(&found, result, sizeof(found), cudaMemcpyDeviceToHost));
  // Bytes after the results.
  const int64_t end = int64_t{arrays.num_rows} * arrays.n * element_bytes(v.type);
  std::vector<uint8_t> after(1024);
  CHECK(cudaMemcpy(after.data(), arrays.out + end, after.size(), cudaMemcpyDeviceToHost));
  for (uint8_t byte : after) found.touched += byte != kPattern;
  const bool is_wrong = found.wrong > 0 || found.touched > 0 || (is_exact && found.unequal > 0);
  failures += is_wrong;
  if (!says && !is_wrong) return;
  Say("  %-64s %s: %llu of %llu wrong, %llu not the rounded sum, %llu bytes outside touched",
      what.c_str(), is_wrong ? "WRONG" : "ok", found.wrong, found.checked, found.unequal,
      found.touched);
  if (found.wrong > 0) {
    Say("; row %llu column %llu: %g, expected %g", found.first_wrong >> 32,
        found.first_wrong & 0xFFFFFFFF, found.found, found.expected);
  }
  Say("\n");
}

void CheckAll() {
  std::vector<Variant> variants;
  for (const auto& some :
       {ManyRows<float>(), FewRows<float>(), ManyRows<__nv_bfloat16>(), FewRows<__nv_bfloat16>()}) {
    variants.insert(variants.end(), some.begin(), some.end());
  }
  struct Case {
    std::string name;
    int k, n, num_rows, num_weights;
    std::vector<Group> groups;
  };
  const std::vector<Case> cases = {
      {"one tile", 128, 256, 128, 1, {{0, 128, 0}}},
      {"one row", 128, 128, 5, 1, {{3, 1, 0}}},
      {"k 256", 256, 256, 128, 1, {{0, 128, 0}}},
      {"five blocks of k", 640, 512, 256, 1, {{0, 256, 0}}},
      {"odd sizes and starts",
       1024,
       384,
       700,
       4,
       {{1, 129, 2}, {130, 0, 0}, {133, 63, 3}, {196, 1, 1}, {197, 255, 0}, {455, 200, 2}}},
      {"negative weights",
       384,
       264,
       300,
       2,
       {{0, 100, -1}, {100, 77, 1}, {180, 64, -1}, {250, 50, 0}}},
      {"n 8", 256, 8, 70, 2, {{2, 33, 1}, {35, 31, 0}}},
      {"n 136, many groups", 512, 136, 900, 3,
       [] {
         std::vector<Group> groups;
         for (int i = 0, at = 0; i < 70; ++i) {
           const int size = i * 7 % 23;
           groups.push_back({at, size, i % 3});
           at += size + i % 2;
         }
         return groups;
       }()},
      {"whole turns of stages",
       1536,
       2176,
       3000,
       3,
       {{5, 1001, 0}, {1006, 1200, -1}, {2300, 650, 2}}},
      {"no rows in use", 256, 256, 64, 2, {{0, 0, 0}, {10, 0, 1}}},
      {"more tiles than blocks",
       640,
       2176,
       3000,
       3,
       {{5, 1001, 0}, {1006, 1200, 1}, {2300, 650, 2}}},
  };
  for (const bool is_exact : {true, false}) {
    for (const Case& c : cases) {
      for (const bool has_columns : {false, true}) {
        Arrays arrays(c.num_rows, c.num_weights, c.k, c.n, has_columns, is_exact);
        const std::string title = c.name + (is_exact ? ", exact" : ", any scales") +
                                  (has_columns ? ", columns" : ", rows");
        const int before = failures;
        for (const Variant& v : variants) Check(title, arrays, c.groups, v, is_exact, 0, false);
        Say("%-60s %s\n", title.c_str(), failures == before ? "ok" : "FAILS");
      }
    }
  }
}

// ---- Times

struct Contender {
  std::string name;
  std::function<Problem()> launch;
  double flops, weight_bytes;
  std::vector<double> us = {};
};

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Times contenders in turns, in another random order in each round. The ratio is the median of the
// rounds' ratios to the first contender.
void Time(const std::string& title, std::vector<Contender> contenders, int rounds, int times) {
  static std::mt19937 random(5);
  static cudaEvent_t start = nullptr, end = nullptr;
  if (start == nullptr) {
    CHECK(cudaEventCreate(&start));
    CHECK(cudaEventCreate(&end));
  }
  std::vector<size_t> order(contenders.size());
  std::iota(order.begin(), order.end(), 0);
  for (int round = -1; round < rounds; ++round) {
    std::shuffle(order.begin(), order.end(), random);
    for (size_t i : order) {
      Contender& c = contenders[i];
      CHECK(c.launch());
      CHECK(cudaEventRecord(start));
      for (int t = 0; t < times; ++t) CHECK(c.launch());
      CHECK(cudaEventRecord(end));
      WaitFor(end, title + ", " + c.name);
      float ms;
      CHECK(cudaEventElapsedTime(&ms, start, end));
      if (round >= 0) c.us.push_back(1e3 * ms / times);
    }
  }
  Say("\n%s\n", title.c_str());
  double least = 1e9;
  const Contender* best = nullptr;
  for (const Contender& c : contenders) {
    std::vector<double> ratios;
    for (size_t r = 0; r < c.us.size(); ++r) ratios.push_back(c.us[r] / contenders[0].us[r]);
    const double us = Median(c.us);
    Say("  %-28s %9.1f us (%.1f to %.1f)  %7.1f TFLOP/s  %7.1f GB/s of weights  ratio %.3f\n",
        c.name.c_str(), us, *std::min_element(c.us.begin(), c.us.end()),
        *std::max_element(c.us.begin(), c.us.end()), c.flops / us * 1e-6,
        c.weight_bytes / us * 1e-3, Median(ratios));
    if (&c != &contenders[0] && Median(ratios) < least) least = Median(ratios), best = &c;
  }
  summary += "  " + title + ": " + std::to_string(least) + ", " + best->name + "\n";
}

std::vector<Group> Adjacent(const std::vector<int>& sizes) {
  std::vector<Group> groups;
  int at = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    groups.push_back({at, sizes[i], static_cast<int>(i)});
    at += sizes[i];
  }
  return groups;
}

// The same product in bf16.
struct Bf16Arrays {
  __nv_bfloat16 *rows, *weights, *out;
  int k, n, num_rows, num_weights;
  Bf16Arrays(int num_rows, int num_weights, int k, int n)
      : k(k), n(n), num_rows(num_rows), num_weights(num_weights) {
    const int64_t size_w = int64_t{num_weights} * k * n;
    rows = Allocate<__nv_bfloat16>(int64_t{num_rows} * k);
    weights = Allocate<__nv_bfloat16>(size_w);
    out = Allocate<__nv_bfloat16>(int64_t{num_rows} * n);
    FillBf16<<<1024, 256>>>(rows, int64_t{num_rows} * k, 1);
    FillBf16<<<1024, 256>>>(weights, size_w, 2);
  }
  ~Bf16Arrays() {
    for (void* p : {rows, weights, out}) CHECK(cudaFree(p));
  }
  GroupedGemm Gemm(const Fp8Gemm& like, bool is_few) const {
    return {is_few ? GroupedProduct::kForwardFew : GroupedProduct::kForward,
            ElementType::kBFloat16,
            rows,
            weights,
            out,
            num_rows,
            num_weights,
            k,
            n,
            like.starts,
            like.sizes,
            like.weights,
            like.num_groups,
            like.counter,
            num_sms};
  }
};

void TimeAll(int rounds, bool is_quick) {
  constexpr int kRows = 32768, kGroups = 32;
  const auto many = ManyRows<__nv_bfloat16>(), few = FewRows<__nv_bfloat16>();
  const auto floats = ManyRows<float>();
  for (const auto& shape :
       {std::tuple{"A1", 4096, 3072}, {"A2", 1536, 4096}, {"B1", 7168, 4096}, {"B2", 2048, 7168}}) {
    const char* name = std::get<0>(shape);
    const int k = std::get<1>(shape), n = std::get<2>(shape);
    Arrays arrays(kRows, kGroups, k, n, false, false), columns(kRows, kGroups, k, n, true, false);
    const Bf16Arrays bf16(kRows, kGroups, k, n);
    const double weights = double(kGroups) * k * n;
    const auto add = [&](std::vector<Contender>& to, const std::string& of, const Variant& v,
                         const Fp8Gemm& g, double rows) {
      to.push_back({of + v.name, [=] { return v.launch(g, nullptr); }, 2. * rows * k * n, weights});
    };
    const auto add_bf16 = [&](std::vector<Contender>& to, const std::string& of, const Fp8Gemm& g,
                              double rows, bool is_few) {
      const GroupedGemm gemm = bf16.Gemm(g, is_few);
      to.push_back(
          {of, [=] { return LaunchGroupedGemm(gemm, nullptr); }, 2. * rows * k * n, 2. * weights});
    };
    const std::vector<Group> equal = Adjacent(std::vector<int>(kGroups, kRows / kGroups));
    const std::vector<Group> skewed = Adjacent(SkewedSizes(1.1, kGroups, kRows));
    const std::string title =
        std::string(name) + ": " + std::to_string(k) + " -> " + std::to_string(n) + ", 32 groups, ";
    for (const Variant& v : many) Check(name, arrays, equal, v, false, 20000);
    if (is_quick) {
      const Fp8Gemm g = arrays.Gemm(equal, ElementType::kBFloat16);
      std::vector<Contender> all;
      add_bf16(all, "bf16", g, kRows, false);
      for (const Variant& v : many) add(all, "FP8 ", v, g, kRows);
      Time(title + "32,768 rows", all, rounds, 5);
      return;
    }
    Check(std::string(name) + ", skewed", arrays, skewed, many[0], false, 20000);
    Check(std::string(name) + ", columns", columns, equal, many[0], false, 20000);
    Check(name, arrays, equal, floats[0], false, 20000);

    const Fp8Gemm g = arrays.Gemm(equal, ElementType::kBFloat16);
    const Fp8Gemm of_columns = columns.Gemm(equal, ElementType::kBFloat16);
    const Fp8Gemm of_floats = arrays.Gemm(equal, ElementType::kFloat32);
    std::vector<Contender> all;
    add_bf16(all, "bf16", g, kRows, false);
    for (const Variant& v : many) add(all, "FP8 ", v, g, kRows);
    add(all, "FP8, columns, ", many[0], of_columns, kRows);
    add(all, "FP8 to float32, ", floats[0], of_floats, kRows);
    Time(title + "32,768 rows", all, rounds, 5);

    if (name[1] != '1') continue;
    const Fp8Gemm s = arrays.Gemm(skewed, ElementType::kBFloat16);
    all.clear();
    add(all, "FP8, equal, ", many[0], g, kRows);
    add(all, "FP8, sigma 1.1, ", many[0], s, kRows);
    add(all, "FP8, equal, ", many[1], g, kRows);
    add(all, "FP8, sigma 1.1, ", many[1], s, kRows);
    add_bf16(all, "bf16, equal", g, kRows, false);
    add_bf16(all, "bf16, sigma 1.1", s, kRows, false);
    Time(title + "sigma 1.1", all, rounds, 5);

    for (const int each : {1, 8, 32, 64, 128}) {
      const std::vector<Group> small = Adjacent(std::vector<int>(kGroups, each));
      if (each == 8 || each == 64) {
        for (const Variant& v : few) Check(name, arrays, small, v, false, 20000);
      }
      const Fp8Gemm d = arrays.Gemm(small, ElementType::kBFloat16);
      const double rows = double(kGroups) * each;
      all.clear();
      add_bf16(all, "bf16, as chosen", d, rows, each <= Tuning::kGemmFewRows);
      for (const Variant& v : few) add(all, "FP8 ", v, d, rows);
      add(all, "FP8 ", many[0], d, rows);
      Time(title + std::to_string(each) + " rows per expert", all, std::min(rounds, 9), 5);
    }
  }
}

}  // namespace
}  // namespace moe_a2a

int main(int argc, char** argv) {
  using namespace moe_a2a;
  bool checks = false, times = false, is_quick = false;
  int rounds = 15;
  ReadOptions(
      argc, argv,
      {{"--check", &checks}, {"--quick", &is_quick}, {"--time", &times}, {"--rounds", &rounds}});
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 0));
  num_sms = properties.multiProcessorCount;
  Say("%s, %d SMs\n", properties.name, num_sms);
  CHECK(LoadGroupedGemm());
  CHECK(LoadFp8Gemm());
  const bool is_all = !checks && !is_quick && !times;
  if (checks || is_all) CheckAll();
  if (is_quick) TimeAll(rounds, true);
  if (times || is_all) TimeAll(rounds, false);
  if (!summary.empty()) Say("\nLeast ratios to the first contender:\n%s", summary.c_str());
  Say("%d failures\n", failures);
  return failures != 0;
}
