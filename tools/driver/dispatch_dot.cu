// Times a first product next to the dispatch of its rows, on one GPU. The dispatch sends tokens and copies each landed token
// to its rows on a few SMs; the product waits, tile by tile, for its rows. Build and run:
//   nvcc -std=c++17 -O3 -DNDEBUG -gencode arch=compute_90a,code=sm_90a -Icuda -o dispatch_dot \
//     tools/driver/dispatch_dot.cu cuda/gemm/tensor_map.cc cuda/runtime/driver.cc
//   ./dispatch_dot [--samples 9] [--reps 4] [--gbps 345]
//
// In turns, medians, results compared bit by bit:
//   product            of rows that have landed
//   dispatch, product  the dispatch on all SMs, which is as fast as memory or links allow, then the product
//   next, S SMs        both at once, with the dispatch on S SMs and the product on the others; tokens in the order of the
//                      first groups that need them, or at random
//   first all          the same, but until the rows of the first tiles have landed all SMs copy
// A token is loaded once and stored to its rows. Tokens of other ranks arrive at --gbps, and as many tokens are sent, which
// is one more store.
//
// PREDICTIONS, written before any measurement (H100; A: K 4096, N 3072, B: K 7168, N 4096; 32 groups, 32,768 rows; of
// 2, 4, 8 ranks: 32,768 / 2.2 and 1.5 rows a token, for 2 ranks 4):
// 1. dispatch alone: the greater of memory (rows + tokens + sent tokens at 2.6 TB/s of loads and stores) and links.
//    A: 2 ranks 180, 4: 280, 8: 500 us. B: 300, 490, 870.
// 2. next to the product on 16 SMs, with the product's clusters on the others: the copies take as many bytes as before, at
//    55 GB/s of stores an SM: A 345, 407, 480 (links); B 600, 720, 840. While they run, the product loses 12 % of the SMs
//    and 15 % to the memory: 0.27 of that time; and the first tiles wait for 0.13 of it (0.09 with 8 ranks):
//    A: 1,250 + 0.4 * 345 = 1,390 (sequence 1,430), 4: 1,415 (1,530), 8: 1,425 (1,750).
//    B: 2,860 + 0.4 * 600 = 3,100 (3,160), 4: 3,150 (3,350), 8: 3,165 (3,730).
// 3. first all: 0.08 of the copies less.
// 4. at random: worse than in sequence.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "devices.h"
#include "driver.h"
#include "gemm/launch.cuh"

namespace moe_a2a {
namespace {

using gemm::Epilogue;
using T = __nv_bfloat16;
using Product = gemm::Forward<Epilogue::kActivateGated>;

constexpr int kGroups = 32, kRows = 32768;
constexpr int64_t kTimeoutNs = 2'000'000'000;

template <typename X>
X* Allocate(int64_t size) {
  X* data;
  CHECK(cudaMalloc(&data, std::max<int64_t>(1, size) * sizeof(X)));
  CHECK(cudaMemset(data, 0, size * sizeof(X)));
  return data;
}

int32_t* Upload(const std::vector<int>& values) {
  auto* data = Allocate<int32_t>(values.size());
  CHECK(cudaMemcpy(data, values.data(), values.size() * 4, cudaMemcpyHostToDevice));
  return data;
}

struct Landing {
  const char* from;     // [num_tokens, bytes]
  char *rows, *sent;    // [kRows, bytes], [num_tokens, bytes]
  const int32_t* ends;  // [num_tokens]: of each token's rows in row_of
  const int32_t* row_of;
  uint32_t *landed, *next;
  int num_tokens, num_ranks, bytes;
  double bytes_per_ns;  // of the links; 0: no limit
  int last_blocks;      // these copy all; the others leave when `early_tokens` have been taken
  int early_tokens;
};

constexpr int kCopyStages = 3, kMostCopyWarps = 16, kCopyBytes = 225 << 10;
int CopyWarps(int bytes) { return std::min(kMostCopyWarps, kCopyBytes / (kCopyStages * bytes)); }

// A warp has three tokens in flight: it stores one and loads the next two.
__global__ void __launch_bounds__(32 * kMostCopyWarps, 1) Land(const Landing p) {
  extern __shared__ __align__(128) char stages[];
  __shared__ uint64_t loaded[kMostCopyWarps][kCopyStages];
  __shared__ uint32_t admission;
  start_next();
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) admission = atomicAdd(p.next + 1, 1);
  __syncthreads();
  if (threadIdx.x % 32 != 0) return;
  const bool leaves_early = int(admission) >= p.last_blocks;
  const uint64_t begin = global_time_ns();
  for (uint64_t& barrier : loaded[warp]) init_load_barrier(&barrier);
  fence_load_barriers();
  char* const buffer = stages + int64_t{warp} * kCopyStages * p.bytes;
  int tokens[kCopyStages];
  bool done = false;
  const auto load = [&](int i) {
    int& token = tokens[i % kCopyStages];
    token = p.num_tokens;
    if (done) return;
    token = atomicAdd(p.next, 1);
    done = token >= p.num_tokens || (leaves_early && token >= p.early_tokens);
    if (token >= p.num_tokens) return;
    while ((global_time_ns() - begin) * p.bytes_per_ns < double(token) * p.bytes) {
    }
    const int stage = i % kCopyStages;
    bulk_load(buffer + stage * p.bytes, p.from + int64_t{token} * p.bytes, p.bytes,
              &loaded[warp][stage]);
  };
  const auto each_row = [&](int token, auto&& body) {
    for (int i = token == 0 ? 0 : p.ends[token - 1]; i < p.ends[token]; ++i) body(p.row_of[i]);
  };
  const auto report = [&](int token) {
    each_row(token, [&](int row) {
      asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(p.landed + row / kLandingRows)
                   : "memory");
    });
  };
  for (int i = 0; i < kCopyStages - 1; ++i) load(i);
  int previous = -1;
  for (int i = 0;; ++i) {
    const int stage = i % kCopyStages, token = tokens[stage];
    if (token >= p.num_tokens) break;
    wait_until_loaded(&loaded[warp][stage], i / kCopyStages % 2);
    if (token % p.num_ranks != 0) {
      bulk_store(p.sent + int64_t{token} * p.bytes, buffer + stage * p.bytes, p.bytes);
    }
    each_row(token, [&](int row) {
      bulk_store(p.rows + int64_t{row} * p.bytes, buffer + stage * p.bytes, p.bytes);
    });
    end_store_group();
    if (previous >= 0) {  // the stores of the token before have ended, and its stage is free
      asm volatile("cp.async.bulk.wait_group 1;" ::: "memory");
      report(previous);
    }
    previous = token;
    load(i + kCopyStages - 1);
  }
  wait_until_stored();
  if (previous >= 0) report(previous);
}

struct Options {
  int samples = 9, reps = 4;
  double gbps = 345;
};

// The tokens of rows, in which each group has different tokens, and the order in which tokens land.
struct Routing {
  std::vector<int> ends, row_of;
};

Routing RandomRouting(const std::vector<int>& sizes, int num_tokens, bool is_by_group) {
  std::mt19937 random(7);
  std::vector<std::vector<int>> rows(num_tokens);
  std::vector<int> order(num_tokens);
  std::iota(order.begin(), order.end(), 0);
  int row = 0;
  for (int size : sizes) {
    for (int i = 0; i < size; ++i) {
      if (i < num_tokens) std::swap(order[i], order[i + random() % (num_tokens - i)]);
      rows[order[i % num_tokens]].push_back(row++);
    }
  }
  if (is_by_group) {
    const auto group_of = [&](const std::vector<int>& of_token) {
      int group = 0, end = sizes[0];
      while (!of_token.empty() && of_token[0] >= end) end += sizes[++group];
      return group;
    };
    std::stable_sort(rows.begin(), rows.end(),
                     [&](const auto& x, const auto& y) { return group_of(x) < group_of(y); });
  }
  Routing routing;
  for (const auto& of_token : rows) {
    routing.row_of.insert(routing.row_of.end(), of_token.begin(), of_token.end());
    routing.ends.push_back(routing.row_of.size());
  }
  return routing;
}

struct Program {
  std::string name;
  std::function<void()> launch;
  std::vector<double> us = {};
};

class Bench {
 public:
  Bench(const Options& o, int k, int n) : o_(o), k_(k), n_(n) {
    CHECK(cudaDeviceGetAttribute(&num_sms_, cudaDevAttrMultiProcessorCount, 0));
    tokens_ = Random(int64_t{kRows} * k, 1);
    sent_ = Allocate<T>(int64_t{kRows} * k);
    rows_ = Allocate<T>(int64_t{kRows} * k);
    b_ = Random(int64_t{kGroups} * k * n, 2);
    d_ = Allocate<T>(int64_t{kRows} * n);
    weights_ = Allocate<float>(kRows);
    FillRandom<float><<<64, 256>>>(weights_, kRows, 3);
    std::vector<int> matrices(kGroups);
    std::iota(matrices.begin(), matrices.end(), 0);
    matrices_ = Upload(matrices);
    counters_ = Allocate<uint32_t>(kNumCounters);
    sum_ = Allocate<unsigned long long>(1);
    CHECK((gemm::Load<T, Product>()));
    CHECK(cudaFuncSetAttribute(Land, cudaFuncAttributeMaxDynamicSharedMemorySize, kCopyBytes));
  }
  ~Bench() {
    for (void* data : std::initializer_list<void*>{tokens_, sent_, rows_, b_, d_, weights_,
                                                   matrices_, counters_, sum_}) {
      CHECK(cudaFree(data));
    }
  }

  bool Run(const std::string& title, const std::vector<int>& sizes, int num_ranks, int num_tokens) {
    std::vector<int> starts(kGroups);
    std::exclusive_scan(sizes.begin(), sizes.end(), starts.begin(), 0);
    sizes_ = Upload(sizes), starts_ = Upload(starts);
    const Routing by_group = RandomRouting(sizes, num_tokens, true);
    const Routing at_random = RandomRouting(sizes, num_tokens, false);
    const std::vector<int32_t*> ends = {Upload(by_group.ends), Upload(at_random.ends)},
                                row_of = {Upload(by_group.row_of), Upload(at_random.row_of)};
    p_ = {reinterpret_cast<char*>(tokens_),
          reinterpret_cast<char*>(rows_),
          reinterpret_cast<char*>(sent_),
          ends[0],
          row_of[0],
          counters_ + kLandedCounter,
          counters_ + 1,
          num_tokens,
          num_ranks,
          2 * k_,
          o_.gbps * num_ranks / (num_ranks - 1),
          num_sms_,
          0};
    const auto next_to = [&](int sms, int early_tokens, bool is_random = false) {
      return [this, ends, row_of, sms, early_tokens, is_random] {
        if (is_random) p_.ends = ends[1], p_.row_of = row_of[1];
        Dispatch(early_tokens > 0 ? num_sms_ : sms, sms, early_tokens);
        Multiply(true);
        p_.ends = ends[0], p_.row_of = row_of[0];
      };
    };
    std::vector<Program> programs = {
        {"product", [&] { Multiply(false); }},
        {"dispatch", [&] { Dispatch(num_sms_, num_sms_, 0); }},
        {"dispatch, product",
         [&] {
           Dispatch(num_sms_, num_sms_, 0);
           Multiply(false);
         }},
    };
    const int first = num_tokens / 10;
    for (int sms : {8, 12, 16, 20, 24, 32}) {
      programs.push_back({"next, " + std::to_string(sms), next_to(sms, 0)});
    }
    for (int sms : {12, 16, 20}) {
      programs.push_back({"first all, " + std::to_string(sms), next_to(sms, first)});
      programs.push_back({"first all 2x, " + std::to_string(sms), next_to(sms, 2 * first)});
    }
    programs.push_back({"next, 16, at random", next_to(16, 0, true)});
    std::printf("%s: k %d, n %d, %d rows of %d tokens, %d ranks, largest group %d\n", title.c_str(),
                k_, n_, kRows, num_tokens, num_ranks,
                *std::max_element(sizes.begin(), sizes.end()));
    std::fflush(stdout);
    bool is_right = true;
    programs[1].launch();
    const unsigned long long expected = Result(programs[2].launch);
    // The random order has the same rows in other places only if tokens have the same rows.
    for (size_t i = 3; i + 1 < programs.size(); ++i) {
      if (Result(programs[i].launch) != expected) {
        std::printf("  WRONG: %s\n", programs[i].name.c_str());
        is_right = false;
      }
    }
    std::vector<int> order(programs.size());
    std::iota(order.begin(), order.end(), 0);
    std::mt19937 random(5);
    for (int sample = 0; sample < o_.samples; ++sample) {
      std::shuffle(order.begin(), order.end(), random);
      for (int which : order) {
        Program& p = programs[which];
        p.launch();
        stream_.Begin();
        for (int i = 0; i < o_.reps; ++i) p.launch();
        stream_.End();
        p.us.push_back(stream_.Microseconds() / o_.reps);
      }
    }
    const auto us_of = [&](int i) { return Summary(programs[i].us).median; };
    for (size_t i = 0; i < programs.size(); ++i) {
      const Summary us(programs[i].us);
      std::vector<double> ratios;
      for (int s = 0; s < o_.samples; ++s) ratios.push_back(programs[i].us[s] / programs[2].us[s]);
      std::printf(
          "  %-22s %8.1f us (%.1f to %.1f), %.4f of the sequence, exposed / dispatch %.3f\n",
          programs[i].name.c_str(), us.median, us.least, us.greatest, Summary(ratios).median,
          (us.median - us_of(0)) / us_of(1));
    }
    std::fflush(stdout);
    for (void* data : {sizes_, starts_, ends[0], ends[1], row_of[0], row_of[1]})
      CHECK(cudaFree(data));
    return is_right;
  }

 private:
  // The next tile, the next token, started blocks; the landed rows.
  static constexpr int kLandedCounter = 4, kNumCounters = kLandedCounter + kRows / kLandingRows;

  static T* Random(int64_t count, uint64_t seed) {
    auto* data = Allocate<uint16_t>(count);
    FillRandom<uint16_t><<<1024, 256>>>(data, count, seed);
    return reinterpret_cast<T*>(data);
  }
  void Multiply(bool is_next) {
    const ActivatedProduct activated = {true,    Activation::kSilu, 1,       1,      weights_,
                                        nullptr, nullptr,           nullptr, nullptr};
    GroupedGemm g = {GroupedProduct::kForward,
                     ElementType::kBFloat16,
                     rows_,
                     b_,
                     d_,
                     kRows,
                     kGroups,
                     k_,
                     n_,
                     starts_,
                     sizes_,
                     matrices_,
                     kGroups,
                     reinterpret_cast<int32_t*>(counters_),
                     num_sms_};
    g.activated = &activated;
    if (is_next) g.landing = {counters_ + kLandedCounter, kRows, 0, kTimeoutNs};
    const Problem problem = gemm::Launch<T, Product>(g, stream_);
    CHECK(problem);
  }
  void Dispatch(int blocks, int last_blocks, int early_tokens) {
    CHECK(cudaMemsetAsync(counters_, 0, kNumCounters * 4, stream_));
    p_.last_blocks = last_blocks, p_.early_tokens = early_tokens;
    cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {2, 1,
                              1};  // single blocks would strand halves of the product's clusters
    cudaLaunchConfig_t config = {};
    config.gridDim = blocks;
    config.blockDim = 32 * CopyWarps(2 * k_);
    config.dynamicSmemBytes = kCopyBytes;
    config.stream = stream_;
    config.attrs = &cluster;
    config.numAttrs = 1;
    CHECK(cudaLaunchKernelEx(&config, Land, p_));
  }
  unsigned long long Result(const std::function<void()>& launch) {
    unsigned long long found;
    CHECK(cudaMemsetAsync(d_, 0x7b, int64_t{kRows} * n_ * 2, stream_));
    CHECK(cudaMemsetAsync(rows_, 0x7b, int64_t{kRows} * k_ * 2, stream_));
    launch();
    CHECK(cudaMemsetAsync(sum_, 0, sizeof(*sum_), stream_));
    Fingerprint<<<1024, 256, 0, stream_>>>(reinterpret_cast<uint32_t*>(d_), kRows * n_ / 4, sum_);
    CHECK(cudaMemcpyAsync(&found, sum_, sizeof(found), cudaMemcpyDeviceToHost, stream_));
    CHECK(cudaStreamSynchronize(stream_));
    return found;
  }

  const Options& o_;
  const int k_, n_;
  int num_sms_;
  Landing p_ = {};
  T *tokens_, *sent_, *rows_, *b_, *d_;
  float* weights_;  // [kRows]
  int32_t *starts_, *sizes_, *matrices_;
  uint32_t* counters_;
  unsigned long long* sum_;
  TimedStream stream_;
};

int Main(int argc, char** argv) {
  Options o;
  ReadOptions(argc, argv, {{"--samples", &o.samples}, {"--reps", &o.reps}, {"--gbps", &o.gbps}});
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 0));
  std::printf("%s, %d SMs\n", properties.name, properties.multiProcessorCount);
  bool is_right = true;
  const std::vector<int> equal(kGroups, kRows / kGroups), skewed = SkewedSizes(1.1, kGroups, kRows);
  for (const auto& [name, k, n] : {std::tuple{"A", 4096, 3072}, {"B", 7168, 4096}}) {
    Bench bench(o, k, n);
    for (const auto& [ranks, tokens] : {std::pair{2, 8160}, {4, 14746}, {8, 21845}}) {
      is_right = bench.Run(name, equal, ranks, tokens) && is_right;
    }
    is_right = bench.Run(std::string(name) + ", sigma 1.1", skewed, 4, 14746) && is_right;
  }
  std::printf("%s\n", is_right ? "all results are equal" : "results differ");
  return is_right ? 0 : 1;
}

}  // namespace
}  // namespace moe_a2a

int main(int argc, char** argv) {
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  return moe_a2a::Main(argc, argv);
}
