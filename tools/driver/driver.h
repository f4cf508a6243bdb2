// Helpers of kernels.cu and wire.cu: checks, options on the command line, arrays on a device, and
// measurements on several GPUs.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <type_traits>
#include <variant>
#include <vector>

#include "params.h"
#include "runtime/problem.h"

namespace moe_a2a {

inline Problem ProblemOf(cudaError_t error) {
  return error == cudaSuccess ? Problem() : cudaGetErrorString(error);
}
inline Problem ProblemOf(const Problem& problem) { return problem; }
inline Problem ProblemOf(bool holds) { return holds ? "" : "does not hold"; }

// Ends the whole process after an error in any thread, because other threads may be waiting for a
// device. `call` must not contain the name `check_problem`.
#define CHECK(call)                                                                      \
  do {                                                                                   \
    const Problem check_problem = ProblemOf(call);                                       \
    if (!check_problem.empty()) {                                                        \
      std::fprintf(stderr, "line %d: %s: %s\n", __LINE__, #call, check_problem.c_str()); \
      std::_Exit(1);                                                                     \
    }                                                                                    \
  } while (false)

constexpr int kItemBytes = 2;  // bfloat16

// ---- Command line

inline std::vector<std::string> Split(const std::string& list) {
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

inline double ToNumber(const std::string& text) {
  char* end = nullptr;
  const double number = std::strtod(text.c_str(), &end);
  const bool is_number = !text.empty() && *end == 0;
  CHECK(is_number ? Problem() : "not a number: '" + text + "'");
  return number;
}

inline int ToInt(const std::string& text) { return static_cast<int>(ToNumber(text)); }

inline std::vector<int> ToInts(const std::string& list) {
  std::vector<int> numbers;
  for (const std::string& part : Split(list)) numbers.push_back(ToInt(part));
  return numbers;
}

inline void SetValue(const std::string& text, int* value) { *value = ToInt(text); }
inline void SetValue(const std::string& text, double* value) { *value = ToNumber(text); }
inline void SetValue(const std::string& text, std::string* value) { *value = text; }
inline void SetValue(const std::string& text, std::vector<int>* value) { *value = ToInts(text); }
inline void SetValue(const std::string& text, std::vector<std::string>* value) {
  *value = Split(text);
}
inline void SetValue(const std::string&, bool* flag) { *flag = true; }

using OptionValue =
    std::variant<bool*, int*, double*, std::string*, std::vector<int>*, std::vector<std::string>*>;

// Sets `options` from names and values on the command line. Commas separate the elements of a list.
// A bool is a flag, which has no value.
inline void ReadOptions(int argc, char** argv, const std::map<std::string, OptionValue>& options) {
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const auto option = options.find(name);
    CHECK(option != options.end() ? Problem() : "not an option: '" + name + "'");
    if (!std::holds_alternative<bool*>(option->second)) ++i;
    CHECK(i < argc ? Problem() : "an option without its value: '" + name + "'");
    std::visit([&](auto* value) { SetValue(argv[i], value); }, option->second);
  }
}

// ---- Arrays on a device

// splitmix64's finalizer, by Steele, Lea and Flood.
inline __host__ __device__ uint64_t Hash(uint64_t seed, uint64_t index) {
  uint64_t hash = seed * 0xD1342543DE82EF95 + index * 0x9E3779B97F4A7C15;
  hash = (hash ^ (hash >> 30)) * 0xBF58476D1CE4E5B9;
  hash = (hash ^ (hash >> 27)) * 0x94D049BB133111EB;
  return hash ^ (hash >> 31);
}

// Returns a number in [-1, 1): a float, or the bits of a bfloat16 that is rounded towards zero.
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

// Adds to `sum` a hash of each word with its index. Equal arrays therefore have equal sums.
static __global__ void Fingerprint(const uint32_t* words, int64_t count, unsigned long long* sum) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  unsigned long long own = 0;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    own += Hash(words[i], i);
  }
  atomicAdd(sum, own);
}

// The results of route, in the order of kPlanArrays.
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

// ---- Measurements

// Calls body(gpu) for each of the first `num_gpus` GPUs, with this GPU as the current device. Each
// call has a separate thread, because it may wait for other GPUs.
template <typename Body>
void ForEachGpu(int num_gpus, const Body& body) {
  std::vector<std::thread> threads;
  for (int gpu = 0; gpu < num_gpus; ++gpu) {
    threads.emplace_back([&body, gpu] {
      CHECK(cudaSetDevice(gpu));
      body(gpu);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// The median, the smallest and the largest of the samples.
struct Summary {
  explicit Summary(std::vector<double> samples) {
    std::sort(samples.begin(), samples.end());
    median = samples[samples.size() / 2];
    least = samples.front();
    greatest = samples.back();
  }
  double median, least, greatest;
};

// A stream of the current device, and the time between two events on this stream.
class TimedStream {
 public:
  TimedStream() {
    CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    CHECK(cudaEventCreate(&begin_));
    CHECK(cudaEventCreate(&end_));
  }
  TimedStream(const TimedStream&) = delete;
  ~TimedStream() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
    cudaStreamDestroy(stream_);
  }

  operator cudaStream_t() const { return stream_; }
  void Begin(unsigned flags = 0) { CHECK(cudaEventRecordWithFlags(begin_, stream_, flags)); }
  void End(unsigned flags = 0) { CHECK(cudaEventRecordWithFlags(end_, stream_, flags)); }

  // Waits for the stream. Returns the time from Begin() to End().
  double Microseconds() {
    CHECK(cudaStreamSynchronize(stream_));
    CHECK(cudaGetLastError());
    float ms = 0;
    CHECK(cudaEventElapsedTime(&ms, begin_, end_));
    return ms * 1e3;
  }

 private:
  cudaStream_t stream_;
  cudaEvent_t begin_, end_;
};

}  // namespace moe_a2a
