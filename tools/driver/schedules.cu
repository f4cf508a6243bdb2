// Times the schedules of a whole MoE layer on one GPU, without XLA and Python: which orders of kernels on two streams
// hide an exchange, and how much of the exchange stays exposed. The kernels are those of rank 0. A paced sender
// (player.cuh) plays the other ranks.
//
// Build at the root of the repository, in one line; benchmarks/schedules.py runs it and writes the record:
//
//   nvcc -std=c++17 -O3 -DNDEBUG -gencode arch=compute_90a,code=sm_90a -Icuda -o build/schedules_bench
//        tools/driver/schedules.cu cuda/kernels/*.cu cuda/kernels/*.cc cuda/colocated/*.cu cuda/colocated/*.cc
//        cuda/runtime/*.cc cuda/gemm/grouped_gemm.cu cuda/gemm/tensor_map.cc
//
//   schedules_bench --layers FILE,FILE --json FILE [--budgets 8,16,24,32] [--rate 345] [--blocks 8] [--sms 64]
//                   [--samples 5] [--reps 3] [--timeout 10] [--seconds 240]
//
// The forward pass of a layer is dispatch, GEMM, SwiGLU, GEMM and weighted combine. The backward pass is the weighted
// dispatch of the cotangents, two GEMMs with transposed weights around the gradient of SwiGLU, two weight gradients, and
// the combine of the token gradients. benchmarks/schedules.py computes the routing with the package and writes it, with
// the sizes of the layer, to a file. Inputs are random, and no input is zero.
//
// Before the driver times anything, it checks rows, sums and samples of products. It also computes every schedule into
// poisoned arrays and compares the results, bit for bit, with those of the same layer without overlap.
//
// Figures are medians over samples. All schedules take turns, because a GPU's clock falls while it is hot. All of them
// run next to the player's blocks, also when the experts run alone, and each of these blocks holds a multiprocessor. So a
// figure is that of a GPU with fewer multiprocessors: compare figures of one run with each other.
//
// The figures do not include routing, launches by XLA, and the limit of the link for what rank 0 sends. Rank 0's stores
// stay in the memory of this GPU, which carries them in addition to what the player stores.
//
//   --rate     GB/s that the played ranks together send to rank 0
//   --blocks   blocks of the player, at most 8
//   --sms      multiprocessors of an exchange with no products next to it
//   --budgets  multiprocessors of an exchange with products next to it
//   --seconds  time after which no new shape or number of ranks begins
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "calls/combine.h"
#include "calls/dispatch.h"
#include "calls/weighted_dispatch.h"
#include "compare.cuh"
#include "driver.h"
#include "gemm/grouped_gemm.h"
#include "kernels/grid.h"
#include "kernels/launch.h"
#include "player.cuh"
#include "runtime/devices.h"
#include "runtime/workspace.h"

namespace moe_a2a {
namespace {

double Seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// ---- Command line

// Holds the sizes of a layer and the routing of its rank 0, as read from a file of int32. LoadLayer has the order and the
// shapes of the arrays. tests/emulation and the kernels of route compute the same arrays.
struct LayerFile {
  std::string name;
  int32_t num_ranks, tokens, hidden, intermediate, experts, top_k, capacity, num_rows;
  std::vector<int32_t> token_slot, slot_token, choice_rank, slot_rows;  // as in RoutingView
  std::vector<int32_t> row_rank, row_slot, row_token, group_sizes;
  std::vector<int32_t> sent_to_rank_0, sent_by_rank_0;  // by played rank: tokens, 0 for rank 0

  int local_experts() const { return experts / num_ranks; }
};

LayerFile LoadLayer(const std::string& path) {
  LayerFile l;
  const size_t begin = path.rfind('/') + 1;
  l.name = path.substr(begin, path.find('-', begin) - begin);
  std::FILE* file = std::fopen(path.c_str(), "rb");
  CHECK(file != nullptr ? Problem() : "cannot read " + path);
  const auto read = [&](int32_t* to, size_t count) {
    CHECK(std::fread(to, sizeof(int32_t), count, file) == count ? Problem()
                                                                : path + " is too short");
  };
  for (int32_t* number : {&l.num_ranks, &l.tokens, &l.hidden, &l.intermediate, &l.experts, &l.top_k,
                          &l.capacity, &l.num_rows}) {
    read(number, 1);
  }
  CHECK(l.num_ranks >= 2 && l.num_ranks <= kMaxPlayedRanks && l.experts % l.num_ranks == 0);
  const size_t slots = size_t(l.num_ranks) * l.tokens, rows = l.capacity;
  const std::pair<std::vector<int32_t>*, size_t> arrays[] = {{&l.token_slot, slots},
                                                             {&l.slot_token, slots},
                                                             {&l.choice_rank, l.tokens * l.top_k},
                                                             {&l.slot_rows, slots * l.top_k},
                                                             {&l.row_rank, rows},
                                                             {&l.row_slot, rows},
                                                             {&l.row_token, rows},
                                                             {&l.group_sizes, l.local_experts()},
                                                             {&l.sent_to_rank_0, l.num_ranks},
                                                             {&l.sent_by_rank_0, l.num_ranks}};
  for (const auto& [array, count] : arrays) {
    array->resize(count);
    read(array->data(), count);
  }
  std::fclose(file);
  return l;
}

struct Options {
  std::vector<std::string> layers;
  std::vector<int> budgets = {8, 16, 24, 32};
  double rate = 345, timeout_s = 10, seconds = 240;
  int blocks = 8, sms = 64, samples = 5, reps = 3;
  std::string json;
};

Options ParseOptions(int argc, char** argv) {
  Options o;
  const std::map<std::string, double*> doubles = {
      {"--rate", &o.rate}, {"--timeout", &o.timeout_s}, {"--seconds", &o.seconds}};
  const std::map<std::string, int*> ints = {
      {"--blocks", &o.blocks}, {"--sms", &o.sms}, {"--samples", &o.samples}, {"--reps", &o.reps}};
  for (int i = 1; i < argc; i += 2) {
    const std::string name = argv[i];
    CHECK(i + 1 < argc ? Problem() : "an option without its value: '" + name + "'");
    const std::string value = argv[i + 1];
    if (doubles.count(name) > 0) {
      *doubles.at(name) = ToNumber(value);
    } else if (ints.count(name) > 0) {
      *ints.at(name) = ToInt(value);
    } else if (name == "--layers") {
      o.layers = Split(value);
    } else if (name == "--budgets") {
      o.budgets = ToInts(value);
    } else if (name == "--json") {
      o.json = value;
    } else {
      CHECK("not an option: '" + name + "'");
    }
  }
  CHECK(!o.layers.empty() && o.rate > 0 && o.timeout_s > 0 && o.samples >= 1 && o.reps >= 1);
  CHECK(o.blocks >= 1 && o.blocks <= 8 && o.sms >= 1);
  for (int budget : o.budgets) CHECK(budget >= 1);
  return o;
}

// ---- Small kernels

using BFloat16 = __nv_bfloat16;

#ifdef MOE_A2A_EMULATION  // tests/emulation/player
constexpr int kSmallBlocks = 2, kSmallThreads = 64, kSamples = 500;
#else
constexpr int kSmallBlocks = 1024, kSmallThreads = 256, kSamples = 20000;
#endif

// Launches a kernel of this file.
template <typename... Params>
void StartOn(int blocks, int threads, void (*kernel)(Params...), cudaStream_t stream,
             std::common_type_t<Params>... params) {
  void* arguments[] = {const_cast<void*>(static_cast<const void*>(&params))...};
  CHECK(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(blocks), dim3(threads),
                         arguments, 0, stream));
}

template <typename... Params>
void Start(void (*kernel)(Params...), cudaStream_t stream, std::common_type_t<Params>... params) {
  StartOn(kSmallBlocks, kSmallThreads, kernel, stream, params...);
}

template <typename... Kernels>
void LoadSmall(Kernels... kernels) {
  cudaFuncAttributes attributes;
  for (const cudaError_t error : {cudaFuncGetAttributes(&attributes, kernels)...}) CHECK(error);
}

__global__ void FillNormalized(BFloat16* to, int64_t count, uint64_t seed, float scale) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    to[i] = __float2bfloat16(RandomValue<float>(seed, i) * scale);
  }
}

struct alignas(16) Eight {
  BFloat16 of[8];
};

// act = silu(gate) * up, where pre [rows, 2 * width] holds gate and up.
__global__ void Activate(const BFloat16* pre, BFloat16* act, int64_t rows, int width) {
  const int64_t count = rows * width / 8, stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    const int64_t row = i * 8 / width, column = i * 8 % width;
    const BFloat16* from = pre + row * 2 * width + column;
    const Eight gate = *reinterpret_cast<const Eight*>(from);
    const Eight up = *reinterpret_cast<const Eight*>(from + width);
    Eight out;
    for (int e = 0; e < 8; ++e) {
      const float g = __bfloat162float(gate.of[e]);
      out.of[e] = __float2bfloat16(g / (1 + __expf(-g)) * __bfloat162float(up.of[e]));
    }
    reinterpret_cast<Eight*>(act)[i] = out;
  }
}

// The cotangent of pre, from that of act.
__global__ void ActivateBackward(const BFloat16* pre, const BFloat16* d_act, BFloat16* d_pre,
                                 int64_t rows, int width) {
  const int64_t count = rows * width / 8, stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    const int64_t row = i * 8 / width, column = i * 8 % width;
    const int64_t at = row * 2 * width + column;
    const Eight gate = *reinterpret_cast<const Eight*>(pre + at);
    const Eight up = *reinterpret_cast<const Eight*>(pre + at + width);
    const Eight d = reinterpret_cast<const Eight*>(d_act)[i];
    Eight d_gate, d_up;
    for (int e = 0; e < 8; ++e) {
      const float g = __bfloat162float(gate.of[e]), ct = __bfloat162float(d.of[e]);
      const float s = 1 / (1 + __expf(-g));
      d_gate.of[e] = __float2bfloat16(ct * __bfloat162float(up.of[e]) * s * (1 + g * (1 - s)));
      d_up.of[e] = __float2bfloat16(ct * g * s);
    }
    *reinterpret_cast<Eight*>(d_pre + at) = d_gate;
    *reinterpret_cast<Eight*>(d_pre + at + width) = d_up;
  }
}

// Waits, as rank 1 would and bounded, until rank 0 has raised its first flag of a launch. Then the blocks of rank 0 run, and
// the next kernel on the stream cannot take their multiprocessors.
__global__ void Gate(const __grid_constant__ RankView view, uint64_t epoch) {
  if (threadIdx.x > 0) return;
  wait_for_flag(view, chunk_flag(view, epoch, 0, 0), epoch, Phase::kReceiveChunk, 0);
}

// Computes the expected value of a token or row of an exchange, for the checks on the device.
struct Expected {
  int hidden, top_k, num_tokens, num_ranks;
  const int32_t *row_rank, *row_slot, *row_token;  // [capacity]
  const int32_t *token_slot, *slot_rows;           // of rank 0's tokens
  const BFloat16* templates;                       // [kTemplates, hidden]
};

__device__ float Sent(const Expected& e, int rank, int slot, int column) {
  return __bfloat162float(e.templates[int64_t{template_of(rank, slot)} * e.hidden + column]);
}

__device__ bool IsNear(float found, float expected, float magnitude) {
  return fabsf(found - expected) <= magnitude / 100 + 1e-6f;  // false for NaN
}

__device__ float Moved(const Expected& e, const BFloat16* payload, int64_t row, int column) {
  const int rank = e.row_rank[row];
  return rank == 0 ? __bfloat162float(payload[int64_t{e.row_token[row]} * e.hidden + column])
                   : Sent(e, rank, e.row_slot[row], column);
}

// Checks that a dispatch has moved `payload` to `rows`, multiplied by the row's weight if there are weights.
__global__ void CheckRows(Expected e, int64_t num_rows, const BFloat16* payload,
                          const BFloat16* rows, const float* weights, unsigned long long* wrong) {
  for (int64_t row = blockIdx.x; row < num_rows; row += gridDim.x) {
    for (int column = threadIdx.x; column < e.hidden; column += blockDim.x) {
      const float moved = Moved(e, payload, row, column);
      const float found = __bfloat162float(rows[row * e.hidden + column]);
      const float expected = weights == nullptr ? moved : moved * weights[row];
      const bool is_right =
          weights == nullptr ? found == expected : IsNear(found, expected, fabsf(expected));
      if (!is_right) atomicAdd(wrong, 1ull);
    }
  }
}

// Checks that `sums` are the sums of `rows`, weighted if there are weights.
__global__ void CheckSums(Expected e, const BFloat16* rows, const float* weights,
                          const BFloat16* sums, unsigned long long* wrong) {
  for (int64_t token = blockIdx.x; token < e.num_tokens; token += gridDim.x) {
    for (int column = threadIdx.x; column < e.hidden; column += blockDim.x) {
      float sum = 0, magnitude = 0;
      for (int rank = 0; rank < e.num_ranks; ++rank) {
        const int slot = e.token_slot[token * e.num_ranks + rank];
        if (slot < 0) continue;
        float part = 0;
        if (rank > 0) {
          part = Sent(e, rank, slot, column);
        } else {
          for (int k = 0; k < e.top_k; ++k) {
            const int64_t row = e.slot_rows[int64_t{slot} * e.top_k + k];
            if (row < 0) continue;
            const float weight = weights == nullptr ? 1 : weights[row];
            const float term = weight * __bfloat162float(rows[row * e.hidden + column]);
            part += term;
            magnitude += fabsf(term);
          }
        }
        sum += part;
        magnitude += fabsf(part);
      }
      const float found = __bfloat162float(sums[token * e.hidden + column]);
      if (!IsNear(found, sum, magnitude)) atomicAdd(wrong, 1ull);
    }
  }
}

// ---- Memory

struct Buffer {
  void* data = nullptr;
  int64_t bytes = 0;
  template <typename T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

class Memory {
 public:
  Memory() = default;
  Memory(const Memory&) = delete;
  ~Memory() {
    for (void* data : taken_) cudaFree(data);
  }
  Buffer Take(int64_t bytes) {
    Buffer array = {nullptr, bytes};
    CHECK(cudaMalloc(&array.data, bytes));
    taken_.push_back(array.data);
    return array;
  }
  Buffer Upload(const std::vector<int32_t>& values) {
    const Buffer array = Take(values.size() * sizeof(int32_t));
    CHECK(cudaMemcpy(array.data, values.data(), array.bytes, cudaMemcpyHostToDevice));
    return array;
  }
  Buffer Random(int64_t count, float scale) {
    const Buffer array = Take(count * kItemBytes);
    Start(FillNormalized, nullptr, array.as<BFloat16>(), count, ++seed_, scale);
    return array;
  }

 private:
  std::vector<void*> taken_;
  uint64_t seed_ = 1000;
};

// ---- The layer of rank 0

enum Kind { kDispatch, kCombine, kWeightedDispatch, kGradientCombine, kNumKinds };
constexpr const char* kKindNames[] = {"dispatch", "combine", "weighted dispatch",
                                      "gradient's combine"};
bool IsDispatch(Kind kind) { return kind == kDispatch || kind == kWeightedDispatch; }

// Which multiprocessors products may use while an exchange runs next to them.
enum class Products {
  kAll,   // all: the kernel whose blocks start first has them
  kRest,  // those that the exchange leaves
  kGated  // all, but products start only when the exchange runs
};
constexpr const char* kProductsNames[] = {"all", "rest", "all, gated"};

// Blocks of an exchange, and of the products next to it.
struct Next {
  int budget;
  Products products;
};

class Layer {
 public:
  Layer(const Options& options, LayerFile shape)
      : options_(options), shape_(std::move(shape)), num_ranks_(shape_.num_ranks) {
    CHECK(cudaDeviceGetAttribute(&num_sms_, cudaDevAttrMultiProcessorCount, 0));
    LoadWholePlayer();
    OpenWorkspace();
    TakeArrays();
    int low = 0, high = 0;
    CHECK(cudaDeviceGetStreamPriorityRange(&low, &high));
    CHECK(cudaStreamCreateWithPriority(&main_, cudaStreamNonBlocking, low));
    CHECK(cudaStreamCreateWithPriority(&side_, cudaStreamNonBlocking, high));
    CHECK(cudaStreamCreateWithPriority(&player_, cudaStreamNonBlocking, high));
    for (cudaEvent_t* event : {&before_, &after_}) CHECK(cudaEventCreate(event));
    for (cudaEvent_t* event : {&fork_, &join_}) {
      CHECK(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
    }
    CHECK(cudaHostAlloc(&started_, sizeof(uint64_t) * 8, cudaHostAllocMapped));
    CHECK(cudaDeviceSynchronize());
  }
  Layer(const Layer&) = delete;
  ~Layer() {
    for (cudaStream_t stream : {main_, side_, player_}) cudaStreamDestroy(stream);
    for (cudaEvent_t event : {before_, after_, fork_, join_}) cudaEventDestroy(event);
    cudaFreeHost(started_);
    CHECK(workspace_->Close(int64_t{60'000'000'000}));
  }

  const LayerFile& shape() const { return shape_; }
  int all_sms() const { return num_sms_; }
  // Multiprocessors that the player leaves.
  int free_sms() const { return num_sms_ - options_.blocks; }

  // ---- Steps of programs. While a program is planned, they note their exchanges and launch nothing.

  void Exchange(Kind kind, int budget) { Enqueue(kind, budget, main_); }

  // Launches an exchange on the side stream, with `products` between its start and its end.
  void Beside(Kind kind, const Next& next, const std::function<void(int)>& products) {
    if (!is_planning_) {
      CHECK(cudaEventRecord(fork_, main_));
      CHECK(cudaStreamWaitEvent(side_, fork_, 0));
    }
    Enqueue(kind, next.budget, side_);
    if (!is_planning_) {
      CHECK(cudaEventRecord(join_, side_));
      if (next.products == Products::kGated) {
        RankView view = ViewOf(kind);
        view.rank = 1;
        ++view.error;
        StartOn(1, kWarpThreads, Gate, main_, view, epoch_ - 1);
      }
    }
    products(next.products == Products::kRest ? free_sms() - next.budget : num_sms_);
    if (!is_planning_) CHECK(cudaStreamWaitEvent(main_, join_, 0));
  }

  void ProductIn(int sms) {
    Product(GroupedProduct::kForward, rows_in_, w_in_, pre_, H(), 2 * I(), sms);
  }
  void Activation() {
    if (is_planning_) return;
    Start(Activate, main_, pre_.as<BFloat16>(), act_.as<BFloat16>(), shape_.num_rows, I());
  }
  void ProductOut(int sms) { Product(GroupedProduct::kForward, act_, w_out_, y_, I(), H(), sms); }
  void GradientOut(int sms) {
    Product(GroupedProduct::kTransposed, d_y_, w_out_, d_act_, I(), H(), sms);
  }
  void ActivationBackward() {
    if (is_planning_) return;
    Start(ActivateBackward, main_, pre_.as<BFloat16>(), d_act_.as<BFloat16>(),
          d_pre_.as<BFloat16>(), shape_.num_rows, I());
  }
  void GradientIn(int sms) {
    Product(GroupedProduct::kTransposed, d_pre_, w_in_, d_rows_, H(), 2 * I(), sms);
  }
  void WeightGradientOut(int sms) {
    Product(GroupedProduct::kWeightGradient, act_, d_y_, d_w_out_, I(), H(), sms);
  }
  void WeightGradientIn(int sms) {
    Product(GroupedProduct::kWeightGradient, rows_in_, d_pre_, d_w_in_, H(), 2 * I(), sms);
  }

  // ---- Running

  // Runs a program once and then `reps` times next to a player. Returns the microseconds of one of these `reps` runs. Adds
  // to `rates` the GB/s at which the played ranks have sent, by kind.
  double Run(const std::function<void()>& program, int reps,
             std::map<Kind, std::vector<double>>* rates = nullptr) {
    order_.clear();
    is_planning_ = true;
    for (int i = 0; i < reps + 1; ++i) program();
    Exchange(kDispatch, options_.sms);  // ends the player, also if the program has no exchange
    is_planning_ = false;
    CHECK(static_cast<int>(order_.size()) <= kMostLaunches
              ? Problem()
              : "too many exchanges in one program: " + std::to_string(order_.size()));
    CHECK(cudaMemcpy(played_order_.data, order_.data(), order_.size() * sizeof(int32_t),
                     cudaMemcpyHostToDevice));
    CHECK(cudaDeviceSynchronize());  // The player's stream does not wait for the copy.
    StartPlayer();
    program();
    CHECK(cudaEventRecord(before_, main_));
    for (int i = 0; i < reps; ++i) program();
    CHECK(cudaEventRecord(after_, main_));
    Exchange(kDispatch, options_.sms);
    for (cudaStream_t stream : {main_, side_, player_}) Wait(stream);
    CHECK(workspace_->Failure());
    if (rates != nullptr) ReadRates(rates);
    float ms = 0;
    CHECK(cudaEventElapsedTime(&ms, before_, after_));
    return 1e3 * ms / reps;
  }

  // Loads all kernels now. Loading a kernel while the player runs would wait for the player's end.
  void Warm() {
    Activation();
    ActivationBackward();
    ProductIn(num_sms_);
    ProductOut(num_sms_);
    GradientOut(num_sms_);
    GradientIn(num_sms_);
    WeightGradientIn(num_sms_);
    WeightGradientOut(num_sms_);
    Wait(main_);
  }

  // ---- Checks

  // Poisons all results of a program.
  void Poison() {
    for (const Buffer& array : Computed()) CHECK(cudaMemset(array.data, 0xFF, array.bytes));
    CHECK(cudaDeviceSynchronize());
  }

  // Returns a hash of all results of a program.
  uint64_t Print() {
    auto* sum = counter64_.as<unsigned long long>();
    CHECK(cudaMemset(sum, 0, sizeof(*sum)));
    for (const Buffer& array : Computed()) {
      Start(Fingerprint, nullptr, array.as<uint32_t>(), array.bytes / 4, sum);
    }
    unsigned long long found = 0;
    CHECK(cudaMemcpy(&found, sum, sizeof(found), cudaMemcpyDeviceToHost));
    return found;
  }

  // Compares the results of the exchanges of a forward pass.
  void CheckForward() {
    const Expected e = MakeExpected();
    CheckOne("dispatch", [&](auto* wrong) {
      Start(CheckRows, nullptr, e, shape_.num_rows, x_.as<BFloat16>(), rows_in_.as<BFloat16>(),
            nullptr, wrong);
    });
    CheckProductOf(GroupedProduct::kForward, rows_in_, w_in_, pre_, H(), 2 * I());
    CheckProductOf(GroupedProduct::kForward, act_, w_out_, y_, I(), H());
    CheckOne("combine", [&](auto* wrong) {
      Start(CheckSums, nullptr, e, y_.as<BFloat16>(), row_weights_.as<float>(), out_.as<BFloat16>(),
            wrong);
    });
  }
  void CheckBackward() {
    const Expected e = MakeExpected();
    CheckOne("weighted dispatch", [&](auto* wrong) {
      Start(CheckRows, nullptr, e, shape_.num_rows, ct_.as<BFloat16>(), d_y_.as<BFloat16>(),
            row_weights_.as<float>(), wrong);
    });
    CheckProductOf(GroupedProduct::kTransposed, d_y_, w_out_, d_act_, I(), H());
    CheckProductOf(GroupedProduct::kTransposed, d_pre_, w_in_, d_rows_, H(), 2 * I());
    CheckProductOf(GroupedProduct::kWeightGradient, act_, d_y_, d_w_out_, I(), H());
    CheckProductOf(GroupedProduct::kWeightGradient, rows_in_, d_pre_, d_w_in_, H(), 2 * I());
    CheckOne("gradient's combine", [&](auto* wrong) {
      Start(CheckSums, nullptr, e, d_rows_.as<BFloat16>(), nullptr, d_x_.as<BFloat16>(), wrong);
    });
  }

 private:
  static constexpr int kMostLaunches = 256;

  int H() const { return shape_.hidden; }
  int I() const { return shape_.intermediate; }
  // A block of the player takes all shared memory of its multiprocessor.
  void LoadWholePlayer() {
    int most = 0;
    cudaFuncAttributes attributes;
    CHECK(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    CHECK(cudaFuncGetAttributes(&attributes, player::play));
    player_bytes_ = most - static_cast<int64_t>(attributes.sharedSizeBytes);
    CHECK(LoadPlayer(player_bytes_));
  }

  void OpenWorkspace() {
    const int64_t hidden_bytes = int64_t{H()} * kItemBytes, weight_bytes = 4 * shape_.top_k;
    const auto make = [&](Kind kind, std::vector<int64_t> row_bytes) {
      PlayedCall& call = calls_[kind];
      call = {};
      call.operation = IsDispatch(kind) ? Operation::kDispatch : Operation::kCombine;
      call.signature = Hash(kind, Hash(H(), num_ranks_));
      call.num_slots = shape_.tokens;
      for (int64_t bytes : row_bytes) {
        CHECK(bytes % kVectorBytes == 0);
        call.zone_offset[call.num_arrays] = call.zone_bytes;
        call.row_bytes[call.num_arrays++] = bytes;
        call.zone_bytes += array_bytes(shape_.tokens, bytes);
      }
      for (int rank = 1; rank < num_ranks_; ++rank) {
        call.used[rank] = (IsDispatch(kind) ? shape_.sent_to_rank_0 : shape_.sent_by_rank_0)[rank];
      }
    };
    make(kDispatch, {hidden_bytes, weight_bytes});
    make(kCombine, {hidden_bytes});
    make(kWeightedDispatch, {hidden_bytes});
    make(kGradientCombine, {hidden_bytes, weight_bytes});
    int64_t zone_bytes = 0;
    for (const PlayedCall& call : calls_) zone_bytes = std::max(zone_bytes, call.zone_bytes);
    AddDevice(0, {0, 0});
    const Topology topology = {std::vector<int64_t>(num_ranks_, 0), num_ranks_, num_ranks_};
    workspace_ = &Workspace::Get(topology, WorkspaceKind::kWhole);
    CHECK(workspace_->Reserve(zone_bytes * num_ranks_, 0));
    CHECK(workspace_->View(0, &view_));
    view_.rank = 0;
    view_.timeout_ns = view_.first_timeout_ns = static_cast<uint64_t>(options_.timeout_s * 1e9);
  }

  void TakeArrays() {
    Memory& m = memory_;
    const int64_t tokens = shape_.tokens, rows = shape_.capacity, local = shape_.local_experts();
    const float scale_in = 2 / std::sqrt(static_cast<float>(H()));
    const float scale_out = 2 / std::sqrt(static_cast<float>(I()));
    const LayerFile& l = shape_;
    token_slot_ = m.Upload(l.token_slot), slot_token_ = m.Upload(l.slot_token);
    choice_rank_ = m.Upload(l.choice_rank), slot_rows_ = m.Upload(l.slot_rows);
    row_rank_ = m.Upload(l.row_rank), row_slot_ = m.Upload(l.row_slot);
    row_token_ = m.Upload(l.row_token), group_sizes_ = m.Upload(l.group_sizes);
    std::vector<int32_t> starts, weights;
    int32_t start = 0;
    for (int32_t size : l.group_sizes) {
      weights.push_back(static_cast<int32_t>(weights.size()));
      starts.push_back(start);
      start += size;
    }
    starts_ = m.Upload(starts);
    groups_ = m.Upload(weights);
    counter_ = m.Take(sizeof(int32_t));
    counter64_ = m.Take(sizeof(uint64_t));
    x_ = m.Random(tokens * H(), 1);
    ct_ = m.Random(tokens * H(), 1);
    choice_weights_ = m.Take(tokens * shape_.top_k * sizeof(float));
    Start(FillRandom<float>, nullptr, choice_weights_.as<float>(), tokens * shape_.top_k, 7);
    templates_ = m.Random(int64_t{kTemplates} * H(), 1);
    w_in_ = m.Random(local * H() * 2 * I(), scale_in);
    w_out_ = m.Random(local * I() * H(), scale_out);
    const auto of_rows = [&](int64_t columns) { return m.Take(rows * columns * kItemBytes); };
    rows_in_ = of_rows(H());
    row_weights_ = m.Take(rows * sizeof(float));
    pre_ = of_rows(2 * I());
    act_ = of_rows(I());
    y_ = of_rows(H());
    out_ = m.Take(tokens * H() * kItemBytes);
    d_y_ = of_rows(H());
    dots_ = m.Take(rows * sizeof(float));
    d_act_ = of_rows(I());
    d_pre_ = of_rows(2 * I());
    d_rows_ = of_rows(H());
    d_x_ = m.Take(tokens * H() * kItemBytes);
    d_weights_ = m.Take(tokens * shape_.top_k * sizeof(float));
    d_w_in_ = m.Take(w_in_.bytes);
    d_w_out_ = m.Take(w_out_.bytes);
    played_calls_ = m.Take(sizeof(calls_));
    CHECK(cudaMemcpy(played_calls_.data, calls_, sizeof(calls_), cudaMemcpyHostToDevice));
    played_order_ = m.Take(kMostLaunches * sizeof(int32_t));
    arrived_ = m.Take(2 * sizeof(uint32_t));
    CHECK(cudaMemset(arrived_.data, 0, arrived_.bytes));
    times_ = m.Take(int64_t{kMostLaunches} * options_.blocks * sizeof(PlayedTime));
    // Initial values, so that the products of a warm run see no NaN.
    for (const Buffer& array : Computed()) CHECK(cudaMemset(array.data, 0, array.bytes));
  }

  std::vector<Buffer> Computed() const {
    return {rows_in_, row_weights_, pre_,    act_, y_,         out_,    d_y_,    dots_,
            d_act_,   d_pre_,       d_rows_, d_x_, d_weights_, d_w_in_, d_w_out_};
  }

  GroupedGemm Gemm(GroupedProduct product, const Buffer& a, const Buffer& b, const Buffer& d, int k,
                   int n, int sms) const {
    GroupedGemm g = {};
    g.product = product;
    g.type = ElementType::kBFloat16;
    g.a = a.data;
    g.b = b.data;
    g.d = d.data;
    g.num_rows = shape_.capacity;
    g.num_weights = g.num_groups = shape_.local_experts();
    g.k = k;
    g.n = n;
    g.starts = starts_.as<int32_t>();
    g.sizes = group_sizes_.as<int32_t>();
    g.weights = groups_.as<int32_t>();
    g.counter = counter_.as<int32_t>();
    g.num_sms = sms;
    return g;
  }

  void Product(GroupedProduct product, const Buffer& a, const Buffer& b, const Buffer& d, int k,
               int n, int sms) {
    if (is_planning_) return;
    const GroupedGemm g = Gemm(product, a, b, d, k, n, sms);
    CHECK(WhyNotGroupedGemm("bfloat16", g.num_rows, g.num_groups, k, n));
    CHECK(LaunchGroupedGemm(g, main_));
  }

  RankView ViewOf(Kind kind) const {
    RankView view = view_;
    view.operation = calls_[kind].operation;
    view.signature = calls_[kind].signature;
    view.launch = epoch_;  // not 0, and different from that of any launch at the same time
    return view;
  }

  void Enqueue(Kind kind, int budget, cudaStream_t stream) {
    if (is_planning_) {
      order_.push_back(kind);
      return;
    }
    CHECK(Launch(kind, budget, stream));
    ++epoch_;
  }

  cudaError_t Launch(Kind kind, int budget, cudaStream_t stream) const {
    const int64_t tokens = shape_.tokens, rows = shape_.capacity, top_k = shape_.top_k;
    const auto of_tokens = [&](const Buffer& b) { return Bound{kBFloat16, {tokens, H()}, b}; };
    const auto of_rows = [&](const Buffer& b) { return Bound{kBFloat16, {rows, H()}, b}; };
    const auto weights = [&](const Buffer& b) { return Bound{kFloat32, {rows}, b}; };
    const auto of_choices = [&](const Buffer& b) { return Bound{kFloat32, {tokens, top_k}, b}; };
    const auto launch = [&](const auto& call, std::vector<Bound> args, const auto& results) {
      return LaunchOf(call, ViewOf(kind), std::move(args), results, budget, stream);
    };
    CombineCall combine = {};
    combine.wire = kBFloat16.name;
    combine.num_pairs = kind == kCombine;
    combine.num_choice_arrays = kind == kGradientCombine;
    using Results = std::vector<Bound>;
    switch (kind) {
      case kDispatch:
        return launch(DispatchCall{{/*num_choice_arrays=*/1, /*leaves_tail=*/false}},
                      {of_tokens(x_), of_choices(choice_weights_)},
                      Results{of_rows(rows_in_), weights(row_weights_)});
      case kWeightedDispatch:
        return launch(WeightedDispatchCall{/*scaled=*/true, /*dotted=*/true},
                      {of_tokens(ct_), of_rows(y_), weights(row_weights_)},
                      Results{of_rows(d_y_), weights(dots_)});
      case kCombine:
        return launch(combine, {of_rows(y_), weights(row_weights_)}, Results{of_tokens(out_)});
      default:
        return launch(combine, {of_rows(d_rows_), weights(dots_)},
                      Results{of_tokens(d_x_), of_choices(d_weights_)});
    }
  }

  // An operand or a result of a call.
  struct Bound {
    DataType type;
    std::vector<int64_t> axes;
    Buffer buffer;
  };

  // Launches a call with its operands, except the routing, and its results.
  template <typename Call>
  cudaError_t LaunchOf(const Call& call, const RankView& view, std::vector<Bound> args,
                       const std::vector<Bound>& results, int budget, cudaStream_t stream) const {
    const int64_t tokens = shape_.tokens, rows = shape_.capacity, top_k = shape_.top_k;
    args.push_back({kInt32, {tokens, num_ranks_}, token_slot_});
    args.push_back({kInt32, {num_ranks_, tokens}, slot_token_});
    args.push_back({kInt32, {tokens, top_k}, choice_rank_});
    args.push_back({kInt32, {num_ranks_, tokens, top_k}, slot_rows_});
    args.push_back({kInt32, {rows}, row_slot_});
    Arrays arrays[2];
    std::vector<char*> addresses[2];
    for (int i = 0; i < 2; ++i) {
      for (const Bound& bound : i == 0 ? args : results) {
        arrays[i].push_back({bound.type, bound.axes, bound.buffer.bytes});
        addresses[i].push_back(bound.buffer.as<char>());
      }
    }
    typename Call::Params p = {};
    CHECK(call.Describe({view, /*is_multi_host=*/false, /*is_colocated=*/false, budget},
                        {arrays[0].data(), arrays[0].size()}, {arrays[1].data(), arrays[1].size()},
                        &p));
    p.view.signature = view.signature;  // the player's
    call.Point({addresses[0].data(), addresses[0].size()},
               {addresses[1].data(), addresses[1].size()}, &p);
    return Call::Launch(DirectKernels(), &p, grid_of(p, budget).blocks, stream);
  }

  void StartPlayer() {
    for (int block = 0; block < options_.blocks; ++block) started_[block] = 0;
    PlayerParams p = {};
    p.view = view_;
    p.calls = played_calls_.as<const PlayedCall>();
    p.order = played_order_.as<const int32_t>();
    p.num_launches = static_cast<int32_t>(order_.size());
    p.first_epoch = epoch_;
    p.templates = templates_.as<const char>();
    p.template_bytes = int64_t{H()} * kItemBytes;
    p.ns_per_byte = 1 / options_.rate;
    p.arrived = arrived_.as<uint32_t>();
    p.started = started_;
    p.times = times_.as<PlayedTime>();
    CHECK(player_shared_bytes(p) <= player_bytes_);
    CHECK(LaunchPlayer(p, options_.blocks, player_bytes_, player_));
    // Until the blocks of the exchange hold their multiprocessors, products could take all of them.
    const double deadline = Seconds() + options_.timeout_s;
    for (int block = 0; block < options_.blocks; ++block) {
      while (static_cast<volatile uint64_t*>(started_)[block] == 0) {
        CHECK(Seconds() < deadline ? Problem() : "the player has not started");
      }
    }
  }

  // Waits for a stream with a bound, because the stream may wait for a failed exchange.
  void Wait(cudaStream_t stream) {
    const double deadline = Seconds() + 3 * options_.timeout_s;
    while (true) {
      const cudaError_t error = cudaStreamQuery(stream);
      if (error == cudaSuccess) return;
      if (error != cudaErrorNotReady) CHECK(error);
      CHECK(Seconds() < deadline ? Problem() : "not finished: " + workspace_->Failure());
      std::this_thread::yield();
    }
  }

  void ReadRates(std::map<Kind, std::vector<double>>* rates) const {
    std::vector<PlayedTime> times(order_.size() * options_.blocks);
    CHECK(cudaMemcpy(times.data(), times_.data, times.size() * sizeof(PlayedTime),
                     cudaMemcpyDeviceToHost));
    for (size_t n = 0; n < order_.size(); ++n) {
      uint64_t begin = UINT64_MAX, end = 0;
      for (int block = 0; block < options_.blocks; ++block) {
        const PlayedTime& time = times[n * options_.blocks + block];
        begin = std::min(begin, time.begin);
        end = std::max(end, time.end);
      }
      const auto kind = static_cast<Kind>(order_[n]);
      (*rates)[kind].push_back(static_cast<double>(played_bytes(calls_[kind], num_ranks_)) /
                               static_cast<double>(std::max<uint64_t>(1, end - begin)));
    }
  }

  Expected MakeExpected() const {
    return {H(),
            shape_.top_k,
            shape_.tokens,
            num_ranks_,
            row_rank_.as<int32_t>(),
            row_slot_.as<int32_t>(),
            row_token_.as<int32_t>(),
            token_slot_.as<int32_t>(),
            slot_rows_.as<int32_t>(),
            templates_.as<const BFloat16>()};
  }

  void CheckProductOf(GroupedProduct product, const Buffer& a, const Buffer& b, const Buffer& d,
                      int k, int n) {
    const GroupedGemm g = Gemm(product, a, b, d, k, n, 1);
    CheckOne("grouped product", [&](auto* wrong) {
      Start(CompareProduct, nullptr, g, shape_.num_rows, int64_t{kSamples}, wrong);
    });
  }

  template <typename Body>
  void CheckOne(const char* what, Body&& body) {
    auto* wrong = counter64_.as<unsigned long long>();
    CHECK(cudaMemset(wrong, 0, sizeof(*wrong)));
    body(wrong);
    unsigned long long found = 0;
    CHECK(cudaMemcpy(&found, wrong, sizeof(found), cudaMemcpyDeviceToHost));
    CHECK(found == 0 ? Problem()
                     : std::string(what) + " is wrong in " + std::to_string(found) + " places");
  }

  const Options& options_;
  const LayerFile shape_;
  const int num_ranks_;
  int num_sms_ = 0;
  int64_t player_bytes_ = 0;
  PlayedCall calls_[kNumKinds];
  Workspace* workspace_ = nullptr;
  RankView view_ = {};
  uint64_t epoch_ = 1;  // of the next exchange
  bool is_planning_ = false;
  std::vector<int32_t> order_;  // kinds of the exchanges of the program
  Memory memory_;
  Buffer token_slot_, slot_token_, choice_rank_, slot_rows_;
  Buffer row_rank_, row_slot_, row_token_, group_sizes_;
  Buffer starts_, groups_, counter_, counter64_;
  Buffer x_, ct_, choice_weights_, templates_, w_in_, w_out_;
  Buffer rows_in_, row_weights_, pre_, act_, y_, out_;
  Buffer d_y_, dots_, d_act_, d_pre_, d_rows_, d_x_, d_weights_, d_w_in_, d_w_out_;
  Buffer played_calls_, played_order_, arrived_, times_;
  uint64_t* started_ = nullptr;
  cudaStream_t main_, side_, player_;
  cudaEvent_t before_, after_, fork_, join_;
};

// ---- Schedules

struct Schedule {
  std::string pass, name;
  std::function<void()> program;
  int budget = 0;  // multiprocessors of the exchange next to products; 0: no such exchange
  Products products = Products::kAll;  // multiprocessors of these products
  std::vector<double> us = {};
  std::map<Kind, std::vector<double>> rates = {};
};

constexpr const char* kInTurn = "one after the other";
constexpr const char* kBeside = "combine next to weight gradients";

std::vector<Schedule> MakeSchedules(const Options& o, Layer& l) {
  const int all = l.all_sms(), sms = o.sms;
  std::vector<Schedule> made;
  const auto forward_products = [&l, all] {
    l.ProductIn(all);
    l.Activation();
    l.ProductOut(all);
  };
  const auto begin_backward = [&l, all] {
    l.GradientOut(all);
    l.ActivationBackward();
    l.GradientIn(all);
  };
  const auto weight_gradients = [&l](int sms) {
    l.WeightGradientIn(sms);
    l.WeightGradientOut(sms);
  };
  made.push_back({"forward", kInTurn, [=, &l] {
                    l.Exchange(kDispatch, sms);
                    forward_products();
                    l.Exchange(kCombine, sms);
                  }});
  made.push_back({"forward", "experts alone", forward_products});
  made.push_back({"forward", "exchange alone", [=, &l] {
                    l.Exchange(kDispatch, sms);
                    l.Exchange(kCombine, sms);
                  }});
  made.push_back({"backward", kInTurn, [=, &l] {
                    l.Exchange(kWeightedDispatch, sms);
                    begin_backward();
                    weight_gradients(all);
                    l.Exchange(kGradientCombine, sms);
                  }});
  made.push_back({"backward", "experts alone", [=] {
                    begin_backward();
                    weight_gradients(all);
                  }});
  made.push_back({"backward", "exchange alone", [=, &l] {
                    l.Exchange(kWeightedDispatch, sms);
                    l.Exchange(kGradientCombine, sms);
                  }});
  made.push_back({"backward", "weight gradients alone", [=] { weight_gradients(all); }});
  std::vector<int> alone = o.budgets;
  alone.push_back(sms);
  for (int budget : alone) {
    made.push_back(
        {"backward", "combine alone", [=, &l] { l.Exchange(kGradientCombine, budget); }, budget});
  }
  for (int budget : o.budgets) {
    for (const Products products : {Products::kAll, Products::kRest, Products::kGated}) {
      const Next next = {budget, products};
      made.push_back({"backward", kBeside,
                      [=, &l] {
                        l.Exchange(kWeightedDispatch, sms);
                        begin_backward();
                        l.Beside(kGradientCombine, next, weight_gradients);
                      },
                      budget, products});
    }
  }
  return made;
}

// Runs every schedule of a whole pass once into poisoned arrays, and compares the results.
void CheckSchedules(Layer& layer, const std::vector<Schedule>& schedules) {
  std::map<std::string, uint64_t> expected;
  const auto run = [&](const Schedule& s) {
    layer.Poison();
    if (s.pass == "backward")
      layer.Run(schedules[0].program, 1);  // The forward pass saves its residuals.
    layer.Run(s.program, 1);
  };
  for (const Schedule& s : schedules) {
    if (s.name != kInTurn && s.name != kBeside) continue;
    run(s);
    const uint64_t print = layer.Print();
    if (expected.count(s.pass) == 0) {
      expected[s.pass] = print;
      if (s.pass == "forward") {
        layer.CheckForward();
      } else {
        layer.CheckBackward();
      }
    }
    CHECK(print == expected[s.pass]
              ? Problem()
              : "results differ: " + s.pass + ", " + s.name + ", " + std::to_string(s.budget) +
                    " SMs, products on " + kProductsNames[static_cast<int>(s.products)]);
  }
  // These produce what the timed backward passes read.
  layer.Run(schedules[0].program, 1);
  layer.Run(schedules[3].program, 1);
}

// Writes one line of JSON for each schedule.
void Report(const Options& o, const Layer& layer, const std::vector<Schedule>& schedules,
            std::FILE* json) {
  const LayerFile& l = layer.shape();
  for (const Schedule& s : schedules) {
    std::vector<double> us = s.us;
    std::sort(us.begin(), us.end());
    std::string rates;
    for (const auto& [kind, of_kind] : s.rates) {
      std::vector<double> all = of_kind;
      std::sort(all.begin(), all.end());
      char text[100];
      std::snprintf(text, sizeof text, "%s\"%s\": %.1f", rates.empty() ? "" : ", ",
                    kKindNames[kind], all[all.size() / 2]);
      rates += text;
    }
    const std::string budget = s.budget > 0 ? std::to_string(s.budget) : "null";
    const std::string products =
        s.name == kBeside ? std::string("\"") + kProductsNames[static_cast<int>(s.products)] + "\""
                          : "null";
    std::fprintf(
        json,
        "{\"sweep\": \"schedules\", \"method\": \"ours\", \"shape\": \"%s\", \"played_ranks\": %d, "
        "\"tokens\": %d, \"hidden\": %d, \"intermediate\": %d, \"experts\": %d, \"top_k\": %d, "
        "\"rows\": %d, \"op\": \"%s\", \"schedule\": \"%s\", \"num_sms\": %s, \"products\": %s, "
        "\"us\": %.1f, \"min_us\": %.1f, \"max_us\": %.1f, \"samples\": %d, \"reps\": %d, "
        "\"sms_alone\": %d, \"free_sms\": %d, \"played_gb_per_s\": {%s}}\n",
        l.name.c_str(), l.num_ranks, l.tokens, l.hidden, l.intermediate, l.experts, l.top_k,
        l.num_rows, s.pass.c_str(), s.name.c_str(), budget.c_str(), products.c_str(),
        us[us.size() / 2], us.front(), us.back(), o.samples, o.reps, o.sms, layer.free_sms(),
        rates.c_str());
  }
  std::fflush(json);
}

int Main(int argc, char** argv) {
  const Options options = ParseOptions(argc, argv);
  const double start = Seconds();
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 0));
  std::printf("%s, %d SMs; the player has %d blocks and sends %.0f GB/s\n", properties.name,
              properties.multiProcessorCount, options.blocks, options.rate);
  CHECK(DirectKernels().load());
  CHECK(LoadGroupedGemm());
  LoadSmall(FillNormalized, FillRandom<float>, Activate, ActivateBackward, Gate, Fingerprint,
            CheckRows, CheckSums, CompareProduct);
  std::FILE* json = std::fopen(options.json.c_str(), "w");
  CHECK(json != nullptr ? Problem() : "cannot write " + options.json);
  for (const std::string& path : options.layers) {
    const LayerFile file = LoadLayer(path);
    const std::string name = file.name + ", " + std::to_string(file.num_ranks) + " ranks";
    if (Seconds() - start > options.seconds) {
      std::printf("%s: no time was left\n", name.c_str());
      continue;
    }
    Layer layer(options, file);
    std::vector<Schedule> schedules = MakeSchedules(options, layer);
    layer.Warm();
    CheckSchedules(layer, schedules);
    const double checked = Seconds();
    for (int sample = 0; sample < options.samples; ++sample) {
      for (Schedule& s : schedules) s.us.push_back(layer.Run(s.program, options.reps, &s.rates));
    }
    Report(options, layer, schedules, json);
    std::printf("%s: checked; timed in %.1f s; %.1f s so far\n\n", name.c_str(),
                Seconds() - checked, Seconds() - start);
  }
  std::fclose(json);
  return 0;
}

}  // namespace
}  // namespace moe_a2a

int main(int argc, char** argv) {
  // Loading a kernel while the player runs would wait for the player's end.
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  return moe_a2a::Main(argc, argv);
}
