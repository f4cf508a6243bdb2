// One exchange between all ranks, with its expected results.
#pragma once

#include <cuda_runtime_api.h>

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "calls/why_not.h"
#include "guarded.h"
#include "kernels/grid.h"
#include "kernels/launch.h"
#include "launch.h"
#include "numbers.h"
#include "oracle.h"
#include "params.h"
#include "random.h"

namespace emulation {

struct Making {
  int num_ranks = 2;
  int max_local_experts = 4;
  int max_groups = 12;        // of an encoded row, 128 numbers each
  int max_tokens = 1 << 20;   // of a rank
  bool at_threshold = false;  // only routings for which splits_sources() is true (oracle.h)
  int crowded_rank = -1;      // its tokens have slots at every rank
  int corrupt_one_in = 0;     // about one of N indices is corrupted; 0: none
};

class JointLaunch {
 public:
  explicit JointLaunch(int num_ranks) : params_(static_cast<size_t>(num_ranks)) {}

  // The last rank to arrive calls launch(params, stream). From the parameters of ranks 0
  // and 1, the kernel computes those of all ranks (device/ranks.cuh). join() returns the result.
  template <typename Params, typename Launch>
  cudaError_t join(int rank, const Params& params, Launch&& launch) {
    std::unique_lock<std::mutex> lock(mutex_);
    params_[rank] = &params;
    const int launches = launches_;
    if (++arrived_ == params_.size()) {
      const Params both[] = {*static_cast<const Params*>(params_[0]),
                             *static_cast<const Params*>(params_[1])};
      error_ = launch(both, stream_of(kAllRanks));
      arrived_ = 0;
      ++launches_;
      all_have_come_.notify_all();
    }
    all_have_come_.wait(lock, [&] { return launches_ != launches; });
    return error_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_have_come_;
  std::vector<const void*> params_;
  size_t arrived_ = 0;
  int launches_ = 0;
  cudaError_t error_ = cudaSuccess;
};

struct LaunchOn {
  int rank;
  moe_a2a::RankView view;
  int num_sms;
  Random& random;  // equal on ranks that share a device
  const moe_a2a::Kernels& kernels;
  JointLaunch* joint;  // null unless ranks share a device

  template <typename Params, typename Launch>
  cudaError_t run(const Params& params, Launch&& launch) const {
    if (joint != nullptr) return joint->join(rank, params, launch);
    return launch(&params, stream_of(rank));
  }
};

class Exchange {
 public:
  virtual ~Exchange() = default;

  virtual moe_a2a::Operation operation() const = 0;
  virtual int64_t zone_bytes() const = 0;  // for one source rank
  virtual cudaError_t launch(const LaunchOn& on) = 0;
  // Returns the first error, or "".
  virtual std::string wrong(int rank) const = 0;

  bool is_failure(int rank) const {
    for (const Output& output : outputs_[rank]) {
      for (size_t i = 0; i < output.array->bytes(); ++i) {
        if (static_cast<unsigned char>(output.array->data()[i]) != output.fill) return false;
      }
    }
    return true;
  }
  bool is_intact_around(int rank) const {
    for (const Output& output : outputs_[rank]) {
      if (!output.array->is_intact_around()) return false;
    }
    return true;
  }

  uint64_t signature = 0, run = 0;
  std::string name;

 protected:
  explicit Exchange(int num_ranks) : outputs_(static_cast<size_t>(num_ranks)) {}

  Array add_output(int rank, size_t bytes, size_t alignment, unsigned char fill, size_t skew = 0) {
    const InMemoryOf memory(rank);
    Array array = make_array(bytes, alignment, skew);
    outputs_[rank].push_back({array, fill});
    return array;
  }

 private:
  struct Output {
    Array array;
    unsigned char fill;  // the value of each byte after a failure
  };
  std::vector<std::vector<Output>> outputs_;
};

using ExchangePtr = std::unique_ptr<Exchange>;

ExchangePtr make_route(const Making& making, Random& random);
ExchangePtr make_dispatch(const Making& making, Random& random);
ExchangePtr make_weighted_dispatch(const Making& making, Random& random);
ExchangePtr make_format_dispatch(const Making& making, Random& random);
ExchangePtr make_routed_dispatch(const Making& making, Random& random);
ExchangePtr make_combine(const Making& making, Random& random);

// ---- For several kinds of exchanges.

constexpr unsigned char kNanByte = 0xFF;

// For arrays that kernels only move.
inline const moe_a2a::DataType kByte = {"U8", 1, kNanByte};
const moe_a2a::DataType& data_type(moe_a2a::ElementType type);

std::string name_of(moe_a2a::TokenFormat format);

struct Bound {
  moe_a2a::Arrays arrays;
  std::vector<std::shared_ptr<const std::vector<int64_t>>> dimensions;  // `arrays` points to these

  // `data` may be null if only sizes matter.
  void add(const moe_a2a::DataType& type, std::vector<int64_t> axes, char* data);
  void add(const moe_a2a::DataType& type, std::vector<int64_t> axes, const Array& array) {
    add(type, std::move(axes), array->data());
  }
  void append(const Bound& more) {
    arrays.insert(arrays.end(), more.arrays.begin(), more.arrays.end());
    dimensions.insert(dimensions.end(), more.dimensions.begin(), more.dimensions.end());
  }
};

struct Arguments {
  Bound args, results;
};

// Returns the parameters of a call, as a handler computes them (ffi/call_state_of.h).
template <typename Call>
typename Call::Params params_of(const Call& call, const moe_a2a::RankView& view, bool is_colocated,
                                int num_sms, const Arguments& a) {
  // An address that is missing in `bindings` stays null.
  moe_a2a::Arrays args = a.args.arrays, results = a.results.arrays;
  std::vector<char*> addresses;
  for (moe_a2a::Arrays* arrays : {&args, &results}) {
    for (moe_a2a::Array& array : *arrays) {
      array.index = addresses.size();
      addresses.push_back(static_cast<char*>(std::exchange(array.data, nullptr)));
    }
  }
  typename Call::Params described = {}, p = {};
  std::vector<moe_a2a::Binding> bindings;
  const moe_a2a::Problem problem =
      call.Describe({view, is_colocated, num_sms, &bindings}, {args.data(), args.size()},
                    {results.data(), results.size()}, &described);
  if (!problem.empty()) {
    std::fprintf(stderr, "EMULATOR: %s\n", problem.c_str());
    std::abort();
  }
  moe_a2a::CopyParams(described, bindings, [&](size_t array) { return addresses[array]; }, &p);
  // Option --heads needs two signatures that differ in the bits of heads and not in the bits of
  // flags.
  const_cast<moe_a2a::RankView&>(view_of(p)).signature = view.signature;
  return p;
}

template <typename Call>
int64_t zone_bytes_of(const Call& call, int num_ranks, const Arguments& a) {
  moe_a2a::RankView view = {};
  view.num_ranks = num_ranks;
  return Call::ZoneBytes(params_of(call, view, false, 1, a));
}

// vary(params, num_blocks) may change the parameters.
template <typename Call, typename Vary>
cudaError_t launch_call(const Call& call, const LaunchOn& on, const Arguments& a, Vary&& vary) {
  auto p = params_of(call, on.view, on.joint != nullptr, on.num_sms, a);
  const int blocks = moe_a2a::grid_of(p, on.num_sms).blocks;
  vary(p, blocks);
  return on.run(p, [&](const auto* ranks, cudaStream_t stream) {
    return on.kernels.launch(ranks, blocks, stream);
  });
}

struct Routing {
  Shape shape;
  Ids ids;
  std::vector<Plan> plans;

  Routing(const Making& making, Random& random, int max_tokens, int max_top_k, bool may_have_parts);

 private:
  void move_to_threshold(Random& random, int max_tokens);
};

// Some indices are corrupted if Making::corrupt_one_in is not 0.
class RoutingArrays {
 public:
  RoutingArrays(const Making& making, Random& random, const Routing& routing, int rank);

  void add_to(Bound& args, const Shape& shape) const;

 private:
  std::vector<Array> arrays_;
};
// Adds arrays without data, for callers that only need sizes.
void add_routing_sizes(Bound& args, const Shape& shape);

class PlanOutputs {
 public:
  void add(Array array) { arrays_.push_back(std::move(array)); }
  void add_to(Bound& results, const Shape& shape, int64_t batch) const;
  std::string wrong(const Plan& expected) const;

 private:
  std::vector<Array> arrays_;
};

void vary_roles(Random& random, int num_blocks, moe_a2a::Roles& roles);

}  // namespace emulation
