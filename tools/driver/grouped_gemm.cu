// Checks and times the kernels of the grouped GEMM without XLA. Build and run:
//   nvcc -std=c++17 -O3 -DNDEBUG -gencode arch=compute_90a,code=sm_90a -Icuda -o grouped_gemm \
//     tools/driver/grouped_gemm.cu cuda/gemm/tensor_map.cc cuda/runtime/driver.cc
//   grouped_gemm check [forward|transposed|gradient|few]   results against a plain kernel
//   grouped_gemm time                                      the table
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

// Not linked: two files with the same kernels would set attributes of different copies.
#include "gemm/grouped_gemm.cu"

using namespace moe_a2a;
using namespace moe_a2a::gemm;

#define CHECK(call)                                                        \
  do {                                                                     \
    const Problem problem_ = (call);                                       \
    if (!problem_.empty()) {                                               \
      std::printf("line %d: %s: %s\n", __LINE__, #call, problem_.c_str()); \
      std::fflush(stdout);                                                 \
      std::_Exit(1);                                                       \
    }                                                                      \
  } while (false)
#define CUDA(call) CHECK(gemm::ProblemOf(call))

using P = GroupedProduct;
const char* NameOf(P p) {
  switch (p) {
    case P::kForward: return "forward";
    case P::kForwardFew: return "few";
    case P::kTransposed: return "transposed";
    default: return "gradient";
  }
}

constexpr uint16_t kPoison = 0x7b7b;  // a finite number in both types

__host__ __device__ inline uint32_t hash(uint32_t x) {
  x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu, x ^= x >> 16;
  return x;
}

template <typename T>
__global__ void fill(T* data, int64_t size, uint32_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < size;
       i += int64_t{gridDim.x} * blockDim.x) {
    const uint32_t h = hash(static_cast<uint32_t>(i) ^ hash(seed + static_cast<uint32_t>(i >> 32)));
    float sum = 0;
    for (int b = 0; b < 4; ++b) sum += ((h >> (8 * b)) & 255) / 255.f - 0.5f;
    data[i] = T(sum * 1.7f);
  }
}

template <typename T>
__global__ void fill_nan(T* data, int64_t size) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < size;
       i += int64_t{gridDim.x} * blockDim.x) {
    data[i] = T(NAN);
  }
}

struct Result {
  unsigned long long wrong, first, touched;
  float worst;
  unsigned int where[2][4];  // of wrong results: by row in the group and column, modulo 256, in 64s
};

// Compares samples of the result with plain sums.
template <typename T>
__global__ void compare(GroupedGemm g, int64_t samples, int64_t total, Result* result) {
  for (int64_t s = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; s < samples;
       s += int64_t{gridDim.x} * blockDim.x) {
    const int64_t i =
        samples == total
            ? s
            : static_cast<int64_t>((uint64_t(hash(s)) << 32 | hash(s ^ 0x9e3779b9u)) % total);
    const T* a = static_cast<const T*>(g.a);
    const T* b = static_cast<const T*>(g.b);
    const T* d = static_cast<const T*>(g.d);
    float sum = 0, scale = 0;
    bool is_untouched = true;
    int64_t row_in_group = 0;
    const auto add = [&](float x, float y) { sum += x * y, scale += x * y * (x * y); };
    if (g.product == P::kWeightGradient) {
      const int64_t l = i / (g.k * g.n), k = i / g.n % g.k, n = i % g.n;
      row_in_group = k;
      for (int j = 0; j < g.num_groups; ++j) {
        if (g.weights[j] != l) continue;
        is_untouched = false;
        for (int64_t r = g.starts[j]; r < g.starts[j] + g.sizes[j]; ++r) {
          add(float(a[r * g.k + k]), float(b[r * g.n + n]));
        }
      }
    } else {
      const bool is_transposed = g.product == P::kTransposed;
      const int64_t columns = is_transposed ? g.k : g.n, inner = is_transposed ? g.n : g.k;
      const int64_t r = i / columns, c = i % columns;
      for (int j = 0; j < g.num_groups; ++j) {
        if (r < g.starts[j] || r >= g.starts[j] + g.sizes[j]) continue;
        is_untouched = false;
        row_in_group = r - g.starts[j];
        if (g.weights[j] < 0) continue;
        const T* w = b + g.weights[j] * g.k * g.n;
        for (int64_t x = 0; x < inner; ++x) {
          add(float(a[r * inner + x]), float(is_transposed ? w[c * g.n + x] : w[x * g.n + c]));
        }
      }
    }
    const float found = float(d[i]);
    bool is_wrong;
    if (is_untouched) {
      is_wrong = reinterpret_cast<const uint16_t*>(d)[i] != kPoison;
      if (is_wrong) atomicAdd(&result->touched, 1);
    } else if (isnan(sum) || isnan(found)) {
      is_wrong = isnan(sum) != isnan(found);
    } else {
      const float error = fabsf(found - sum) / (fabsf(sum) / 200 + 1e-3f * sqrtf(scale) +
                                                (std::is_same_v<T, __half> ? 3.1e-8f : 1e-30f));
      is_wrong = sum == 0 && scale == 0 ? found != 0 : !(error <= 1);
      if (sum != 0) atomicMax(reinterpret_cast<int*>(&result->worst), __float_as_int(error));
    }
    if (is_wrong) {
      if (atomicAdd(&result->wrong, 1) < 3) {
        printf("  at %lld of rows of %d: %g instead of %g\n", (long long)i,
               g.product == P::kTransposed ? (int)g.k : (int)g.n, found, is_untouched ? -1e9 : sum);
      }
      atomicMin(&result->first, static_cast<unsigned long long>(i));
      atomicAdd(&result->where[0][row_in_group % 256 / 64], 1);
      atomicAdd(&result->where[1][i % (g.product == P::kTransposed ? g.k : g.n) % 256 / 64], 1);
    }
  }
}

template <typename X>
X* Allocate(int64_t size) {
  X* data;
  CUDA(cudaMalloc(&data, std::max<int64_t>(1, size) * sizeof(X)));
  return data;
}

int32_t* Upload(const std::vector<int>& values) {
  int32_t* data = Allocate<int32_t>(values.size());
  CUDA(cudaMemcpy(data, values.data(), values.size() * 4, cudaMemcpyHostToDevice));
  return data;
}

struct Groups {
  std::vector<int> starts, sizes, weights;
};

// One after the other, weights in order; with_tail: a group for the rows behind them.
Groups InOrder(const std::vector<int>& sizes, int num_rows, bool with_tail) {
  Groups g;
  int start = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    g.starts.push_back(start), g.sizes.push_back(sizes[i]), g.weights.push_back(i);
    start += sizes[i];
  }
  if (with_tail) {
    g.starts.push_back(start), g.sizes.push_back(num_rows - start), g.weights.push_back(-1);
  }
  return g;
}

std::vector<P> products = {P::kForward, P::kForwardFew, P::kTransposed, P::kWeightGradient};
int num_sms = 132;
int failures = 0, passed = 0;

Problem LaunchProduct(const GroupedGemm& g) { return LaunchGroupedGemm(g, nullptr); }

// Recomputes one result on the host.
template <typename T>
void Recompute(const GroupedGemm& g, int64_t i) {
  std::vector<int32_t> starts(g.num_groups), sizes(g.num_groups), weights(g.num_groups);
  CUDA(cudaMemcpy(starts.data(), g.starts, 4 * g.num_groups, cudaMemcpyDeviceToHost));
  CUDA(cudaMemcpy(sizes.data(), g.sizes, 4 * g.num_groups, cudaMemcpyDeviceToHost));
  CUDA(cudaMemcpy(weights.data(), g.weights, 4 * g.num_groups, cudaMemcpyDeviceToHost));
  const auto read = [](const void* data, int64_t first, int64_t step, int64_t count) {
    std::vector<T> values(count);
    if (count > 0) {
      CUDA(cudaMemcpy2D(values.data(), 2, static_cast<const T*>(data) + first, step * 2, 2, count,
                        cudaMemcpyDeviceToHost));
    }
    return values;
  };
  const auto dot = [](const std::vector<T>& a, const std::vector<T>& b) {
    double sum = 0;
    for (size_t j = 0; j < a.size(); ++j) sum += double(float(a[j])) * double(float(b[j]));
    return sum;
  };
  double sum = 0;
  int group = -1;
  int64_t row = 0, column = 0;
  for (int j = 0; j < g.num_groups; ++j) {
    if (g.product == P::kWeightGradient) {
      const int64_t l = i / (g.k * g.n);
      row = i / g.n % g.k, column = i % g.n;
      if (weights[j] != l) continue;
      group = j;
      sum += dot(read(g.a, starts[j] * g.k + row, g.k, sizes[j]),
                 read(g.b, starts[j] * g.n + column, g.n, sizes[j]));
    } else {
      const bool is_transposed = g.product == P::kTransposed;
      const int64_t columns = is_transposed ? g.k : g.n, inner = is_transposed ? g.n : g.k;
      const int64_t r = i / columns;
      column = i % columns;
      if (r < starts[j] || r >= starts[j] + sizes[j]) continue;
      group = j, row = r - starts[j];
      if (weights[j] < 0) continue;
      const int64_t w = int64_t{weights[j]} * g.k * g.n;
      sum =
          dot(read(g.a, r * inner, 1, inner), is_transposed ? read(g.b, w + column * g.n, 1, inner)
                                                            : read(g.b, w + column, g.n, inner));
    }
  }
  std::printf("  first: group %d (size %d), row %lld, column %lld: kernel %g, host in double %g\n",
              group, group < 0 ? 0 : sizes[group], (long long)row, (long long)column,
              float(read(g.d, i, 1, 1)[0]), sum);
}

template <typename T>
bool Compare(const GroupedGemm& g, int64_t samples, const std::string& name, bool quiet = false) {
  const int64_t total = g.product == P::kWeightGradient ? g.num_weights * g.k * g.n
                        : g.product == P::kTransposed   ? g.num_rows * g.k
                                                        : g.num_rows * g.n;
  static Result* result = nullptr;
  if (result == nullptr) CUDA(cudaMallocManaged(&result, sizeof(Result)));
  CUDA(cudaDeviceSynchronize());
  *result = {0, ~0ull, 0, 0, {}};
  if (total > 0) {
    const int64_t n = std::min(samples, total);
    compare<T><<<std::min<int64_t>((n + 127) / 128, 4096), 128>>>(g, n, total, result);
  }
  CUDA(cudaDeviceSynchronize());
  const bool ok = result->wrong == 0;
  failures += !ok;
  passed += ok;
  if (failures > 60) {
    std::printf("too many failures\n");
    std::_Exit(1);
  }
  if (!ok || !quiet) {
    std::printf("%s %-10s %-4s %s: worst %.3f", ok ? "ok    " : "WRONG ", NameOf(g.product),
                g.type == ElementType::kBFloat16 ? "bf16" : "f16", name.c_str(), result->worst);
    if (!ok) {
      const int64_t columns = g.product == P::kTransposed ? g.k : g.n;
      std::printf("; %llu wrong (%llu touched), first at row %lld column %lld", result->wrong,
                  result->touched, static_cast<long long>(result->first / columns),
                  static_cast<long long>(result->first % columns));
    }
    std::printf("\n");
    if (!ok) {
      const auto& w = result->where;
      std::printf("  wrong by row %% 256 / 64: %u %u %u %u; by column: %u %u %u %u\n", w[0][0],
                  w[0][1], w[0][2], w[0][3], w[1][0], w[1][1], w[1][2], w[1][3]);
      Recompute<T>(g, result->first);
    }
    std::fflush(stdout);
  }
  return ok;
}

template <typename T>
void CheckOne(P product, const std::string& name, const Groups& groups, int num_rows,
              int num_weights, int k, int n, int sms, int nan_group = -1,
              const std::function<Problem(const GroupedGemm&)>& launch = LaunchProduct) {
  const bool is_gradient = product == P::kWeightGradient, is_transposed = product == P::kTransposed;
  const int64_t size_a = int64_t{num_rows} * (is_transposed ? n : k);
  const int64_t size_w = int64_t{num_weights} * k * n;
  const int64_t size_b = is_gradient ? int64_t{num_rows} * n : size_w;
  const int64_t size_d = is_gradient ? size_w : int64_t{num_rows} * (is_transposed ? k : n);
  T *a = Allocate<T>(size_a), *b = Allocate<T>(size_b), *d = Allocate<T>(size_d + 64);
  // NaN wherever no group of a weight is: a tail, weights that no group names.
  const auto fill_rows = [&](T* rows, int64_t columns, uint32_t seed) {
    fill_nan<<<256, 256>>>(rows, int64_t{num_rows} * columns);
    for (size_t i = 0; i < groups.sizes.size(); ++i) {
      const int64_t size = groups.sizes[i] * columns;
      if (groups.weights[i] < 0 || static_cast<int>(i) == nan_group || size == 0) continue;
      fill<<<256, 256>>>(rows + groups.starts[i] * columns, size, seed + i);
    }
  };
  fill_rows(a, is_transposed ? n : k, 1);
  if (is_gradient) {
    fill_rows(b, n, 1000);
  } else {
    fill_nan<<<256, 256>>>(b, size_b);
    for (size_t i = 0; i < groups.sizes.size(); ++i) {
      if (groups.weights[i] < 0) continue;
      fill<<<256, 256>>>(b + int64_t{groups.weights[i]} * k * n, int64_t{k} * n, 77 + i);
    }
  }
  CUDA(cudaMemset(d, kPoison & 255, (size_d + 64) * 2));
  GroupedGemm g = {product,
                   std::is_same_v<T, __half> ? ElementType::kFloat16 : ElementType::kBFloat16,
                   a,
                   b,
                   d,
                   num_rows,
                   num_weights,
                   k,
                   n,
                   Upload(groups.starts),
                   Upload(groups.sizes),
                   Upload(groups.weights),
                   static_cast<int>(groups.sizes.size()),
                   Allocate<int32_t>(1),
                   sms};
  CHECK(WhyNotGroupedGemm(g.num_rows, g.num_groups, g.k, g.n));
  if (const Problem problem = launch(g); !problem.empty()) {
    std::printf("FAILED %s %s: launch: %s\n", NameOf(product), name.c_str(), problem.c_str());
    std::fflush(stdout);
    std::_Exit(1);
  }
  const cudaError_t error = cudaDeviceSynchronize();
  if (error != cudaSuccess) {
    std::printf("FAILED %s %s: %s\n", NameOf(product), name.c_str(), cudaGetErrorString(error));
    std::fflush(stdout);
    std::_Exit(1);
  }
  Compare<T>(g, int64_t{1} << 40, name, true);
  std::vector<uint16_t> behind(64);
  CUDA(cudaMemcpy(behind.data(), d + size_d, 128, cudaMemcpyDeviceToHost));
  for (uint16_t x : behind) {
    if (x != kPoison) {
      ++failures;
      std::printf("WRONG  written behind the result\n");
      break;
    }
  }
  for (void* p : {(void*)a, (void*)b, (void*)d, (void*)g.starts, (void*)g.sizes, (void*)g.weights,
                  (void*)g.counter}) {
    CUDA(cudaFree(p));
  }
}

template <typename T>
void CheckType() {
  const std::vector<std::pair<std::string, std::vector<int>>> cases = {
      {"one group", {128}},
      {"one row each", {1, 1, 1, 1, 1}},
      {"unaligned", {130, 0, 1, 64, 257, 63, 65, 0, 100}},
      {"all empty", {0, 0, 0}},
      {"first and last empty", {0, 300, 5, 0}},
      {"40 groups", {3, 7, 11, 0, 2, 1, 40, 9, 0, 0, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14,
                     3, 7, 11, 0, 2, 1, 40, 9, 0, 0, 5, 6, 7, 8, 9, 10, 11, 12, 13, 140}},
      {"large", {700, 1300, 0, 33, 514}},
  };
  for (const auto& [name, sizes] : cases) {
    const int used = std::accumulate(sizes.begin(), sizes.end(), 0);
    for (const auto& [k, n] : {std::pair{64, 256}, {136, 264}, {512, 776}, {8, 8}}) {
      for (const P product : products) {
        const bool is_gradient = product == P::kWeightGradient;
        for (const bool with_tail : {false, true}) {
          if (is_gradient && with_tail) continue;
          const int rows = used + 37;
          Groups groups = InOrder(sizes, rows, with_tail);
          // Matrices of weights in another order, and one that nobody names.
          const int num = sizes.size();
          for (int i = 0; i < num; ++i) groups.weights[i] = (i * 3 + 1) % num;
          if (num % 3 == 0) {
            for (int i = 0; i < num; ++i) groups.weights[i] = num - i;
          }
          char text[200];
          std::snprintf(text, sizeof text, "%s, k %d, n %d%s", name.c_str(), k, n,
                        with_tail ? ", zero tail" : "");
          CheckOne<T>(product, text, groups, rows, num + 1, k, n, 132,
                      is_gradient && num > 2 ? 1 : -1);
        }
      }
    }
    std::printf("%s: %d passed so far\n", name.c_str(), passed);
    std::fflush(stdout);
  }
  for (const P product : products) {
    const Groups groups = InOrder({700, 1300, 0, 33, 514}, 2600, false);
    for (const int sms : {1, 2, 7}) {
      CheckOne<T>(product, std::to_string(sms) + " SMs", groups, 2600, 5, 512, 776, sms);
    }
    CheckOne<T>(product, "no rows", InOrder({0, 0}, 0, false), 0, 2, 64, 64, 132);
  }
}

// ---- Boxes of ragged tensors.

__global__ void ragged_boxes(const __grid_constant__ CUtensorMap from,
                             const __grid_constant__ CUtensorMap to, int start, int size,
                             int* wrong) {
  MOE_A2A_DYNAMIC_SHARED(1024, char, memory);
  uint64_t& barrier = *reinterpret_cast<uint64_t*>(memory + kBoxBytes);
  if (threadIdx.x == 0) {
    init_barrier(&barrier, 1);
    fence_load_barriers();
  }
  __syncthreads();
  const Box box = {0, kRaggedRows - size, start + size, kRaggedRows};
  if (threadIdx.x == 0) {
    expect_bytes(&barrier, kBoxBytes);
    load_box(memory, &from, box, &barrier);
  }
  wait_for(&barrier, 0);
  for (int i = threadIdx.x; i < 64 * 64; i += 32) {
    const int row = i / 64, column = i % 64;
    const int chunk = column / 8 ^ row % 8;
    const float x =
        float(reinterpret_cast<__nv_bfloat16*>(memory)[row * 64 + chunk * 8 + column % 8]);
    const float expected = row < size ? (start + row) % 64 + column / 64.f : 0;
    if (!(fabsf(x - expected) <= expected / 100)) {
      if (atomicAdd(wrong, 1) == 0) {
        printf("ragged load: row %d column %d is %f, not %f\n", row, column, x, expected);
      }
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int row = 0; row < 64; row += 16) {
      store_box(&to, {0, kRaggedRows - size + row, start + size, kRaggedRows}, memory + row * 128);
    }
    end_store_group();
    wait_until_stored();
  }
}

__global__ void fill_ragged(__nv_bfloat16* data, int rows, int first, int last) {
  for (int i = threadIdx.x; i < rows * 64; i += blockDim.x) {
    const int row = i / 64;
    data[i] =
        row >= first && row < last ? __nv_bfloat16(row % 64 + i % 64 / 64.f) : __nv_bfloat16(NAN);
  }
}

void CheckBoxes() {
  const int rows = 300;
  auto* from = Allocate<__nv_bfloat16>(rows * 64);
  auto* to = Allocate<__nv_bfloat16>(rows * 64);
  int* wrong;
  CUDA(cudaMallocManaged(&wrong, 4));
  for (const auto& [start, size] :
       {std::pair{0, 64}, {3, 64}, {3, 10}, {250, 50}, {299, 1}, {17, 33}}) {
    *wrong = 0;
    fill_ragged<<<1, 256>>>(from, rows, start, start + size);
    CUDA(cudaMemset(to, kPoison & 255, rows * 128));
    CUtensorMap load, store;
    const TensorMap map = {ElementType::kBFloat16, from, 64, true, 0, 0, 64, 64};
    CHECK(EncodeTensorMap(map, &load));
    const TensorMap map_to = {ElementType::kBFloat16, to, 64, true, 0, 0, 64, 16};
    CHECK(EncodeTensorMap(map_to, &store));
    ragged_boxes<<<1, 32, kBoxBytes + 64>>>(load, store, start, size, wrong);
    CUDA(cudaDeviceSynchronize());
    std::vector<uint16_t> a(rows * 64), b(rows * 64);
    CUDA(cudaMemcpy(a.data(), from, rows * 128, cudaMemcpyDeviceToHost));
    CUDA(cudaMemcpy(b.data(), to, rows * 128, cudaMemcpyDeviceToHost));
    int wrong_stored = 0;
    for (int i = 0; i < rows * 64; ++i) {
      const int row = i / 64;
      wrong_stored += b[i] != (row >= start && row < start + size ? a[i] : kPoison);
    }
    std::printf("%s ragged boxes: start %d, size %d: %d loaded and %d stored elements are wrong\n",
                *wrong + wrong_stored == 0 ? "ok    " : "WRONG ", start, size, *wrong,
                wrong_stored);
    std::fflush(stdout);
    failures += *wrong + wrong_stored != 0;
  }
}

// ---- Times.

// Reads all of an array, for the bandwidth of memory.
__global__ void read_all(const uint4* data, int64_t size, uint32_t* out) {
  uint32_t sum = 0;
#pragma unroll 8
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < size;
       i += int64_t{gridDim.x} * blockDim.x) {
    const uint4 x = data[i];
    sum ^= x.x ^ x.y ^ x.z ^ x.w;
  }
  if (sum == 0x12345678) *out = sum;
}

struct Variant {
  std::string name;
  P product;
  std::function<Problem(const GroupedGemm&)> launch;
};

template <typename F>
Variant Of(const std::string& name, P product) {
  CUDA((Load<__nv_bfloat16, F>()));
  return {name, product, [](const GroupedGemm& g) { return Launch<__nv_bfloat16, F>(g, nullptr); }};
}
template <typename F>
Variant OnSms(const std::string& name, P product, int sms) {
  return {name, product, [sms](const GroupedGemm& g) {
            GroupedGemm copy = g;
            copy.num_sms = sms;
            return Launch<__nv_bfloat16, F>(copy, nullptr);
          }};
}

double TimeOf(const std::function<Problem()>& launch, double target_ms) {
  static cudaEvent_t start = nullptr, end = nullptr;
  if (start == nullptr) {
    CUDA(cudaEventCreate(&start));
    CUDA(cudaEventCreate(&end));
  }
  const auto run = [&](int times) {
    CUDA(cudaEventRecord(start));
    for (int i = 0; i < times; ++i) CHECK(launch());
    CUDA(cudaEventRecord(end));
    CUDA(cudaEventSynchronize(end));
    float ms;
    CUDA(cudaEventElapsedTime(&ms, start, end));
    return ms / times;
  };
  const double first = run(2);
  return 1e3 * run(std::max(3, static_cast<int>(target_ms / first)));
}

std::vector<int> SkewedSizes(double sigma, int num, int total, int seed) {
  // Tokens choose 8 of 2 * num experts; the first `num` are here.
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> uniform(1e-12, 1);
  std::vector<double> bias(2 * num);
  for (double& b : bias) b = sigma * normal(random);
  std::vector<double> counts(num);
  for (int token = 0; token < 4096; ++token) {
    std::vector<std::pair<double, int>> scores;
    for (int e = 0; e < 2 * num; ++e)
      scores.push_back({bias[e] - std::log(-std::log(uniform(random))), e});
    std::partial_sort(scores.begin(), scores.begin() + 8, scores.end(), std::greater<>());
    for (int i = 0; i < 8; ++i) {
      if (scores[i].second < num) ++counts[scores[i].second];
    }
  }
  const double sum = std::accumulate(counts.begin(), counts.end(), 0.);
  std::vector<int> sizes;
  double before = 0;
  int placed = 0;
  for (double c : counts) {
    before += c;
    const int end = std::lround(before / sum * total);
    sizes.push_back(end - placed);
    placed = end;
  }
  return sizes;
}

struct Arrays {
  int num_weights, num_rows, k, n;
  __nv_bfloat16 *rows, *ct, *w, *out, *d_rows, *d_w;
  int32_t* counter;

  Arrays(int num_weights, int num_rows, int k, int n)
      : num_weights(num_weights), num_rows(num_rows), k(k), n(n) {
    const int64_t size_w = int64_t{num_weights} * k * n;
    rows = Allocate<__nv_bfloat16>(int64_t{num_rows} * k);
    ct = Allocate<__nv_bfloat16>(int64_t{num_rows} * n);
    out = Allocate<__nv_bfloat16>(int64_t{num_rows} * n);
    d_rows = Allocate<__nv_bfloat16>(int64_t{num_rows} * k);
    w = Allocate<__nv_bfloat16>(size_w);
    d_w = Allocate<__nv_bfloat16>(size_w);
    counter = Allocate<int32_t>(1);
    fill<<<1024, 256>>>(rows, int64_t{num_rows} * k, 1);
    fill<<<1024, 256>>>(ct, int64_t{num_rows} * n, 2);
    fill<<<1024, 256>>>(w, size_w, 3);
  }
  ~Arrays() {
    for (void* p : {(void*)rows, (void*)ct, (void*)out, (void*)d_rows, (void*)w, (void*)d_w,
                    (void*)counter}) {
      CUDA(cudaFree(p));
    }
  }
  GroupedGemm Gemm(P product, const Groups& groups) const {
    const bool is_gradient = product == P::kWeightGradient;
    const bool is_transposed = product == P::kTransposed;
    return {product,
            ElementType::kBFloat16,
            is_transposed ? ct : rows,
            is_gradient ? ct : w,
            is_gradient     ? d_w
            : is_transposed ? d_rows
                            : out,
            num_rows,
            num_weights,
            k,
            n,
            Upload(groups.starts),
            Upload(groups.sizes),
            Upload(groups.weights),
            static_cast<int>(groups.sizes.size()),
            counter,
            num_sms};
  }
};

void Time(const std::string& title, const Arrays& arrays, const std::vector<int>& sizes,
          const std::vector<Variant>& variants, int rounds = 3, double target_ms = 15) {
  const Groups groups = InOrder(sizes, arrays.num_rows, false);
  const double used = std::accumulate(sizes.begin(), sizes.end(), 0.);
  const double flops = 2. * used * arrays.k * arrays.n;
  const double weight_bytes = 2. * arrays.num_weights * arrays.k * arrays.n;
  std::printf("\n%s: %d groups, %d rows, k %d, n %d; largest group %d\n", title.c_str(),
              static_cast<int>(sizes.size()), static_cast<int>(used), arrays.k, arrays.n,
              *std::max_element(sizes.begin(), sizes.end()));
  std::vector<std::vector<double>> times(variants.size());
  std::vector<GroupedGemm> gemms;
  for (const Variant& v : variants) gemms.push_back(arrays.Gemm(v.product, groups));
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
                               : g.num_rows * (g.product == P::kTransposed ? g.k : g.n);
    CUDA(cudaMemset(g.d, kPoison & 255, size_d * 2));
    CHECK(variants[i].launch(gemms[i]));
    const bool expects_wrong = variants[i].name[0] == '(';
    const bool ok =
        !expects_wrong && Compare<__nv_bfloat16>(gemms[i], 20000, variants[i].name, true);
    const double us = times[i][times[i].size() / 2];
    std::printf("  %-12s %-28s %9.1f us (%.1f to %.1f)  %6.1f TFLOP/s  %7.1f GB/s of weights %s\n",
                NameOf(variants[i].product), variants[i].name.c_str(), us, times[i].front(),
                times[i].back(), flops / us * 1e-6, weight_bytes / us * 1e-3,
                ok              ? ""
                : expects_wrong ? "(wrong)"
                                : "WRONG");
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
  {
    const Arrays arrays(32, rows, 4096, 3072);
    Time("A GEMM 1", arrays, equal, products, 5);
    // Zeros need little power: how much of a time is the clock's?
    CUDA(cudaMemset(arrays.rows, 0, int64_t{2} * rows * 4096));
    Time("A GEMM 1, zeros", arrays, equal, {Of<Forward>("rows are 0", f)});
    fill<<<1024, 256>>>(arrays.rows, int64_t{rows} * 4096, 1);
    Time("A GEMM 1, sigma 1.1", arrays, SkewedSizes(1.1, 32, rows, 1), products);
    std::vector<int> hot(32, 745);  // 4 groups four times as large
    for (int i = 0; i < 4; ++i) hot[i * 8 + 3] = 2977;
    Time("A GEMM 1, 4 hot groups", arrays, hot, products);
    Time("A GEMM 1, fewer SMs", arrays, equal,
         {OnSms<Forward>("124", f, 124), OnSms<Forward>("108", f, 108)});
    for (const int each : {4, 16, 32, 64, 128, 256}) {
      Time("A GEMM 1, few rows", arrays, std::vector<int>(32, each),
           {Of<ForwardFew>("256x32, 5 stages", few), Of<Few64>("256x64, 4 stages", few),
            Of<Forward>("as for many rows", f)},
           3, 4);
    }
  }
  for (const auto& [name, k, n] :
       {std::tuple{"A GEMM 2", 1536, 4096}, {"B GEMM 1", 7168, 4096}, {"B GEMM 2", 2048, 7168}}) {
    const Arrays arrays(32, rows, k, n);
    Time(name, arrays, equal, products);
  }
}

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "check";
  cudaDeviceProp properties;
  CUDA(cudaGetDeviceProperties(&properties, 0));
  num_sms = properties.multiProcessorCount;
  std::printf("%s, %d SMs\n", properties.name, num_sms);
  CUDA(LoadGroupedGemm());
  if (argc > 2) {
    std::vector<P> named;
    for (P p : products) {
      if (std::string(NameOf(p)) == argv[2]) named.push_back(p);
    }
    products = named;
  }
  if (what == "boxes" || (what == "check" && argc == 2)) CheckBoxes();
  if (what == "check") {
    CheckType<__nv_bfloat16>();
    CheckType<__half>();
  }
  if (what == "time") TimeAll();
  std::printf("%s: %d passed, %d failures\n", what.c_str(), passed, failures);
  return failures != 0;
}
