// Times the package's kernels in CUDA graphs, without XLA and Python, on all GPUs of one process or
// with all ranks on one GPU. Use this program for tuning, with compute-sanitizer, and with ncu. It
// does not compare results with an oracle.
//
// Build at the root of the repository, in one line; -DMOE_A2A_TEST_HOOKS works too:
//
//   nvcc -std=c++17 -O3 -arch=sm_90 -lineinfo -Icuda -o kernels_bench
//        tools/driver/kernels.cu cuda/kernels/*.cu cuda/kernels/*.cc
//        cuda/colocated/*.cu cuda/colocated/*.cc cuda/runtime/*.cc
//
//   kernels_bench [--tokens 4096] [--sms 96]      lists, separated by commas
//                 [--hidden 7168] [--top-k 8] [--experts 256]
//                 [--ops dispatch,combine,route,routed,weighted]
//                 [--gpus N | --ranks N] [--iters 32] [--samples 7] [--check] [--timeout 5]
//
// Prints one line for each operation with each value of --tokens and --sms. A time is that of the
// slowest device, in microseconds per launch (route: per pair of launches). The kernels of route
// make the routing of all other operations. The capacity is the rows of the fullest rank, rounded
// up.
//
//   --gpus     runs one rank on each of the first N GPUs; the default is all visible GPUs
//   --ranks    runs N ranks, at least 2, on the first GPU, with the kernels of cuda/colocated/. One
//              launch is for all ranks. Numbers in --sms are reduced to the number that
//              cuda/ffi/call_state.cc allows for a rank
//   --check    compares the results of the first launch of an operation (on poisoned arrays), of
//              the last timed launch, and of launches with the other numbers of --sms. All bits
//              must be equal. Inner products of a weighted dispatch are not compared, because
//              their rounding depends on the number of teams. Also prints a hash of the results
//   --timeout  limit of waits in kernels, in seconds. A sanitizer may need more than 5
//
// To try a new value of kPauseNs in tuning.h, build with "-DMOE_A2A_CANDIDATE=kPauseNs = 0".
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "calls/combine.h"
#include "calls/dispatch.h"
#include "calls/route.h"
#include "calls/routed_dispatch.h"
#include "calls/weighted_dispatch.h"
#include "driver.h"
#include "kernels/grid.h"
#include "kernels/launch.h"
#include "layout.h"
#include "params.h"
#include "runtime/workspace.h"

namespace moe_a2a {
namespace {

// Launches before the timed launches. They let the devices, which start at different times, wait
// for each other.
constexpr int kUntimedLaunches = 2;
constexpr int kTightMultiple = 128;

// ---- Command line

struct Options {
  std::vector<int> tokens = {4096}, sms = {96};
  int hidden = 7168, top_k = 8, experts = 256;
  std::vector<std::string> ops = {"dispatch", "combine", "route", "routed"};
  bool check = false;
  double timeout_s = 5;
  int iters = 32, samples = 7;
  int gpus = 0;   // 0: all visible GPUs
  int ranks = 0;  // 0: one rank on each GPU; otherwise the number of ranks on the first GPU
};

// Sets `gpus` and `ranks` if the command line does not set them, and checks both.
void ChooseRanks(Options* o) {
  int visible = 0;
  CHECK(cudaGetDeviceCount(&visible));
  if (o->ranks != 0) {
    CHECK(o->gpus == 0 ? Problem() : "--ranks uses the first GPU only; leave out --gpus");
    CHECK(o->ranks >= 2 ? Problem() : "--ranks must be at least 2; for one rank use --gpus 1");
    o->gpus = 1;
  }
  if (o->gpus == 0) o->gpus = visible;
  if (o->ranks == 0) o->ranks = o->gpus;
  CHECK(o->gpus >= 1 && o->gpus <= visible && o->ranks <= kMaxRanks);
}

// For ranks that share a GPU, reduces the numbers in `sms` to the limit of the package's handlers.
// Removes repeated numbers.
void LimitBlocks(Options* o) {
  int sms = 0;
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  const int most = static_cast<int>(colocated_blocks(o->ranks, sms, false));
  const std::string ranks = std::to_string(o->ranks);
  CHECK(most > 0 ? Problem()
                 : ranks + " ranks on one GPU need " + ranks + " multiprocessors; this GPU has " +
                       std::to_string(sms));
  for (int& blocks : o->sms) blocks = std::min(blocks, most);
  o->sms.erase(std::unique(o->sms.begin(), o->sms.end()), o->sms.end());
}

Options ParseOptions(int argc, char** argv) {
  Options options;
  Options* o = &options;
  ReadOptions(argc, argv,
              {{"--check", &o->check},
               {"--tokens", &o->tokens},
               {"--sms", &o->sms},
               {"--hidden", &o->hidden},
               {"--top-k", &o->top_k},
               {"--experts", &o->experts},
               {"--iters", &o->iters},
               {"--samples", &o->samples},
               {"--gpus", &o->gpus},
               {"--ranks", &o->ranks},
               {"--timeout", &o->timeout_s},
               {"--ops", &o->ops}});
  ChooseRanks(&options);
  CHECK(options.hidden >= 1 && options.iters >= 1 && options.samples >= 1);
  CHECK(options.top_k >= 1 && options.top_k <= kMaxTopK && options.top_k <= options.experts);
  CHECK(options.experts % options.ranks == 0);
  CHECK(options.experts / options.ranks <= kMaxLocalExperts);
  CHECK(options.timeout_s > 0);
  for (int tokens : options.tokens) CHECK(tokens >= 1);
  for (int sms : options.sms) CHECK(sms >= 1);
  if (options.gpus < options.ranks) LimitBlocks(&options);
  return options;
}

// ---- The workload

enum class Seed : uint64_t { kPayload = 1, kRows, kWeights, kIds, kChoiceWeights };

uint64_t SeedOf(Seed seed, int rank) { return static_cast<uint64_t>(seed) * 1024 + rank; }

struct Workload {
  int num_ranks;
  int num_gpus;  // equal to num_ranks, or 1
  int num_tokens, hidden, top_k, num_experts;
  int capacity = 0;
  std::vector<std::vector<int32_t>> ids;  // by rank: [num_tokens, top_k]

  int ranks_per_gpu() const { return num_ranks / num_gpus; }
  int gpu_of(int rank) const { return rank / ranks_per_gpu(); }
  int local_experts() const { return num_experts / num_ranks; }
  int64_t row_bytes() const { return int64_t{hidden} * kItemBytes; }
};

std::vector<int32_t> DrawIds(const Workload& w, int rank) {
  std::mt19937_64 random(SeedOf(Seed::kIds, rank));
  std::uniform_int_distribution<int> draw(0, w.num_experts - 1);
  std::vector<int32_t> ids(int64_t{w.num_tokens} * w.top_k);
  for (size_t token = 0; token < ids.size(); token += w.top_k) {
    for (int k = 0; k < w.top_k; ++k) {
      const auto begin = ids.begin() + token;
      int id = draw(random);
      while (std::find(begin, begin + k, id) != begin + k) id = draw(random);
      begin[k] = id;
    }
  }
  return ids;
}

Workload MakeWorkload(const Options& options, int num_tokens) {
  Workload w = {options.ranks,  options.gpus,  num_tokens,
                options.hidden, options.top_k, options.experts};
  std::vector<int64_t> rows(w.num_ranks);
  for (int rank = 0; rank < w.num_ranks; ++rank) {
    w.ids.push_back(DrawIds(w, rank));
    for (int32_t id : w.ids[rank]) ++rows[id / w.local_experts()];
  }
  const int64_t capacity = round_up(*std::max_element(rows.begin(), rows.end()), kTightMultiple);
  CHECK(capacity <= INT32_MAX);
  w.capacity = static_cast<int>(capacity);
  return w;
}

// ---- Memory of the devices

struct DeviceBuffer {
  char* data;
  int64_t bytes;
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data);
  }
};

// The memory of all ranks of one GPU, which must be the current device in Take(). All ranks must
// take arrays of the same sizes in the same order. One allocation contains the same array of all
// ranks, one after another. Kernels for ranks that share a GPU need a constant distance between the
// arrays of two ranks (device/ranks.cuh).
class DeviceMemory {
 public:
  explicit DeviceMemory(int num_ranks) : num_ranks_(num_ranks) {}
  DeviceMemory(const DeviceMemory&) = delete;
  ~DeviceMemory() {
    for (const DeviceBuffer& array : first_) cudaFree(array.data);
  }

  // Makes Take() return arrays of the next rank. Must also be called before the first rank.
  void BeginRank() {
    ++rank_;
    num_taken_ = 0;
  }

  DeviceBuffer Take(int64_t bytes) {
    if (rank_ == 0) {
      first_.push_back({nullptr, bytes});
      CHECK(cudaMalloc(&first_.back().data, num_ranks_ * bytes));
    }
    CHECK(rank_ < num_ranks_ && num_taken_ < first_.size());
    const DeviceBuffer& first = first_[num_taken_++];
    CHECK(first.bytes == bytes);
    return {first.data + rank_ * bytes, bytes};
  }

 private:
  const int num_ranks_;
  int rank_ = -1;
  size_t num_taken_ = 0;             // by this rank
  std::vector<DeviceBuffer> first_;  // arrays of the first rank, at the starts of allocations
};

DeviceBuffer Upload(const std::vector<int32_t>& values, DeviceMemory& memory) {
  DeviceBuffer buffer = memory.Take(values.size() * sizeof(int32_t));
  CHECK(cudaMemcpy(buffer.as<void>(), values.data(), buffer.bytes, cudaMemcpyHostToDevice));
  return buffer;
}

template <typename T>
DeviceBuffer MakeRandom(int64_t count, uint64_t seed, DeviceMemory& memory) {
  DeviceBuffer buffer = memory.Take(count * sizeof(T));
  FillRandom<T><<<1024, 256>>>(buffer.as<T>(), count, seed);
  CHECK(cudaGetLastError());
  return buffer;
}

// Computes the same number as jax_moe_a2a/_src/exchange/routed.py.
int TokensPerRouteChunk(int num_tokens) {
  int tokens = Tuning::kRouteLeastTokens;
  while (tokens < Tuning::kRouteMostTokens && tokens * Tuning::kRouteChunks < num_tokens)
    tokens *= 2;
  return tokens;
}
int RouteChunks(int num_tokens) {
  return static_cast<int>(ceil_div(num_tokens, TokensPerRouteChunk(num_tokens)));
}

// The operands and results of a rank. Its GPU must be the current device in the constructor.
struct RankData {
  RankData(const Workload& w, int rank, DeviceMemory& memory)
      : rank_number(Upload({rank}, memory)),
        ids(Upload(w.ids[rank], memory)),
        payload(MakeRandom<uint16_t>(int64_t{w.num_tokens} * w.hidden, SeedOf(Seed::kPayload, rank),
                                     memory)),
        rows(MakeRandom<uint16_t>(int64_t{w.capacity} * w.hidden, SeedOf(Seed::kRows, rank),
                                  memory)),
        weights(MakeRandom<float>(w.capacity, SeedOf(Seed::kWeights, rank), memory)),
        choice_weights(
            MakeRandom<float>(w.ids[rank].size(), SeedOf(Seed::kChoiceWeights, rank), memory)),
        dispatched(memory.Take(w.capacity * w.row_bytes())),
        row_weights(memory.Take(w.capacity * sizeof(float))),
        combined(memory.Take(w.num_tokens * w.row_bytes())) {
    const int64_t slots = int64_t{w.num_ranks} * w.num_tokens, rows = w.capacity;
    const int64_t choices = int64_t{w.num_tokens} * w.top_k;
    for (int64_t count : {slots, slots, choices, slots * w.top_k, rows, rows, rows, rows,
                          int64_t{w.local_experts()}, int64_t{1}, int64_t{1}}) {
      plan.push_back(memory.Take(count * sizeof(int32_t)));
    }
    const int64_t chunks = RouteChunks(w.num_tokens);
    for (int64_t count : {int64_t{w.num_ranks} * w.num_tokens * w.top_k,
                          w.num_ranks * chunks * (w.local_experts() + 1), chunks * w.num_ranks}) {
      route_scratch.push_back(memory.Take(count * sizeof(int32_t)));
    }
    CHECK(cudaDeviceSynchronize());
  }

  DeviceBuffer rank_number, ids;
  DeviceBuffer payload;                     // [num_tokens, hidden]: the tokens of dispatch
  DeviceBuffer rows, weights;               // [capacity, hidden] and [capacity]: combine sums them
  DeviceBuffer choice_weights;              // [num_tokens, top_k]: the router weights of dispatch
  DeviceBuffer dispatched, row_weights;     // [capacity, hidden] and [capacity]
  DeviceBuffer combined;                    // [num_tokens, hidden]
  std::vector<DeviceBuffer> plan;           // by PlanArray, from the kernels of route
  std::vector<DeviceBuffer> route_scratch;  // in the order of RouteParams
};

// ---- Launches, with parameters from cuda/calls, as in the package's handlers

enum class Op { kDispatch, kCombine, kRoute, kRoutedDispatch, kWeightedDispatch };

// Returns the bytes of a landing zone that is large enough for each operation.
int64_t ZoneBytes(const Workload& w) {
  const int64_t ids = array_bytes(1, int64_t{w.num_tokens} * w.top_k * sizeof(int32_t));
  const int64_t rows = array_bytes(w.num_tokens, w.row_bytes());
  const int64_t weights = array_bytes(w.num_tokens, w.top_k * sizeof(float));
  return std::max(ids, rows + weights);
}

// A call of one rank that is about to be launched.
struct Call {
  const Workload& workload;
  const RankData& data;
  RankView view;  // members that depend on the operation are not set
  int sms;
};

// The calls that a launch receives: the call of the GPU's rank, or the calls of ranks 0 and 1 if
// ranks share the GPU. The kernel computes the parameters of all ranks from these two calls.
using Calls = std::vector<Call>;

// Operands or results of a call.
struct Bound {
  Arrays arrays;
  std::vector<std::vector<int64_t>> all_dimensions;  // of the arrays

  // If ranks share a GPU, only buffers of the first rank have the alignment of cudaMalloc. Buffers
  // of other ranks follow directly, so the size of a buffer tells the alignment of the next one.
  void Add(const DataType& type, std::vector<int64_t> dimensions, const DeviceBuffer& buffer) {
    int64_t bytes = type.bytes;
    for (int64_t dimension : dimensions) bytes *= dimension;
    const auto& owned = all_dimensions.emplace_back(std::move(dimensions));
    Array& array = arrays.emplace_back();
    array.type = type;
    array.dimensions = {owned.data(), owned.size()};
    array.bytes = bytes;
    array.address_bits = static_cast<uintptr_t>(buffer.bytes);
    array.data = buffer.data;
  }
};

struct Arguments {
  Bound args, results;
};

void AddRouting(const Call& call, Bound* args) {
  const Workload& w = call.workload;
  const auto& plan = call.data.plan;
  args->Add(kInt32, {w.num_tokens, w.num_ranks}, plan[kTokenSlot]);
  args->Add(kInt32, {w.num_ranks, w.num_tokens}, plan[kSlotToken]);
  args->Add(kInt32, {w.num_tokens, w.top_k}, plan[kChoiceRank]);
  args->Add(kInt32, {w.num_ranks, w.num_tokens, w.top_k}, plan[kSlotRows]);
  args->Add(kInt32, {w.capacity}, plan[kRowSlot]);
}

void AddIds(const Call& call, Bound* args) {
  args->Add(kInt32, {call.workload.num_tokens, call.workload.top_k}, call.data.ids);
  args->Add(kInt32, {}, call.data.rank_number);
}

void AddPlan(const Call& call, Bound* results) {
  for (const DeviceBuffer& array : call.data.plan) {
    results->Add(kInt32, {array.bytes / kInt32.bytes}, array);
  }
}

// Adds the tokens and their router weights, and the results for both.
void AddPayload(const Call& call, Arguments* a) {
  const Workload& w = call.workload;
  a->args.Add(kBFloat16, {w.num_tokens, w.hidden}, call.data.payload);
  a->results.Add(kBFloat16, {w.capacity, w.hidden}, call.data.dispatched);
  a->args.Add(kFloat32, {w.num_tokens, w.top_k}, call.data.choice_weights);
  a->results.Add(kFloat32, {w.capacity}, call.data.row_weights);
}

// Launches the operation that `kind` describes. bind(call, &arguments) adds the arrays of a rank.
template <typename Kind, typename Bind>
void LaunchKind(const Kind& kind, const Calls& calls, const Kernels& kernels, cudaStream_t stream,
                const Bind& bind) {
  using Params = typename Kind::Params;
  std::vector<Params> ranks(calls.size());
  // Even padding bytes must be equal on all ranks that share a GPU (device/ranks.cuh).
  std::memset(static_cast<void*>(ranks.data()), 0, ranks.size() * sizeof(Params));
  for (size_t i = 0; i < calls.size(); ++i) {
    const Call& call = calls[i];
    Arguments a;
    bind(call, &a);
    RankView view = call.view;
    view.operation = Kind::kOperation;
    view.signature = Hash(static_cast<uint64_t>(Kind::kOperation), call.workload.num_experts);
    const bool is_colocated = calls.size() > 1;
    CHECK(kind.Describe({view, is_colocated, call.sms},
                        {a.args.arrays.data(), a.args.arrays.size()},
                        {a.results.arrays.data(), a.results.arrays.size()}, &ranks[i]));
  }
  const int blocks = grid_of(ranks[0], calls[0].sms).blocks;
  CHECK(kernels.launch(ranks.data(), blocks, stream));
}

void LaunchCalls(const Calls& calls, Op operation, const Kernels& kernels, cudaStream_t stream) {
  const Workload& w = calls[0].workload;
  const auto launch = [&](const auto& kind, const auto& bind) {
    LaunchKind(kind, calls, kernels, stream, bind);
  };
  constexpr int64_t kAlignment = 1;
  constexpr bool kMayDrop = false;  // the capacity holds all rows
  switch (operation) {
    case Op::kDispatch:
      return launch(DispatchCall{{{}, {/*num_choice_arrays=*/1, /*leaves_tail=*/false}}},
                    [](const Call& call, Arguments* a) {
                      AddPayload(call, a);
                      AddRouting(call, &a->args);
                    });
    case Op::kWeightedDispatch:
      return launch(WeightedDispatchCall{{}, true, true}, [](const Call& call, Arguments* a) {
        const Workload& w = call.workload;
        a->args.Add(kBFloat16, {w.num_tokens, w.hidden}, call.data.payload);
        a->args.Add(kBFloat16, {w.capacity, w.hidden}, call.data.rows);
        a->args.Add(kFloat32, {w.capacity}, call.data.weights);
        AddRouting(call, &a->args);
        a->results.Add(kBFloat16, {w.capacity, w.hidden}, call.data.dispatched);
        a->results.Add(kFloat32, {w.capacity}, call.data.row_weights);
      });
    case Op::kRoutedDispatch: {
      RoutedDispatchCall kind = {};
      kind.num_experts = w.num_experts;
      kind.alignment = kAlignment;
      kind.may_drop = kMayDrop;
      kind.payload.num_choice_arrays = 1;
      return launch(kind, [](const Call& call, Arguments* a) {
        AddIds(call, &a->args);
        AddPlan(call, &a->results);
        AddPayload(call, a);
      });
    }
    case Op::kCombine: {
      CombineCall kind = {};
      kind.num_pairs = 1;
      kind.wire = kBFloat16.name;
      return launch(kind, [](const Call& call, Arguments* a) {
        const Workload& w = call.workload;
        a->args.Add(kBFloat16, {w.capacity, w.hidden}, call.data.rows);
        a->args.Add(kFloat32, {w.capacity}, call.data.weights);
        AddRouting(call, &a->args);
        a->results.Add(kBFloat16, {w.num_tokens, w.hidden}, call.data.combined);
      });
    }
    case Op::kRoute:
      return launch(RouteCall{{},
                              w.num_experts,
                              kAlignment,
                              TokensPerRouteChunk(w.num_tokens),
                              kMayDrop,
                              /*parts=*/1},
                    [](const Call& call, Arguments* a) {
                      AddIds(call, &a->args);
                      AddPlan(call, &a->results);
                      for (const DeviceBuffer& scratch : call.data.route_scratch) {
                        a->results.Add(kInt32, {scratch.bytes / kInt32.bytes}, scratch);
                      }
                    });
  }
}

// ---- Running

const std::map<std::string, Op> kOperations = {{"dispatch", Op::kDispatch},
                                               {"combine", Op::kCombine},
                                               {"route", Op::kRoute},
                                               {"routed", Op::kRoutedDispatch},
                                               {"weighted", Op::kWeightedDispatch}};

// A CUDA graph of untimed launches and then timed launches, on one GPU.
class GpuGraph {
 public:
  GpuGraph(const Calls& calls, Op operation, const Kernels& kernels, int untimed, int timed) {
    CHECK(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < untimed; ++i) LaunchCalls(calls, operation, kernels, stream_);
    stream_.Begin(cudaEventRecordExternal);
    for (int i = 0; i < timed; ++i) LaunchCalls(calls, operation, kernels, stream_);
    stream_.End(cudaEventRecordExternal);
    cudaGraph_t graph;
    CHECK(cudaStreamEndCapture(stream_, &graph));
    CHECK(cudaGraphInstantiate(&executable_, graph, 0));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaGraphUpload(executable_, stream_));
    CHECK(cudaStreamSynchronize(stream_));
  }
  GpuGraph(const GpuGraph&) = delete;
  ~GpuGraph() { cudaGraphExecDestroy(executable_); }

  // Runs the graph. Returns the time of the timed launches.
  double Microseconds() {
    CHECK(cudaGraphLaunch(executable_, stream_));
    return stream_.Microseconds();
  }

 private:
  TimedStream stream_;
  cudaGraphExec_t executable_;
};

struct Ranks {
  Workspace& workspace;
  const Workload& workload;
  std::vector<std::unique_ptr<DeviceMemory>> memory;  // by GPU
  std::vector<std::unique_ptr<RankData>> data;
  std::vector<RankView> views;
};

Ranks MakeRanks(const Options& options, const Workload& w, Workspace& workspace) {
  CHECK(workspace.Reserve(ZoneBytes(w) * w.num_ranks, 0));
  Ranks ranks = {workspace, w};
  for (int gpu = 0; gpu < w.num_gpus; ++gpu) {
    ranks.memory.push_back(std::make_unique<DeviceMemory>(w.ranks_per_gpu()));
  }
  for (int rank = 0; rank < w.num_ranks; ++rank) {
    const int gpu = w.gpu_of(rank);
    CHECK(cudaSetDevice(gpu));
    ranks.memory[gpu]->BeginRank();
    ranks.data.push_back(std::make_unique<RankData>(w, rank, *ranks.memory[gpu]));
    RankView view = {};
    CHECK(workspace.View(gpu, &view));
    view.error += rank - view.rank;  // `view` is that of the GPU's first rank
    view.rank = rank;
    view.launch = 1;  // equal for all launches, which follow each other on one stream
    view.timeout_ns = view.first_timeout_ns = static_cast<uint64_t>(options.timeout_s * 1e9);
    ranks.views.push_back(view);
  }
  return ranks;
}

using Graphs = std::vector<std::unique_ptr<GpuGraph>>;  // by GPU

Graphs MakeGraphs(const Ranks& ranks, Op operation, int sms, int untimed, int timed) {
  const Workload& w = ranks.workload;
  Graphs graphs;
  for (int gpu = 0; gpu < w.num_gpus; ++gpu) {
    CHECK(cudaSetDevice(gpu));
    Calls calls;
    for (int rank = 0; rank < w.num_ranks && calls.size() < 2; ++rank) {
      if (w.gpu_of(rank) != gpu) continue;
      calls.push_back({w, *ranks.data[rank], ranks.views[rank], sms});
    }
    graphs.push_back(
        std::make_unique<GpuGraph>(calls, operation, ranks.workspace.kernels(), untimed, timed));
  }
  return graphs;
}

// Runs the graphs of all GPUs at the same time. Returns the longest time in microseconds.
double RunGraphs(const Ranks& ranks, Graphs& graphs) {
  std::vector<double> us(graphs.size());
  ForEachGpu(ranks.workload.num_gpus, [&](int gpu) { us[gpu] = graphs[gpu]->Microseconds(); });
  CHECK(ranks.workspace.Failure());
  return *std::max_element(us.begin(), us.end());
}

// ---- Checking

// Returns a rank's results of an operation, except those that may depend on the number of SMs.
std::vector<DeviceBuffer> ResultsOf(const RankData& data, Op operation) {
  std::vector<DeviceBuffer> results;
  if (operation == Op::kCombine) return {data.combined};
  if (operation == Op::kRoutedDispatch || operation == Op::kRoute) results = data.plan;
  if (operation != Op::kRoute) results.push_back(data.dispatched);
  if (operation != Op::kRoute && operation != Op::kWeightedDispatch) {
    results.push_back(data.row_weights);
  }
  return results;
}

// Overwrites the results, so that a check cannot pass with results of an earlier launch.
void Poison(const Ranks& ranks, Op operation) {
  for (int rank = 0; rank < ranks.workload.num_ranks; ++rank) {
    CHECK(cudaSetDevice(ranks.workload.gpu_of(rank)));
    for (const DeviceBuffer& result : ResultsOf(*ranks.data[rank], operation)) {
      CHECK(cudaMemset(result.as<void>(), 0xFF, result.bytes));
    }
    CHECK(cudaDeviceSynchronize());
  }
}

// Returns a fingerprint of the results of all ranks. Equal results have equal fingerprints.
uint64_t FingerprintOf(const Ranks& ranks, Op operation) {
  uint64_t total = 0;
  for (int rank = 0; rank < ranks.workload.num_ranks; ++rank) {
    CHECK(cudaSetDevice(ranks.workload.gpu_of(rank)));
    unsigned long long *sum, found;
    CHECK(cudaMalloc(&sum, sizeof(*sum)));
    for (const DeviceBuffer& result : ResultsOf(*ranks.data[rank], operation)) {
      CHECK(result.bytes % 4 == 0 ? Problem() : "--check needs results of whole 32-bit words");
      CHECK(cudaMemset(sum, 0, sizeof(*sum)));
      Fingerprint<<<1024, 256>>>(result.as<uint32_t>(), result.bytes / 4, sum);
      CHECK(cudaMemcpy(&found, sum, sizeof(found), cudaMemcpyDeviceToHost));
      total = Hash(total, found);
    }
    CHECK(cudaFree(sum));
  }
  return total;
}

// Maps each operation to the fingerprint of its first launch.
using Fingerprints = std::map<Op, uint64_t>;

void CheckResults(const Ranks& ranks, Op operation, Fingerprints* expected) {
  const uint64_t found = FingerprintOf(ranks, operation);
  const uint64_t first = expected->emplace(operation, found).first->second;
  CHECK(found == first ? Problem() : "results differ from those of the first launch");
}

// ---- Measuring

void PrintLine(const Workload& w, const std::string& name, int sms, const Summary& us,
               const uint64_t* bits) {
  std::printf("%-16s tokens=%d hidden=%d top_k=%d experts=%d ranks=%d", name.c_str(), w.num_tokens,
              w.hidden, w.top_k, w.num_experts, w.num_ranks);
  if (w.ranks_per_gpu() > 1) std::printf(" gpus=%d", w.num_gpus);
  std::printf(" capacity=%d sms=%d", w.capacity, sms);
  std::printf(" us=%.2f min=%.2f max=%.2f", us.median, us.least, us.greatest);
  if (bits != nullptr) std::printf(" bits=%016llx", static_cast<unsigned long long>(*bits));
  std::printf("\n");
  std::fflush(stdout);
}

void Measure(const Options& options, const Ranks& ranks, const std::string& name, int sms,
             Fingerprints* checked) {
  const Op operation = kOperations.at(name);
  if (options.check) {
    Poison(ranks, operation);
    Graphs once = MakeGraphs(ranks, operation, sms, 0, 1);
    RunGraphs(ranks, once);
    CheckResults(ranks, operation, checked);
  }
  Graphs graphs = MakeGraphs(ranks, operation, sms, kUntimedLaunches, options.iters);
  std::vector<double> us;
  for (int i = 0; i < options.samples; ++i) {
    us.push_back(RunGraphs(ranks, graphs) / options.iters);
  }
  if (options.check) CheckResults(ranks, operation, checked);
  PrintLine(ranks.workload, name, sms, Summary(us),
            options.check ? &checked->at(operation) : nullptr);
}

void MeasureTokens(const Options& options, int num_tokens, Workspace& workspace) {
  const Workload workload = MakeWorkload(options, num_tokens);
  const Ranks ranks = MakeRanks(options, workload, workspace);
  Graphs route = MakeGraphs(ranks, Op::kRoute, options.sms[0], 0, 1);
  RunGraphs(ranks, route);
  Fingerprints checked;
  for (int sms : options.sms) {
    for (const std::string& name : options.ops) {
      CHECK(kOperations.count(name) > 0 ? Problem() : "not an operation: '" + name + "'");
      const Op operation = kOperations.at(name);
      if (operation == Op::kRoutedDispatch &&
          !fits_routed_dispatch(options.ranks, num_tokens, options.top_k, options.experts)) {
        continue;
      }
      Measure(options, ranks, name, sms, &checked);
    }
  }
}

void MeasureAll(const Options& options) {
  Topology topology = {{}, options.ranks};
  for (int rank = 0; rank < options.ranks; ++rank) {
    const int ordinal = rank / (options.ranks / options.gpus);
    AddDevice(ordinal, {0, ordinal});
    topology.devices.push_back(ordinal);
  }
  Workspace& workspace = Workspace::Get(topology, WorkspaceKind::kWhole);
  for (int tokens : options.tokens) MeasureTokens(options, tokens, workspace);
}

}  // namespace
}  // namespace moe_a2a

int main(int argc, char** argv) { moe_a2a::MeasureAll(moe_a2a::ParseOptions(argc, argv)); }
