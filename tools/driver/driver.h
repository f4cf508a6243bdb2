// What the drivers of the kernels share: checks, random numbers that host and device compute alike, and the routing of
// all ranks, which the host computes.
#ifndef MOE_A2A_BENCHMARKS_DRIVER_H_
#define MOE_A2A_BENCHMARKS_DRIVER_H_

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "layout.h"
#include "params.h"
#include "runtime/problem.h"

namespace moe_a2a {

inline Problem ProblemOf(cudaError_t error) {
  return error == cudaSuccess ? Problem() : cudaGetErrorString(error);
}
inline Problem ProblemOf(const Problem& problem) { return problem; }
inline Problem ProblemOf(bool holds) { return holds ? "" : "does not hold"; }

// Ends the process from any thread: the others may be waiting for a device.
#define CHECK(call)                                                                \
  do {                                                                             \
    const Problem problem = ProblemOf(call);                                       \
    if (!problem.empty()) {                                                        \
      std::fprintf(stderr, "line %d: %s: %s\n", __LINE__, #call, problem.c_str()); \
      std::_Exit(1);                                                               \
    }                                                                              \
  } while (false)

constexpr int kItemBytes = 2;  // bfloat16
constexpr int kTightMultiple = 128;

// ---- Threads of the host

inline void JoinAll(std::vector<std::thread>& threads) {
  for (std::thread& thread : threads) thread.join();
}

// Calls body(first, last) for parts of [0, count).
inline void ParallelFor(int64_t count, const std::function<void(int64_t, int64_t)>& body) {
  const int64_t num_threads = std::max(1u, std::thread::hardware_concurrency());
  const int64_t share = ceil_div(count, num_threads);
  std::vector<std::thread> threads;
  for (int64_t first = 0; first < count; first += share) {
    threads.emplace_back(body, first, std::min(first + share, count));
  }
  JoinAll(threads);
}

// ---- Random payload, the same from host and device

// splitmix64's finalizer, by Steele, Lea and Flood.
inline __host__ __device__ uint64_t Hash(uint64_t seed, uint64_t index) {
  uint64_t hash = seed * 0xD1342543DE82EF95 + index * 0x9E3779B97F4A7C15;
  hash = (hash ^ (hash >> 30)) * 0xBF58476D1CE4E5B9;
  hash = (hash ^ (hash >> 27)) * 0x94D049BB133111EB;
  return hash ^ (hash >> 31);
}

// Uniform in [-1, 1): a float, or the bits of a bfloat16, rounded towards zero.
template <typename T>
__host__ __device__ T RandomValue(uint64_t seed, uint64_t index) {
  const int32_t mantissa = static_cast<int32_t>(Hash(seed, index) >> 40) - (1 << 23);
  const float value = static_cast<float>(mantissa) * (1.f / (1 << 23));
  if constexpr (std::is_same_v<T, float>) {
    return value;
  } else {
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return static_cast<T>(bits >> 16);
  }
}

template <typename T>
__global__ void FillRandom(T* to, int64_t count, uint64_t seed) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    to[i] = RandomValue<T>(seed, i);
  }
}

inline double ToDouble(uint16_t bfloat16) {
  const uint32_t bits = uint32_t{bfloat16} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

enum class Seed : uint64_t { kPayload = 1, kRows, kWeights, kIds, kChoiceWeights };

inline uint64_t SeedOf(Seed seed, int rank) {
  return static_cast<uint64_t>(seed) * kMaxRanks + rank;
}

// ---- The routing, by the host

// Results of route, in the order of its operands in handlers.cc.
enum PlanArray {
  kTokenSlot,
  kSlotToken,
  kChoiceRank,
  kSlotRows,
  kRowRank,
  kRowSlot,
  kRowK,
  kRowToken,
  kGroupSizes,
  kNumRows,
  kNumDropped
};
constexpr const char* kPlanNames[kNumPlanArrays] = {
    "token_slot", "slot_token", "choice_rank", "slot_rows", "row_rank",   "row_slot",
    "row_k",      "row_token",  "group_sizes", "num_rows",  "num_dropped"};

// One rank's routing; shapes and meaning as in jax_moe_a2a/routing.py.
using Plan = std::array<std::vector<int32_t>, kNumPlanArrays>;

struct Workload {
  int num_ranks;
  int num_gpus;  // as many as ranks, or one for all
  int num_tokens, hidden, top_k, num_experts;
  TokenFormat format;
  bool weights = true;  // dispatch carries router weights
  bool decode = false;  // what a dispatch has encoded
  int capacity = 0;
  int64_t crossing_tokens = 0;                   // through the busiest direction of a rank's links
  std::vector<std::vector<int32_t>> ids;         // by rank: [num_tokens, top_k]
  std::vector<std::vector<int32_t>> choice_row;  // by rank: [num_tokens, top_k], rows there
  std::vector<Plan> plans;                       // by rank

  int ranks_per_gpu() const { return num_ranks / num_gpus; }
  int gpu_of(int rank) const { return rank / ranks_per_gpu(); }
  int local_experts() const { return num_experts / num_ranks; }
  int64_t row_bytes() const { return int64_t{hidden} * kItemBytes; }
  int64_t ids_bytes() const { return int64_t{num_tokens} * top_k * sizeof(int32_t); }
};

inline std::vector<int32_t> DrawIds(const Workload& w, double skew, int rank) {
  std::mt19937_64 random(SeedOf(Seed::kIds, rank));
  const auto draw = [&](int first, int last) {
    return std::uniform_int_distribution<int>(first, last - 1)(random);
  };
  std::bernoulli_distribution is_hot(std::min(1.0, skew / w.num_ranks));
  std::vector<int32_t> ids(int64_t{w.num_tokens} * w.top_k);
  for (size_t token = 0; token < ids.size(); token += w.top_k) {
    for (int k = 0; k < w.top_k; ++k) {
      int first = 0, last = w.num_experts;
      if (skew != 1) (is_hot(random) ? last : first) = w.local_experts();
      const auto begin = ids.begin() + token;
      int id = draw(first, last);
      while (std::find(begin, begin + k, id) != begin + k) id = draw(first, last);
      begin[k] = id;
    }
  }
  return ids;
}

inline std::vector<std::vector<int32_t>> CountChoices(const Workload& w) {
  std::vector<std::vector<int32_t>> counts(w.num_ranks, std::vector<int32_t>(w.local_experts()));
  for (const auto& ids : w.ids) {
    for (int32_t id : ids) ++counts[id / w.local_experts()][id % w.local_experts()];
  }
  return counts;
}

inline int64_t Sum(const std::vector<int32_t>& values) {
  int64_t sum = 0;
  for (int32_t value : values) sum += value;
  return sum;
}

inline int64_t ChooseCapacity(const Workload& w, bool worst) {
  if (worst) return int64_t{w.num_ranks} * w.num_tokens * w.top_k;
  int64_t fullest = 0;
  for (const auto& counts : CountChoices(w)) fullest = std::max(fullest, Sum(counts));
  return round_up(fullest, kTightMultiple);
}

// But for the counts.
inline Plan EmptyPlan(const Workload& w) {
  const size_t tokens = w.num_tokens, ranks = w.num_ranks, rows = w.capacity, k = w.top_k;
  const size_t sizes[kRowToken + 1] = {
      tokens * ranks, ranks * tokens, tokens * k, ranks * tokens * k, rows, rows, rows, rows};
  Plan plan;
  for (int i = kTokenSlot; i <= kRowToken; ++i) plan[i].assign(sizes[i], -1);
  return plan;
}

// A token takes one slot per rank that holds any of its experts, in the order of tokens.
inline void AssignSlots(Workload* w) {
  std::vector<int64_t> leaving(w->num_ranks), entering(w->num_ranks);
  for (int source = 0; source < w->num_ranks; ++source) {
    Plan& plan = w->plans[source];
    std::vector<int32_t> next_slot(w->num_ranks);
    for (size_t choice = 0; choice < w->ids[source].size(); ++choice) {
      const size_t token = choice / w->top_k;
      const int rank = w->ids[source][choice] / w->local_experts();
      plan[kChoiceRank][choice] = rank;
      int32_t& slot = plan[kTokenSlot][token * w->num_ranks + rank];
      if (slot >= 0) continue;
      slot = next_slot[rank]++;
      plan[kSlotToken][int64_t{rank} * w->num_tokens + slot] = static_cast<int32_t>(token);
      leaving[source] += rank != source;
      entering[rank] += rank != source;
    }
  }
  w->crossing_tokens = std::max(*std::max_element(leaving.begin(), leaving.end()),
                                *std::max_element(entering.begin(), entering.end()));
}

// Rows by local expert, then source rank, token and choice.
inline void AssignRows(Workload* w) {
  const auto counts = CountChoices(*w);
  std::vector<std::vector<int32_t>> next_row = counts;
  for (int rank = 0; rank < w->num_ranks; ++rank) {
    int32_t row = 0;
    for (int e = 0; e < w->local_experts(); ++e) {
      next_row[rank][e] = row;
      row += counts[rank][e];
    }
    w->plans[rank][kGroupSizes] = counts[rank];
    w->plans[rank][kNumRows] = {row};
    w->plans[rank][kNumDropped] = {0};  // The capacity holds all rows.
    auto& slots = w->plans[rank][kRowSlot];
    std::fill(slots.begin() + row, slots.end(), kTailRow);
  }
  for (int source = 0; source < w->num_ranks; ++source) {
    for (size_t choice = 0; choice < w->ids[source].size(); ++choice) {
      const int id = w->ids[source][choice];
      const int rank = id / w->local_experts();
      const int32_t token = static_cast<int32_t>(choice / w->top_k);
      const int32_t k = static_cast<int32_t>(choice % w->top_k);
      const int32_t slot = w->plans[source][kTokenSlot][int64_t{token} * w->num_ranks + rank];
      const int32_t row = next_row[rank][id % w->local_experts()]++;
      Plan& plan = w->plans[rank];
      plan[kSlotRows][(int64_t{source} * w->num_tokens + slot) * w->top_k + k] = row;
      plan[kRowRank][row] = source;
      plan[kRowSlot][row] = slot;
      plan[kRowK][row] = k;
      plan[kRowToken][row] = token;
      w->choice_row[source][choice] = row;
    }
  }
}

}  // namespace moe_a2a

#endif  // MOE_A2A_BENCHMARKS_DRIVER_H_
