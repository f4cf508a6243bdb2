// The package's own kernels, on all GPUs of one process or with all ranks on one GPU, without XLA and
// Python: for tuning, and under compute-sanitizer and ncu. Times them inside CUDA graphs, and compares
// their results with the host's.
//
// Build at the root of the repository, in one line; -DMOE_A2A_TEST_HOOKS works too:
//
//   nvcc -std=c++17 -O3 -arch=sm_90 -lineinfo -Icuda -o kernels_bench
//        tools/driver/kernels.cu cuda/kernels/*.cu cuda/kernels/*.cc
//        cuda/colocated/*.cu cuda/colocated/*.cc cuda/runtime/*.cc
//
//   kernels_bench [--tokens 4096] [--sms 96] [--send-blocks 0]      lists, separated by commas
//                 [--send-teams 0] [--receive-teams 0]
//                 [--hidden 7168] [--top-k 8] [--experts 256] [--capacity tight|worst] [--skew 1]
//                 [--ops dispatch,combine,route,routed,weighted,format-dispatch,routed-format,
//                        format-combine]
//                 [--format blockwise|mx|nv] [--decode] [--alternate]
//                 [--gpus N | --ranks N] [--iters 32] [--samples 7] [--check] [--timeout 5]
//                 [--bare] [--ablate PART]
//
// Prints one line per operation and combination of the lists. Times are the slowest device's, in
// microseconds per launch (route: per pair of launches). `wire` is what the busiest direction of
// any rank's links carries: a token once per remote rank. Compiled with -DMOE_A2A_TIMELINE it prints
// also, of the last launch of rank 0, when each mark of params.h was passed first and last.
//
//   --gpus         runs one rank on each of the first N GPUs; the default is all visible GPUs
//   --ranks        runs N ranks, at least 2, on the first GPU, and prints gpus=1 after ranks=N. Each launch
//                  is for all ranks, and the kernels are those of cuda/colocated/. A rank gets at most as many
//                  blocks as cuda/ffi/handlers.cc allows: larger numbers in --sms are reduced to that. `wire`
//                  and GB/s are computed as for N GPUs, but these bytes cross no link
//   --send-blocks  0: as many as cuda/ffi/handlers.cc would take; route has none to choose. So with
//                  --send-teams and --receive-teams, of a block
//   --capacity     rows of a rank: tight, the fullest rank's rounded up to 128; worst, the most
//   --skew         rank 0 gets this many times its share of the choices (at most all of them)
//   --bare         dispatch without router weights
//   --format       of the tokens of format-dispatch and routed-format, and of the partial sums of
//                  format-combine
//   --decode       tokens arrive decoded
//   --alternate    dispatch and combine take turns in one graph, and are timed as a pair
//   --check        compares a launch into poisoned outputs, and what the last timed launch left
//   --ablate       leaves out a part: {dispatch,combine}-{send,receive}
//   --timeout      of the kernels' own waits, in seconds: a sanitizer may need more than five
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "driver.h"
#include "kernels/grid.h"
#include "kernels/launch.h"
#include "layout.h"
#include "params.h"
#include "runtime/workspace.h"

namespace moe_a2a {
namespace {

// Launches before the timed ones: devices start at different times and fall into step here.
constexpr int kUntimedLaunches = 2;

#ifdef MOE_A2A_TIMELINE
constexpr int kMaxBlocks = 256;
constexpr int64_t kTimelineMarks = int64_t{kMaxBlocks} * kMaxTeams * kNumMarks;
#endif

// ---- Command line

struct Options {
  std::vector<int> tokens = {4096}, sms = {96}, send_blocks = {0};
  int hidden = 7168, top_k = 8, experts = 256;
  std::vector<std::string> ops = {"dispatch", "combine", "route", "routed"};
  bool worst_capacity = false, check = false, alternate = false, bare = false, decode = false;
  double skew = 1, timeout_s = 5;
  std::string ablate, format = "blockwise";
  int iters = 32, samples = 7;
  int gpus = 0;   // 0: all that are visible
  int ranks = 0;  // 0: one on each GPU; else all on the first GPU
  std::vector<int> send_teams = {0}, receive_teams = {0};
};

std::vector<std::string> Split(const std::string& list) {
  std::vector<std::string> parts(1);
  for (char c : list) {
    if (c == ',') {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

double ToNumber(const std::string& text) {
  char* end = nullptr;
  const double number = std::strtod(text.c_str(), &end);
  const bool is_number = !text.empty() && *end == 0;
  CHECK(is_number ? Problem() : "not a number: '" + text + "'");
  return number;
}

std::vector<int> ToInts(const std::string& list) {
  std::vector<int> numbers;
  for (const std::string& part : Split(list)) numbers.push_back(static_cast<int>(ToNumber(part)));
  return numbers;
}

int ToInt(const std::string& text) { return static_cast<int>(ToNumber(text)); }

bool SetFlag(const std::string& name, Options* o) {
  if (name == "--check") return o->check = true;
  if (name == "--alternate") return o->alternate = true;
  if (name == "--bare") return o->bare = true;
  if (name == "--decode") return o->decode = true;
  return false;
}

bool SetValue(const std::string& name, const std::string& value, Options* o) {
  if (name == "--tokens") return o->tokens = ToInts(value), true;
  if (name == "--sms") return o->sms = ToInts(value), true;
  if (name == "--send-blocks") return o->send_blocks = ToInts(value), true;
  if (name == "--hidden") return o->hidden = ToInt(value), true;
  if (name == "--top-k") return o->top_k = ToInt(value), true;
  if (name == "--experts") return o->experts = ToInt(value), true;
  if (name == "--ops") return o->ops = Split(value), true;
  if (name == "--skew") return o->skew = ToNumber(value), true;
  if (name == "--iters") return o->iters = ToInt(value), true;
  if (name == "--samples") return o->samples = ToInt(value), true;
  if (name == "--format") return o->format = value, true;
  if (name == "--ablate") return o->ablate = value, true;
  if (name == "--send-teams") return o->send_teams = ToInts(value), true;
  if (name == "--receive-teams") return o->receive_teams = ToInts(value), true;
  if (name == "--gpus") return o->gpus = ToInt(value), true;
  if (name == "--ranks") return o->ranks = ToInt(value), true;
  if (name == "--timeout") return o->timeout_s = ToNumber(value), true;
  if (name == "--capacity" && (value == "tight" || value == "worst")) {
    return o->worst_capacity = value == "worst", true;
  }
  return false;
}

// Checks the numbers of GPUs and ranks, and chooses those that the command line leaves open.
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

// Reduces the numbers of blocks to what handlers.cc allows each rank where ranks share a GPU. Drops a number
// that becomes equal to the one before it.
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
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (SetFlag(name, &options)) continue;
    const bool is_known = i + 1 < argc && SetValue(name, argv[i + 1], &options);
    CHECK(is_known ? Problem() : "not an option, or without its value: '" + name + "'");
    ++i;
  }
  ChooseRanks(&options);
  CHECK(options.hidden >= 1 && options.iters >= 1 && options.samples >= 1);
  CHECK(options.top_k >= 1 && options.top_k <= kMaxTopK && options.top_k <= options.experts);
  CHECK(options.experts % options.ranks == 0);
  CHECK(options.experts / options.ranks <= kMaxLocalExperts);
  CHECK(options.skew > 0 && options.timeout_s > 0);
  // All choices of a token may fall on one side.
  CHECK(options.skew == 1 || options.top_k <= options.experts / options.ranks);
  for (int tokens : options.tokens) CHECK(tokens >= 1);
  for (int sms : options.sms) CHECK(sms >= 1);
  if (options.gpus < options.ranks) LimitBlocks(&options);
  for (int send_blocks : options.send_blocks) CHECK(send_blocks >= 0);
  for (const std::vector<int>& list : {options.send_teams, options.receive_teams}) {
    for (int teams : list) {  // 0, or a power of two
      CHECK(teams >= 0 && teams <= kMaxTeams && (teams & (teams - 1)) == 0);
    }
  }
#ifdef MOE_A2A_TIMELINE
  for (int sms : options.sms) CHECK(sms <= kMaxBlocks);
#endif
  return options;
}

// ---- Threads of the host

// Calls body(gpu) in a thread of its own for every GPU, with that GPU current.
void ForEachGpu(int num_gpus, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int gpu = 0; gpu < num_gpus; ++gpu) {
    threads.emplace_back([&body, gpu] {
      CHECK(cudaSetDevice(gpu));
      body(gpu);
    });
  }
  JoinAll(threads);
}

// Used once.
class Barrier {
 public:
  explicit Barrier(int count) : missing_(count) {}
  void Wait() {
    --missing_;
    while (missing_ > 0) std::this_thread::yield();
  }

 private:
  std::atomic<int> missing_;
};

// Leaves out a part of the work, to see what the rest takes: nothing is sent to peers, or nothing that
// was sent is used.
void Ablate(const std::string& what, const Workload& w, int rank, Plan* plan) {
  const int64_t tokens = w.num_tokens;
  const auto erase_peers = [&](std::vector<int32_t>& by_rank, int64_t each) {
    for (int64_t i = 0; i < w.num_ranks * each; ++i) {
      if (i / each != rank) by_rank[i] = -1;
    }
  };
  if (what == "dispatch-send") erase_peers((*plan)[kSlotToken], tokens);
  if (what == "combine-send") erase_peers((*plan)[kSlotRows], tokens * w.top_k);
  if (what == "dispatch-receive") (*plan)[kSlotRows].assign((*plan)[kSlotRows].size(), -1);
  if (what == "combine-receive") (*plan)[kTokenSlot].assign((*plan)[kTokenSlot].size(), -1);
}

const std::map<std::string, TokenFormat> kFormats = {{"blockwise", TokenFormat::kBlockwiseFp8},
                                                     {"mx", TokenFormat::kMxFp8},
                                                     {"nv", TokenFormat::kNvFp4}};

Workload MakeWorkload(const Options& options, int num_tokens) {
  CHECK(kFormats.count(options.format) > 0);
  Workload w = {options.ranks,
                options.gpus,
                num_tokens,
                options.hidden,
                options.top_k,
                options.experts,
                kFormats.at(options.format),
                !options.bare,
                options.decode};
  for (int rank = 0; rank < w.num_ranks; ++rank) w.ids.push_back(DrawIds(w, options.skew, rank));
  const int64_t capacity = ChooseCapacity(w, options.worst_capacity);
  CHECK(capacity <= INT32_MAX);
  w.capacity = static_cast<int>(capacity);
  w.plans.assign(w.num_ranks, EmptyPlan(w));
  w.choice_row.assign(w.num_ranks, std::vector<int32_t>(w.ids[0].size()));
  AssignSlots(&w);
  AssignRows(&w);
  for (int rank = 0; rank < w.num_ranks; ++rank) Ablate(options.ablate, w, rank, &w.plans[rank]);
  return w;
}

// ---- Memory of the devices

// Adds to the message of a failed allocation what to do where ranks share a GPU.
Problem WithRemedy(int ranks_per_gpu, const Problem& problem) {
  if (problem.empty() || ranks_per_gpu == 1) return problem;
  return problem + "; " + std::to_string(ranks_per_gpu) +
         " ranks share the GPU's memory: use fewer ranks or tokens, or a smaller hidden size";
}

// An array of one rank, in memory of DeviceMemory.
class DeviceBuffer {
 public:
  DeviceBuffer(void* data, int64_t bytes) : data_(data), bytes_(bytes) {}

  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  int64_t bytes() const { return bytes_; }

 private:
  void* data_;
  int64_t bytes_;
};

// The memory of all ranks of one GPU, which must be current when an array is taken. All ranks take arrays of
// the same sizes in the same order. Each allocation holds one array of all ranks, rank after rank: kernels
// for ranks that share a GPU need a constant distance between the arrays of two ranks (device/ranks.cuh).
class DeviceMemory {
 public:
  explicit DeviceMemory(int num_ranks) : num_ranks_(num_ranks) {}
  DeviceMemory(const DeviceMemory&) = delete;
  ~DeviceMemory() {
    for (const DeviceBuffer& array : first_) cudaFree(array.as<void>());
  }

  // Makes Take() return arrays of the next rank. Also called before the first rank.
  void BeginRank() {
    ++rank_;
    num_taken_ = 0;
  }

  DeviceBuffer Take(int64_t bytes) {
    if (rank_ == 0) first_.emplace_back(Allocate(bytes), bytes);
    CHECK(rank_ < num_ranks_ && num_taken_ < first_.size());
    const DeviceBuffer& first = first_[num_taken_++];
    CHECK(first.bytes() == bytes);
    return DeviceBuffer(first.as<char>() + rank_ * bytes, bytes);
  }

 private:
  void* Allocate(int64_t bytes) const {
    void* data = nullptr;
    CHECK(WithRemedy(num_ranks_, ProblemOf(cudaMalloc(&data, num_ranks_ * bytes))));
    return data;
  }

  const int num_ranks_;
  int rank_ = -1;
  size_t num_taken_ = 0;             // by this rank
  std::vector<DeviceBuffer> first_;  // of the first rank: each begins an allocation
};

DeviceBuffer Upload(const std::vector<int32_t>& values, DeviceMemory& memory) {
  DeviceBuffer buffer = memory.Take(values.size() * sizeof(int32_t));
  CHECK(cudaMemcpy(buffer.as<void>(), values.data(), buffer.bytes(), cudaMemcpyHostToDevice));
  return buffer;
}

template <typename T>
DeviceBuffer MakeRandom(int64_t count, uint64_t seed, DeviceMemory& memory) {
  DeviceBuffer buffer = memory.Take(count * sizeof(T));
  FillRandom<T><<<1024, 256>>>(buffer.as<T>(), count, seed);
  CHECK(cudaGetLastError());
  return buffer;
}

// As in jax_moe_a2a/lowering.py.
int TokensPerRouteChunk(int num_tokens) { return num_tokens <= 2048 ? 64 : 256; }
int RouteChunks(int num_tokens) {
  return static_cast<int>(ceil_div(num_tokens, TokensPerRouteChunk(num_tokens)));
}

// Operands and results of one rank. Made with the rank's device current.
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
    for (const auto& values : w.plans[rank]) {
      plan.push_back(Upload(values, memory));
      routed.push_back(memory.Take(plan.back().bytes()));
    }
    const int64_t chunks = RouteChunks(w.num_tokens);
    for (int64_t count : {int64_t{w.num_ranks} * w.num_tokens * w.top_k,
                          w.num_ranks * chunks * (w.local_experts() + 1), chunks * w.num_ranks}) {
      route_scratch.push_back(memory.Take(count * sizeof(int32_t)));
    }
#ifdef MOE_A2A_TIMELINE
    timeline.push_back(memory.Take(kTimelineMarks * sizeof(uint64_t)));
#endif
    CHECK(cudaDeviceSynchronize());
  }

  DeviceBuffer rank_number, ids;
  DeviceBuffer payload;                     // [num_tokens, hidden]: what dispatch sends
  DeviceBuffer rows, weights;               // [capacity, hidden] and [capacity]: what combine sums
  DeviceBuffer choice_weights;              // [num_tokens, top_k]: what dispatch sends beside it
  DeviceBuffer dispatched, row_weights;     // [capacity, hidden] and [capacity]
  DeviceBuffer combined;                    // [num_tokens, hidden]
  std::vector<DeviceBuffer> plan;           // by PlanArray, from the host
  std::vector<DeviceBuffer> routed;         // by PlanArray, from route
  std::vector<DeviceBuffer> route_scratch;  // in the order of RouteParams
  std::vector<DeviceBuffer> timeline;       // one, with -DMOE_A2A_TIMELINE
};

// ---- Launches, as cuda/ffi/handlers.cc makes them

// What --ops names. The protocol (Operation) counts the last four among its dispatches and combines.
enum class Op {
  kDispatch,
  kCombine,
  kRoute,
  kRoutedDispatch,
  kWeightedDispatch,
  kFormatDispatch,
  kRoutedFormatDispatch,
  kFormatCombine
};
constexpr float kGlobalScale = 8.f / 2688;  // of NvFp4: partial sums are up to 8

// One point of the lists on the command line.
struct Tuning {
  int sms, send_blocks, send_teams, receive_teams;  // 0: to be chosen
};

// As handlers.cc chooses it, but for the senders that the command line asks for.
template <typename Params>
Grid ChooseGrid(const Params& p, const Tuning& tuning) {
  Grid grid = grid_of(p, tuning.sms);
  if (tuning.send_blocks > 0) grid.roles.send_blocks = std::min(tuning.send_blocks, grid.blocks);
  if (tuning.send_teams > 0) grid.roles.send_teams = tuning.send_teams;
  if (tuning.receive_teams > 0) grid.roles.receive_teams = tuning.receive_teams;
  return grid;
}

int64_t ZoneBytes(Op operation, const Workload& w) {
  const int64_t ids = array_bytes(1, w.ids_bytes());
  const int64_t rows = array_bytes(w.num_tokens, w.row_bytes());
  const int64_t weights = w.weights ? array_bytes(w.num_tokens, w.top_k * sizeof(float)) : 0;
  switch (operation) {
    case Op::kRoute: return ids;
    case Op::kDispatch: return rows + weights;
    case Op::kRoutedDispatch: return rows + weights;
    default: return rows;
  }
}

// A call of one rank that is about to be launched.
struct Call {
  const Workload& workload;
  const RankData& data;
  RankView view;  // all but what the operation gives
  Tuning tuning;
};

// The calls that a launch receives: that of the GPU's rank, or those of ranks 0 and 1 where ranks share the
// GPU. From these two the kernel computes the parameters of all ranks.
using Calls = std::vector<Call>;

RankView ViewOf(const Call& call, Operation operation) {
  const Workload& w = call.workload;
  RankView view = call.view;
  view.operation = operation;
  view.signature = Hash(static_cast<uint64_t>(operation), w.num_tokens);
  for (uint64_t value : {w.hidden, w.top_k, w.num_experts, w.capacity}) {
    view.signature = Hash(view.signature, value);
  }
#ifdef MOE_A2A_TIMELINE
  view.timeline = call.data.timeline[0].as<uint64_t>();
#endif
  return view;
}

RoutingView RoutingOf(const Call& call) {
  const auto ints = [&](PlanArray array) { return call.data.plan[array].as<const int32_t>(); };
  RoutingView routing = {};
  routing.token_slot = ints(kTokenSlot);
  routing.slot_token = ints(kSlotToken);
  routing.choice_rank = ints(kChoiceRank);
  routing.slot_rows = ints(kSlotRows);
  routing.row_slot = ints(kRowSlot);
  routing.num_tokens = call.workload.num_tokens;
  routing.top_k = call.workload.top_k;
  routing.capacity = call.workload.capacity;
  return routing;
}

// The widest access that rows of this size allow. cudaMalloc aligns the arrays of the first rank. Where ranks
// share a GPU, their arrays are a number of unencoded rows apart: a multiple of the width on every rank.
int32_t Width(int64_t row_bytes) {
  return row_bytes % 16 == 0 ? 16 : row_bytes % 4 == 0 ? 4 : row_bytes % 2 == 0 ? 2 : 1;
}

FailureFill FillOf(const DeviceBuffer& result) { return {result.as<void>(), result.bytes(), 0xFF}; }

DispatchParams MakeDispatchOf(Operation operation, const Call& call) {
  const Workload& w = call.workload;
  const RankData& data = call.data;
  DispatchParams p = {};
  p.view = ViewOf(call, operation);
  p.routing = RoutingOf(call);
  p.num_arrays = 1;
  p.zone_bytes = ZoneBytes(Op::kDispatch, w);  // A routed dispatch takes as much.
  p.arrays[0] = {data.payload.as<const char>(), data.dispatched.as<char>(), w.row_bytes(), 0, 0,
                 Width(w.row_bytes())};
  p.fills[0] = FillOf(data.dispatched);
  if (!w.weights) return p;
  constexpr int64_t kBytes = sizeof(float);
  p.num_arrays = 2;
  p.arrays[1] = {data.choice_weights.as<const char>(),
                 data.row_weights.as<char>(),
                 w.top_k * kBytes,
                 kBytes,
                 array_bytes(w.num_tokens, w.row_bytes()),
                 kBytes};
  p.fills[1] = FillOf(data.row_weights);
  return p;
}

DispatchParams MakeDispatch(const Call& call) { return MakeDispatchOf(Operation::kDispatch, call); }

void FillPlan(const RankData& data, RoutePlan* plan) {
  for (int i = 0; i < kNumPlanArrays; ++i) plan->*kPlanArrays[i] = data.routed[i].as<int32_t>();
}

DispatchParams MakeWeightedDispatch(const Call& call) {
  const RankData& data = call.data;
  DispatchParams p = MakeDispatch(call);
  ++p.view.signature;
  p.num_arrays = 1;
  p.zone_bytes = ZoneBytes(Op::kWeightedDispatch, call.workload);
  p.weighting = {ElementType::kBFloat16, data.weights.as<const float>(), data.rows.as<const char>(),
                 data.row_weights.as<float>()};
  p.fills[1] = FillOf(data.row_weights);
  return p;
}

RoutedDispatchParams MakeRoutedDispatch(const Call& call) {
  const Workload& w = call.workload;
  RoutedDispatchParams p = {};
  p.exchange = MakeDispatchOf(Operation::kRoutedDispatch, call);
  p.ids = call.data.ids.as<const int32_t>();
  p.rank = call.data.rank_number.as<const int32_t>();
  p.num_experts = w.num_experts;
  p.alignment = 1;
  p.first_choice = -1;  // The capacity holds all rows.
  p.num_results = p.exchange.num_arrays;
  FillPlan(call.data, &p.plan);
  for (int i = 0; i < kNumPlanArrays; ++i) p.plan_fills[i] = FillOf(call.data.routed[i]);
  return p;
}

// Where the scales begin behind all values, if rows are not decoded.
int64_t ScalesOffset(const Workload& w) {
  return round_up(w.capacity * value_bytes(w.format, w.hidden), kVectorBytes);
}

// Makes a dispatch one with a format. Assigns the encoding's members one by one, because a copy of a temporary
// may copy its padding. Padding between two members of a 64-bit word must be equal on all ranks that share
// a GPU (device/ranks.cuh).
void Encode(const Call& call, DispatchParams& exchange, Encoding& encoding) {
  const Workload& w = call.workload;
  exchange.view.signature += 2;
  const int64_t values_zone = array_bytes(w.num_tokens, value_bytes(w.format, w.hidden));
  exchange.zone_bytes = values_zone + array_bytes(w.num_tokens, scale_bytes(w.format, w.hidden));
  if (w.weights) {
    exchange.arrays[2] = exchange.arrays[1];
    exchange.arrays[2].zone_offset = exchange.zone_bytes;
    exchange.zone_bytes += array_bytes(w.num_tokens, exchange.arrays[2].row_bytes);
  }
  ++exchange.num_arrays;
  MovedArray& values = exchange.arrays[0];
  MovedArray& scales = exchange.arrays[1];
  values.row_bytes = value_bytes(w.format, w.hidden);
  values.width = Width(values.row_bytes);
  scales = values;
  scales.out = w.decode ? nullptr : scales.out + ScalesOffset(w);
  scales.row_bytes = scale_bytes(w.format, w.hidden);
  scales.width = Width(scales.row_bytes);
  scales.zone_offset = values_zone;
  encoding.format = w.format;
  encoding.type = ElementType::kBFloat16;
  encoding.decode = w.decode;
  encoding.num_leaves = 1;
  encoding.global_scale = kGlobalScale;
}

FormatDispatchParams MakeFormatDispatch(const Call& call) {
  FormatDispatchParams p = {};
  p.exchange = MakeDispatch(call);
  p.num_results = p.exchange.num_arrays;
  Encode(call, p.exchange, p.encoding);
  return p;
}

RoutedDispatchParams MakeRoutedFormatDispatch(const Call& call) {
  RoutedDispatchParams p = MakeRoutedDispatch(call);
  Encode(call, p.exchange, p.encoding);
  return p;
}

CombineParams MakeCombine(const Call& call) {
  const Workload& w = call.workload;
  CombineParams p = {};
  p.view = ViewOf(call, Operation::kCombine);
  p.routing = RoutingOf(call);
  p.type = ElementType::kBFloat16;
  p.num_summed = 1;
  p.zone_bytes = ZoneBytes(Op::kCombine, w);
  SummedArray& array = p.summed[0];
  array.rows = call.data.rows.as<const void>();
  array.out = call.data.combined.as<void>();
  array.elements = w.hidden;
  array.vectorized = Width(w.row_bytes()) == 16;
  p.listed = array.vectorized && w.top_k + w.num_ranks <= kWarpThreads;
  p.fills[0] = FillOf(call.data.combined);
  p.num_pairs = 1;
  p.weights_per_row = 1;
  p.elements_per_weight = w.hidden;
  p.pair_rows[0] = array.rows;
  p.pair_weights[0] = call.data.weights.as<const float>();
  return p;
}

CombineParams MakeFormatCombine(const Call& call) {
  const Workload& w = call.workload;
  CombineParams p = MakeCombine(call);
  CHECK(p.listed && w.hidden % group_size(w.format) == 0);
  ++p.view.signature;
  p.wire_format = w.format;
  p.wire_global_scale = kGlobalScale;
  p.zone_bytes = array_bytes(w.num_tokens, encoded_stride(w.format, w.hidden));
  return p;
}

RouteParams MakeRoute(const Call& call) {
  const Workload& w = call.workload;
  RouteParams p = {};
  p.view = ViewOf(call, Operation::kRoute);
  p.ids = call.data.ids.as<const int32_t>();
  p.rank = call.data.rank_number.as<const int32_t>();
  p.batch = 1;
  p.num_tokens = w.num_tokens;
  p.top_k = w.top_k;
  p.num_experts = w.num_experts;
  p.capacity = w.capacity;
  p.alignment = 1;
  p.first_choice = -1;  // The capacity holds all rows.
  p.parts = 1;
  p.tokens_per_chunk = TokensPerRouteChunk(w.num_tokens);
  p.chunks = RouteChunks(w.num_tokens);
  CHECK(p.chunks <= kMaxChunks);
  FillPlan(call.data, &p.plan);
  int32_t** scratch[] = {&p.all_ids, &p.expert_counts, &p.rank_counts};
  for (int i = 0; i < 3; ++i) *scratch[i] = call.data.route_scratch[i].as<int32_t>();
  return p;
}

void SetRoles(const Roles& roles, DispatchParams& p) { p.roles = roles; }
void SetRoles(const Roles& roles, FormatDispatchParams& p) { p.exchange.roles = roles; }
void SetRoles(const Roles& roles, RoutedDispatchParams& p) { p.exchange.roles = roles; }
void SetRoles(const Roles& roles, CombineParams& p) { p.roles = roles; }
void SetRoles(const Roles&, RouteParams&) {}  // Route has no roles.

// Launches an operation: `make` returns the parameters of a call, and launch(parameters, blocks) starts the
// kernels.
template <typename Params, typename Launch>
void LaunchWith(Params (*make)(const Call&), const Calls& calls, const Launch& launch) {
  std::vector<Params> ranks;
  for (const Call& call : calls) ranks.push_back(make(call));
  const Grid grid = ChooseGrid(ranks[0], calls[0].tuning);
  for (Params& p : ranks) SetRoles(grid.roles, p);
  CHECK(launch(ranks.data(), grid.blocks));
}

void LaunchCalls(const Calls& calls, Op operation, const Kernels& kernels, cudaStream_t stream) {
  const auto dispatch = [&](const DispatchParams* ranks, int blocks) {
    return kernels.dispatch(ranks, blocks, stream);
  };
  const auto format_dispatch = [&](const FormatDispatchParams* ranks, int blocks) {
    return kernels.format_dispatch(ranks, blocks, stream);
  };
  const auto routed_dispatch = [&](const RoutedDispatchParams* ranks, int blocks) {
    return kernels.routed_dispatch(ranks, blocks, stream);
  };
  const auto combine = [&](const CombineParams* ranks, int blocks) {
    return kernels.combine(ranks, blocks, stream);
  };
  const auto route = [&](const RouteParams* ranks, int blocks) {
    CHECK(kernels.route_exchange(ranks, blocks, stream));
    return kernels.route_assign(ranks, stream);
  };
  switch (operation) {
    case Op::kDispatch: return LaunchWith(MakeDispatch, calls, dispatch);
    case Op::kWeightedDispatch: return LaunchWith(MakeWeightedDispatch, calls, dispatch);
    case Op::kFormatDispatch: return LaunchWith(MakeFormatDispatch, calls, format_dispatch);
    case Op::kRoutedDispatch: return LaunchWith(MakeRoutedDispatch, calls, routed_dispatch);
    case Op::kRoutedFormatDispatch:
      return LaunchWith(MakeRoutedFormatDispatch, calls, routed_dispatch);
    case Op::kCombine: return LaunchWith(MakeCombine, calls, combine);
    case Op::kFormatCombine: return LaunchWith(MakeFormatCombine, calls, combine);
    case Op::kRoute: return LaunchWith(MakeRoute, calls, route);
  }
}

// ---- Running

// One line of the output: an operation, or several that take turns.
struct Subject {
  std::string name;
  std::vector<Op> operations;
};

const std::map<std::string, Op> kOperations = {{"dispatch", Op::kDispatch},
                                               {"combine", Op::kCombine},
                                               {"route", Op::kRoute},
                                               {"routed", Op::kRoutedDispatch},
                                               {"weighted", Op::kWeightedDispatch},
                                               {"format-dispatch", Op::kFormatDispatch},
                                               {"routed-format", Op::kRoutedFormatDispatch},
                                               {"format-combine", Op::kFormatCombine}};

std::vector<Subject> ChooseSubjects(const Options& options) {
  std::vector<Subject> subjects;
  if (options.alternate) {
    subjects.push_back({"dispatch+combine", {Op::kDispatch, Op::kCombine}});
  }
  for (const std::string& op : options.ops) {
    const bool is_known = kOperations.count(op) > 0;
    CHECK(is_known ? Problem() : "not an operation: '" + op + "'");
    const bool takes_turns = options.alternate && (op == "dispatch" || op == "combine");
    if (!takes_turns) subjects.push_back({op, {kOperations.at(op)}});
  }
  return subjects;
}

// The launches on one GPU, in a CUDA graph: some that are not timed, then those that are.
class GpuGraph {
 public:
  GpuGraph(const Calls& calls, const Subject& subject, const Kernels& kernels, int untimed,
           int timed) {
    CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    CHECK(cudaEventCreate(&begin_));
    CHECK(cudaEventCreate(&end_));
    CHECK(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    LaunchTimes(untimed, calls, subject, kernels);
    CHECK(cudaEventRecordWithFlags(begin_, stream_, cudaEventRecordExternal));
    LaunchTimes(timed, calls, subject, kernels);
    CHECK(cudaEventRecordWithFlags(end_, stream_, cudaEventRecordExternal));
    cudaGraph_t graph;
    CHECK(cudaStreamEndCapture(stream_, &graph));
    CHECK(cudaGraphInstantiate(&executable_, graph, 0));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaGraphUpload(executable_, stream_));
    CHECK(cudaStreamSynchronize(stream_));
  }
  GpuGraph(const GpuGraph&) = delete;
  ~GpuGraph() {
    cudaGraphExecDestroy(executable_);
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
    cudaStreamDestroy(stream_);
  }

  // Returns the milliseconds that the timed launches took.
  float Run() {
    CHECK(cudaGraphLaunch(executable_, stream_));
    CHECK(cudaStreamSynchronize(stream_));
    CHECK(cudaGetLastError());
    float ms = 0;
    CHECK(cudaEventElapsedTime(&ms, begin_, end_));
    return ms;
  }

 private:
  void LaunchTimes(int times, const Calls& calls, const Subject& subject, const Kernels& kernels) {
    for (int i = 0; i < times; ++i) {
      for (Op operation : subject.operations) {
        LaunchCalls(calls, operation, kernels, stream_);
      }
    }
  }

  cudaStream_t stream_;
  cudaEvent_t begin_, end_;
  cudaGraphExec_t executable_;
};

// All ranks of a workload, with their data.
struct Ranks {
  Workspace& workspace;
  const Workload& workload;
  std::vector<std::unique_ptr<DeviceMemory>> memory;  // by GPU
  std::vector<std::unique_ptr<RankData>> data;
  std::vector<RankView> views;
};

Ranks MakeRanks(const Options& options, const Workload& w, Workspace& workspace) {
  int64_t zone_bytes = 0;
  for (const auto& [name, op] : kOperations) zone_bytes = std::max(zone_bytes, ZoneBytes(op, w));
  CHECK(WithRemedy(w.ranks_per_gpu(), workspace.Reserve(zone_bytes * w.num_ranks, 0)));
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
    view.error += rank - view.rank;  // The view is that of the GPU's first rank.
    view.rank = rank;
    view.launch = 1;  // Launches follow each other on one stream.
    view.timeout_ns = view.first_timeout_ns = static_cast<uint64_t>(options.timeout_s * 1e9);
    ranks.views.push_back(view);
  }
  return ranks;
}

using Graphs = std::vector<std::unique_ptr<GpuGraph>>;  // by GPU

Graphs MakeGraphs(const Ranks& ranks, const Subject& subject, const Tuning& tuning, int untimed,
                  int timed) {
  const Workload& w = ranks.workload;
  Graphs graphs;
  for (int gpu = 0; gpu < w.num_gpus; ++gpu) {
    CHECK(cudaSetDevice(gpu));
    Calls calls;
    for (int rank = 0; rank < w.num_ranks && calls.size() < 2; ++rank) {
      if (w.gpu_of(rank) != gpu) continue;
      calls.push_back({w, *ranks.data[rank], ranks.views[rank], tuning});
    }
    graphs.push_back(
        std::make_unique<GpuGraph>(calls, subject, ranks.workspace.kernels(), untimed, timed));
  }
  return graphs;
}

// Runs the graphs of all GPUs at once; returns the longest time in milliseconds.
float RunGraphs(const Ranks& ranks, Graphs& graphs) {
  const int num_gpus = ranks.workload.num_gpus;
  std::vector<float> ms(num_gpus);
  Barrier barrier(num_gpus);
  ForEachGpu(num_gpus, [&](int gpu) {
    barrier.Wait();
    ms[gpu] = graphs[gpu]->Run();
  });
  CHECK(ranks.workspace.Failure());
  return *std::max_element(ms.begin(), ms.end());
}

// ---- Checking

// Pinned memory that results are copied to; grows, for pinning takes longer than copying.
class HostBuffer {
 public:
  ~HostBuffer() { cudaFreeHost(data_); }

  template <typename T>
  const T* Download(const DeviceBuffer& from) {
    if (from.bytes() > bytes_) {
      CHECK(cudaFreeHost(data_));
      CHECK(cudaHostAlloc(&data_, from.bytes(), cudaHostAllocPortable));
      bytes_ = from.bytes();
    }
    CHECK(cudaMemcpy(data_, from.as<void>(), from.bytes(), cudaMemcpyDeviceToHost));
    return static_cast<const T*>(data_);
  }

 private:
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

// Collects, from many threads, what is wrong with one result.
class Mismatches {
 public:
  void Add(int64_t index) {
    ++count_;
    int64_t first = first_;
    while (index < first && !first_.compare_exchange_weak(first, index)) continue;
  }

  Problem Describe(const std::string& what, int rank) const {
    if (count_ == 0) return {};
    return what + " on rank " + std::to_string(rank) + " is wrong in " + std::to_string(count_) +
           " places, first at " + std::to_string(first_);
  }

 private:
  std::atomic<int64_t> count_{0}, first_{INT64_MAX};
};

// A row of bfloat16 as docs/formats.md encodes and decodes it. No number is so small, or so large, that
// an edge of the definition comes into it.
struct EncodedRow {
  std::vector<uint8_t> values, scales;
  std::vector<uint16_t> decoded;
};

uint8_t ToE4M3(float value) { return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3); }

float FromE4M3(uint8_t bits) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(bits, __NV_E4M3)));
}

// To nearest; ties to even.
uint16_t ToBFloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// The code of the number nearest to `value` among `scale` times those of float4_e2m1fn.
uint8_t ToE2M1(float value, float scale) {
  constexpr float kNumbers[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  uint8_t code = 0;
  while (code < 7) {
    const float middle = scale * (kNumbers[code] + kNumbers[code + 1]) / 2;
    const bool passes = code % 2 == 0 ? std::abs(value) > middle : std::abs(value) >= middle;
    if (!passes) break;
    ++code;
  }
  return code | (std::signbit(value) ? 8 : 0);
}

EncodedRow EncodeOnHost(TokenFormat format, const uint16_t* row, int hidden) {
  constexpr float kNumbers[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  const float inverse = 1 / kGlobalScale;
  EncodedRow encoded;
  encoded.values.resize(value_bytes(format, hidden));
  encoded.decoded.resize(hidden);
  const int group = group_size(format);
  for (int first = 0; first < hidden; first += group) {
    float largest = 0;
    for (int i = first; i < first + group; ++i) {
      largest = std::max(largest, static_cast<float>(std::abs(ToDouble(row[i]))));
    }
    if (format == TokenFormat::kNvFp4) {
      uint32_t sixth_bits = 0x3E2AAAAB;
      float sixth;
      std::memcpy(&sixth, &sixth_bits, sizeof(sixth));
      const uint8_t code = ToE4M3(largest * inverse * sixth);
      const float scale = FromE4M3(code);
      encoded.scales.push_back(code);
      for (int i = first; i < first + group; ++i) {
        const float x = static_cast<float>(ToDouble(row[i]));
        const uint8_t value = ToE2M1(x * inverse, code == 0 ? INFINITY : scale);
        encoded.values[i / 2] |= value << 4 * (i % 2);
        const float number = kNumbers[value & 7] * scale * kGlobalScale;
        encoded.decoded[i] = ToBFloat16(value & 8 ? -number : number);
      }
      continue;
    }
    int exponent;  // largest is fraction * 2**exponent, fraction in [0.5, 1)
    const float fraction = std::frexp(largest, &exponent);
    exponent -= 9;
    if (format == TokenFormat::kBlockwiseFp8 && fraction > 0.875f) ++exponent;
    if (largest == 0) exponent = -127;
    if (format == TokenFormat::kMxFp8) {
      encoded.scales.push_back(static_cast<uint8_t>(exponent + 127));
    } else {
      const float scale = largest == 0 ? 0 : std::ldexp(1.f, exponent);
      const auto* bytes = reinterpret_cast<const uint8_t*>(&scale);
      encoded.scales.insert(encoded.scales.end(), bytes, bytes + sizeof(scale));
    }
    for (int i = first; i < first + group; ++i) {
      const float x = static_cast<float>(ToDouble(row[i]));
      encoded.values[i] = ToE4M3(std::ldexp(x, -exponent));
      encoded.decoded[i] = ToBFloat16(std::ldexp(FromE4M3(encoded.values[i]), exponent));
    }
  }
  return encoded;
}

class Checker {
  static constexpr double kRounding = 1.0 / 256;  // of bfloat16, relative

 public:
  explicit Checker(const Ranks& ranks) : ranks_(ranks), w_(ranks.workload) {
    payload_.resize(w_.num_ranks);
    for (int rank = 0; rank < w_.num_ranks; ++rank) {
      payload_[rank].resize(int64_t{w_.num_tokens} * w_.hidden);
      ParallelFor(payload_[rank].size(), [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
          payload_[rank][i] = RandomValue<uint16_t>(SeedOf(Seed::kPayload, rank), i);
        }
      });
    }
  }

  void Check(Op operation) {
    for (int rank = 0; rank < w_.num_ranks; ++rank) {
      CHECK(cudaSetDevice(w_.gpu_of(rank)));
      switch (operation) {
        case Op::kDispatch: CHECK(CheckDispatch(rank)); break;
        case Op::kCombine: CHECK(CheckCombine(rank, kRounding, 0)); break;
        case Op::kFormatCombine: {
          // Of a number, and of the largest of its group: docs/formats.md.
          const bool is_float4 = w_.format == TokenFormat::kNvFp4;
          CHECK(CheckCombine(rank, is_float4 ? 1. / 5 : 1. / 8,
                             is_float4 ? 17. / 384 : 1. / (1 << 17)));
          break;
        }
        case Op::kFormatDispatch: CHECK(CheckFormatDispatch(rank)); break;
        case Op::kRoutedFormatDispatch:
          CHECK(CheckRoute(rank));
          CHECK(CheckFormatDispatch(rank));
          break;
        case Op::kRoute: CHECK(CheckRoute(rank)); break;
        case Op::kWeightedDispatch: CHECK(CheckWeightedDispatch(rank)); break;
        case Op::kRoutedDispatch:
          CHECK(CheckRoute(rank));
          CHECK(CheckDispatch(rank));
          break;
      }
    }
  }

  // Leaves nothing of an earlier launch to be taken for a result.
  void Poison(Op operation) const {
    for (int rank = 0; rank < w_.num_ranks; ++rank) {
      CHECK(cudaSetDevice(w_.gpu_of(rank)));
      const RankData& data = *ranks_.data[rank];
      switch (operation) {
        case Op::kRoutedDispatch:
        case Op::kRoutedFormatDispatch:
          for (const DeviceBuffer& buffer : data.routed) PoisonBuffer(buffer);
          [[fallthrough]];
        case Op::kDispatch:
        case Op::kWeightedDispatch:
        case Op::kFormatDispatch:
          PoisonBuffer(data.dispatched);
          PoisonBuffer(data.row_weights);
          break;
        case Op::kCombine:
        case Op::kFormatCombine: PoisonBuffer(data.combined); break;
        case Op::kRoute:
          for (const DeviceBuffer& buffer : data.routed) PoisonBuffer(buffer);
          for (const DeviceBuffer& buffer : data.route_scratch) PoisonBuffer(buffer);
          break;
      }
      CHECK(cudaDeviceSynchronize());
    }
  }

 private:
  static void PoisonBuffer(const DeviceBuffer& buffer) {
    CHECK(cudaMemset(buffer.as<void>(), 0xFF, buffer.bytes()));
  }

  // Bit for bit. Places are rows.
  Problem CheckDispatch(int rank) {
    const Plan& plan = w_.plans[rank];
    const char* rows = host_.Download<char>(ranks_.data[rank]->dispatched);
    const std::vector<uint16_t> zeros(w_.hidden);
    Mismatches mismatches;
    ParallelFor(w_.capacity, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        const int source = plan[kRowRank][row];
        const uint16_t* expected = zeros.data();
        if (source >= 0) {
          expected = &payload_[source][int64_t{plan[kRowToken][row]} * w_.hidden];
        }
        const char* actual = rows + row * w_.row_bytes();
        if (std::memcmp(actual, expected, w_.row_bytes()) != 0) mismatches.Add(row);
      }
    });
    if (Problem p = mismatches.Describe("dispatch's row", rank); !p.empty()) return p;
    return CheckWeights(rank);
  }

  // Bit for bit. Places are rows.
  Problem CheckFormatDispatch(int rank) {
    if (encoded_.empty()) {
      encoded_.resize(w_.num_ranks);
      for (int source = 0; source < w_.num_ranks; ++source) {
        encoded_[source].resize(w_.num_tokens);
        ParallelFor(w_.num_tokens, [&](int64_t first, int64_t last) {
          for (int64_t token = first; token < last; ++token) {
            encoded_[source][token] =
                EncodeOnHost(w_.format, &payload_[source][token * w_.hidden], w_.hidden);
          }
        });
      }
    }
    const Plan& plan = w_.plans[rank];
    const char* rows = host_.Download<char>(ranks_.data[rank]->dispatched);
    Mismatches mismatches;
    ParallelFor(w_.capacity, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        const int source = plan[kRowRank][row];
        const EncodedRow none = {};
        const EncodedRow& e = source < 0 ? none : encoded_[source][plan[kRowToken][row]];
        const auto agrees = [&](const auto& expected, int64_t bytes, int64_t offset) {
          const char* actual = rows + offset + row * bytes;
          if (source < 0) return std::all_of(actual, actual + bytes, [](char c) { return c == 0; });
          return std::memcmp(actual, expected.data(), bytes) == 0;
        };
        const bool is_right =
            w_.decode ? agrees(e.decoded, w_.row_bytes(), 0)
                      : agrees(e.values, value_bytes(w_.format, w_.hidden), 0) &&
                            agrees(e.scales, scale_bytes(w_.format, w_.hidden), ScalesOffset(w_));
        if (!is_right) mismatches.Add(row);
      }
    });
    if (Problem p = mismatches.Describe("row in a format", rank); !p.empty()) return p;
    return CheckWeights(rank);
  }

  Problem CheckWeights(int rank) {
    if (!w_.weights) return {};
    const Plan& plan = w_.plans[rank];
    const float* weights = host_.Download<float>(ranks_.data[rank]->row_weights);
    Mismatches wrong_weights;
    for (int64_t row = 0; row < w_.capacity; ++row) {
      const int source = plan[kRowRank][row];
      const int64_t choice = int64_t{plan[kRowToken][row]} * w_.top_k + plan[kRowK][row];
      const float expected =
          source < 0 ? 0.f : RandomValue<float>(SeedOf(Seed::kChoiceWeights, source), choice);
      if (weights[row] != expected) wrong_weights.Add(row);
    }
    return wrong_weights.Describe("dispatch's weight", rank);
  }

  // Products but for a rounding, of some columns; inner products of about 64 rows. Places are rows.
  Problem CheckWeightedDispatch(int rank) {
    const Plan& plan = w_.plans[rank];
    const uint16_t* rows = host_.Download<uint16_t>(ranks_.data[rank]->dispatched);
    Mismatches mismatches;
    const auto factors = [&](int64_t row, int64_t column) {
      const int source = plan[kRowRank][row];
      const int64_t token = plan[kRowToken][row];
      return std::pair(
          ToDouble(payload_[source][token * w_.hidden + column]),
          ToDouble(RandomValue<uint16_t>(SeedOf(Seed::kRows, rank), row * w_.hidden + column)));
    };
    ParallelFor(w_.capacity, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        const double weight = RandomValue<float>(SeedOf(Seed::kWeights, rank), row);
        for (int64_t column = row % 97; column < w_.hidden; column += 97) {
          double expected = 0;
          if (plan[kRowRank][row] >= 0) expected = weight * factors(row, column).first;
          const double actual = ToDouble(rows[row * w_.hidden + column]);
          if (!(std::abs(actual - expected) <= std::abs(expected) / 128)) mismatches.Add(row);
        }
      }
    });
    if (Problem p = mismatches.Describe("weighted dispatch's row", rank); !p.empty()) return p;
    const float* dots = host_.Download<float>(ranks_.data[rank]->row_weights);
    for (int64_t row = 0; row < w_.capacity; row += std::max(1, w_.capacity / 64)) {
      double expected = 0, magnitude = 0;
      for (int64_t column = 0; plan[kRowRank][row] >= 0 && column < w_.hidden; ++column) {
        const auto [moved, own] = factors(row, column);
        expected += moved * own;
        magnitude += std::abs(moved * own);
      }
      if (!(std::abs(dots[row] - expected) <= 1e-4 * magnitude)) mismatches.Add(row);
    }
    return mismatches.Describe("weighted dispatch's inner product", rank);
  }

  // About 16 tokens in full, of the others some columns. Places are elements. `rounding` of partial sums:
  // relative, and of the largest that there may be.
  Problem CheckCombine(int rank, double rounding, double of_largest) {
    const uint16_t* sums = host_.Download<uint16_t>(ranks_.data[rank]->combined);
    const int whole_step = std::max(1, w_.num_tokens / 16);
    const int column_step = std::min(97, w_.hidden);
    Mismatches mismatches;
    ParallelFor(w_.num_tokens, [&](int64_t first, int64_t last) {
      for (int64_t token = first; token < last; ++token) {
        const bool whole = token % whole_step == 0;
        for (int64_t column = whole ? 0 : token % column_step; column < w_.hidden;
             column += whole ? 1 : column_step) {
          const int64_t element = token * w_.hidden + column;
          if (!IsSum(ToDouble(sums[element]), rank, token, column, rounding, of_largest)) {
            mismatches.Add(element);
          }
        }
      }
    });
    return mismatches.Describe("combine's element", rank);
  }

  // Whether a sum is right but for one rounding of each rank's part and one of the result.
  bool IsSum(double actual, int rank, int64_t token, int64_t column, double rounding,
             double of_largest) const {
    constexpr double kFloat32Rounding = 1e-5;  // of all sums and products
    double parts[kMaxRanks] = {}, magnitude = 0;
    for (int64_t choice = token * w_.top_k; choice < (token + 1) * w_.top_k; ++choice) {
      const int at = w_.ids[rank][choice] / w_.local_experts();
      const int64_t row = w_.choice_row[rank][choice];
      const double weight = RandomValue<float>(SeedOf(Seed::kWeights, at), row);
      const double term = weight * ToDouble(RandomValue<uint16_t>(SeedOf(Seed::kRows, at),
                                                                  row * w_.hidden + column));
      parts[at] += term;
      magnitude += std::abs(term);
    }
    double sum = 0, on_wire = 0;
    for (double part : parts) {
      sum += part;
      if (part != 0) on_wire += rounding * std::abs(part) + of_largest * w_.top_k;
    }
    const double tolerance =
        on_wire + kRounding * (std::abs(sum) + on_wire) + kFloat32Rounding * magnitude;
    return std::abs(actual - sum) <= tolerance;  // false for NaN
  }

  Problem CheckRoute(int rank) {
    for (int i = 0; i < kNumPlanArrays; ++i) {
      const std::vector<int32_t>& expected = w_.plans[rank][i];
      const int32_t* actual = host_.Download<int32_t>(ranks_.data[rank]->routed[i]);
      Mismatches mismatches;
      for (size_t j = 0; j < expected.size(); ++j) {
        if (actual[j] != expected[j]) mismatches.Add(j);
      }
      const std::string what = std::string("route's ") + kPlanNames[i];
      if (Problem p = mismatches.Describe(what, rank); !p.empty()) return p;
    }
    return {};
  }

  const Ranks& ranks_;
  const Workload& w_;
  std::vector<std::vector<uint16_t>> payload_;    // by rank: [num_tokens, hidden]
  std::vector<std::vector<EncodedRow>> encoded_;  // by rank: [num_tokens]
  HostBuffer host_;
};

// ---- Measuring

int64_t WireBytes(const Workload& w, const Subject& subject) {
  int64_t bytes = 0;
  for (Op operation : subject.operations) {
    const bool is_format = operation == Op::kFormatDispatch || operation == Op::kFormatCombine ||
                           operation == Op::kRoutedFormatDispatch;
    const int64_t row_bytes = is_format ? encoded_stride(w.format, w.hidden) : w.row_bytes();
    bytes +=
        operation == Op::kRoute ? (w.num_ranks - 1) * w.ids_bytes() : w.crossing_tokens * row_bytes;
  }
  return bytes;
}

void PrintLine(const Workload& w, const Subject& subject, const Tuning& tuning,
               std::vector<double> us, bool is_checked) {
  std::sort(us.begin(), us.end());
  const double median = us[us.size() / 2];
  const int64_t bytes = WireBytes(w, subject);
  std::printf("%-16s tokens=%d hidden=%d top_k=%d experts=%d ranks=%d", subject.name.c_str(),
              w.num_tokens, w.hidden, w.top_k, w.num_experts, w.num_ranks);
  if (w.ranks_per_gpu() > 1) std::printf(" gpus=%d", w.num_gpus);
  std::printf(" capacity=%d sms=%d", w.capacity, tuning.sms);
  if (tuning.send_blocks > 0) std::printf(" send_blocks=%d", tuning.send_blocks);
  if (tuning.send_teams > 0) std::printf(" send_teams=%d", tuning.send_teams);
  if (tuning.receive_teams > 0) std::printf(" receive_teams=%d", tuning.receive_teams);
  std::printf(" us=%.2f min=%.2f max=%.2f wire=%lld GB/s=%.1f%s\n", median, us.front(), us.back(),
              static_cast<long long>(bytes), static_cast<double>(bytes) / median * 1e-3,
              is_checked ? " checked" : "");
  std::fflush(stdout);
}

// When each mark was passed in the last launch of rank 0, first and last, in ns since its first block began.
void PrintTimeline([[maybe_unused]] const Ranks& ranks) {
#ifdef MOE_A2A_TIMELINE
  constexpr const char* kNames[kNumMarks] = {"start",  "entered",  "planned", "credit", "written",
                                             "raised", "heads",    "ids",     "rows",   "await",
                                             "landed", "received", "arrive",  "end"};
  const DeviceBuffer& buffer = ranks.data[0]->timeline[0];
  std::vector<uint64_t> times(kTimelineMarks);
  CHECK(cudaSetDevice(0));
  CHECK(cudaMemcpy(times.data(), buffer.as<void>(), buffer.bytes(), cudaMemcpyDeviceToHost));
  CHECK(cudaMemset(buffer.as<void>(), 0, buffer.bytes()));
  uint64_t begin = UINT64_MAX;
  for (int64_t i = 0; i < kTimelineMarks; i += kNumMarks) {
    if (times[i] > 0) begin = std::min(begin, times[i]);
  }
  std::printf("  timeline");
  for (int mark = 0; mark < kNumMarks; ++mark) {
    uint64_t first = UINT64_MAX, last = 0;
    for (int64_t i = mark; i < kTimelineMarks; i += kNumMarks) {
      if (times[i] < begin) continue;
      first = std::min(first, times[i]);
      last = std::max(last, times[i]);
    }
    if (last == 0) continue;
    std::printf(" %s=%lld..%lld", kNames[mark], static_cast<long long>(first - begin),
                static_cast<long long>(last - begin));
  }
  std::printf("\n");
  std::fflush(stdout);
#endif
}

void CheckOneLaunch(const Ranks& ranks, const Subject& subject, const Tuning& tuning,
                    Checker& checker) {
  for (Op operation : subject.operations) checker.Poison(operation);
  Graphs graphs = MakeGraphs(ranks, subject, tuning, 0, 1);
  RunGraphs(ranks, graphs);
  for (Op operation : subject.operations) checker.Check(operation);
}

void Measure(const Options& options, const Ranks& ranks, const Subject& subject,
             const Tuning& tuning, Checker* checker) {
  if (checker != nullptr) CheckOneLaunch(ranks, subject, tuning, *checker);
  Graphs graphs = MakeGraphs(ranks, subject, tuning, kUntimedLaunches, options.iters);
  std::vector<double> us;
  for (int i = 0; i < options.samples; ++i) {
    us.push_back(RunGraphs(ranks, graphs) * 1e3 / options.iters);
  }
  if (checker != nullptr) {
    for (Op operation : subject.operations) checker->Check(operation);
  }
  PrintLine(ranks.workload, subject, tuning, us, checker != nullptr);
  PrintTimeline(ranks);
}

// Every combination of what may be tuned.
std::vector<Tuning> AllTunings(const Options& options) {
  std::vector<Tuning> tunings;
  for (int sms : options.sms) {
    for (int send_blocks : options.send_blocks) {
      for (int send_teams : options.send_teams) {
        for (int receive_teams : options.receive_teams) {
          tunings.push_back({sms, send_blocks, send_teams, receive_teams});
        }
      }
    }
  }
  return tunings;
}

void MeasureTokens(const Options& options, int num_tokens, Workspace& workspace) {
  const Workload workload = MakeWorkload(options, num_tokens);
  const Ranks ranks = MakeRanks(options, workload, workspace);
  std::unique_ptr<Checker> checker;
  if (options.check) checker = std::make_unique<Checker>(ranks);
  int last_route_sms = 0;
  for (const Tuning& tuning : AllTunings(options)) {
    for (const Subject& subject : ChooseSubjects(options)) {
      if (subject.operations[0] == Op::kRoute) {  // has nothing else to choose
        if (tuning.sms == last_route_sms) continue;
        last_route_sms = tuning.sms;
      }
      const Op first = subject.operations[0];
      const bool is_routed = first == Op::kRoutedDispatch || first == Op::kRoutedFormatDispatch;
      if (is_routed &&
          !fits_routed_dispatch(num_tokens, int64_t{options.ranks} * num_tokens * options.top_k,
                                workload.local_experts())) {
        continue;
      }
      Measure(options, ranks, subject, tuning, checker.get());
    }
  }
}

void MeasureAll(const Options& options) {
  Topology topology = {{}, options.ranks, options.ranks};
  for (int rank = 0; rank < options.ranks; ++rank) {
    const int ordinal = rank / (options.ranks / options.gpus);
    AddDevice(ordinal, {0, ordinal});
    topology.devices.push_back(ordinal);
  }
  Workspace& workspace = Workspace::Get(topology, Ring::kWhole);
  for (int tokens : options.tokens) MeasureTokens(options, tokens, workspace);
}

}  // namespace
}  // namespace moe_a2a

int main(int argc, char** argv) { moe_a2a::MeasureAll(moe_a2a::ParseOptions(argc, argv)); }
