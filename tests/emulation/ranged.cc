#include "ranged.h"

#include <algorithm>
#include <thread>

#include "../../tools/driver/ranges.cuh"
#include "kernels/launch.h"
#include "launch.h"

namespace emulation {
namespace {

using namespace moe_a2a;

// Rows of all results of a dispatch.
struct Rows {
  FailureFill results[kMaxArrays];
  int64_t capacity;

  uint64_t checksum(int64_t row) const {
    uint64_t sum = 0xcbf29ce484222325;  // FNV-1a
    for (const FailureFill& result : results) {
      const int64_t bytes = result.bytes / capacity;
      const auto* from = static_cast<const unsigned char*>(result.data) + row * bytes;
      for (int64_t i = 0; i < bytes; ++i) sum = (sum ^ from[i]) * 0x100000001b3;
    }
    return sum;
  }
};

struct ProductParams {
  Rows rows;
  RangeGroups groups;
  int32_t first_group, num_groups;
  uint64_t* product;  // [capacity]
};

__global__ void sum_rows(ProductParams p) {
  for (int g = p.first_group; g < p.first_group + p.num_groups; ++g) {
    for (int i = threadIdx.x; i < p.groups.sizes[g]; i += blockDim.x) {
      p.product[p.groups.starts[g] + i] = p.rows.checksum(p.groups.starts[g] + i);
    }
  }
}

Rows rows_of(const DispatchParams& dispatch) {
  Rows rows = {{}, dispatch.routing.capacity};
  std::copy(std::begin(dispatch.fills), std::end(dispatch.fills), rows.results);
  return rows;
}

// The counters of each rank. Launches that overlap have different ones.
RangeCounters* counters_of(const RankView& view) {
  static RangeCounters* counters = [] {
    auto* made = new RangeCounters[2 * kMaxRanks]();
    for (int i = 0; i < 2 * kMaxRanks; ++i) made[i].call = 1;
    return made;
  }();
  return counters + 2 * view.rank + view.launch % 2;
}

Ranges make_ranges(Random& random, int num_experts) {
  std::vector<int> shares;
  for (int count = 1 + random.below(random.one_in(4) ? kMaxRanges : 4); count > 0; --count) {
    shares.push_back(random.below(4));
  }
  shares[random.below(static_cast<int64_t>(shares.size()))] = 1;  // not all are 0
  return RangesOf(shares, num_experts);
}

// Returns the numbers of chunks in the order of the first expert of their slots. `expert_of(slot)` is the number of experts
// if a slot has none.
template <typename ExpertOf>
std::vector<int32_t> in_order(const RoutingView& routing, int num_experts, ExpertOf&& expert_of) {
  std::vector<int> keys;
  std::vector<int32_t> order;
  for (int slot = 0; slot < routing.num_tokens; ++slot) {
    const int key = expert_of(slot);
    if (slot % slots_per_chunk(routing.num_tokens) == 0) {
      order.push_back(static_cast<int32_t>(order.size()));
      keys.push_back(num_experts);
    }
    keys.back() = std::min(keys.back(), key);
  }
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return keys[a] < keys[b]; });
  return order;
}

// Returns true if the orders of a plan are right. For up to 64 experts of a rank.
bool is_right(const PlanRangesParams& p) {
  const RoutingView& routing = p.routing;
  const int num_experts = p.groups.num_experts;
  const auto num_chunks = num_chunks_of(routing.num_tokens);
  const auto is_same = [&](const int32_t* found, const std::vector<int32_t>& expected) {
    return std::equal(expected.begin(), expected.end(), found);
  };
  for (int rank = 0; rank < p.num_ranks; ++rank) {
    const auto sent = in_order(routing, num_experts, [&](int slot) {
      const int token = routing.slot_token[rank * routing.num_tokens + slot];
      int first = num_experts;
      if (token < 0 || token >= routing.num_tokens) return first;
      for (int k = 0; k < routing.top_k; ++k) {
        const int64_t expert = int64_t{p.ids[token * routing.top_k + k]} - rank * num_experts;
        if (expert >= 0 && expert < first) first = static_cast<int>(expert);
      }
      return first;
    });
    const auto received = in_order(routing, num_experts, [&](int slot) {
      int first = num_experts;
      for (int k = 0; k < routing.top_k; ++k) {
        const int row = routing.slot_rows[(rank * routing.num_tokens + slot) * routing.top_k + k];
        for (int e = 0; e < first; ++e) {
          const int place = row - p.groups.starts[e];
          if (row >= 0 && place >= 0 && place < p.groups.sizes[e]) first = e;
        }
      }
      return first;
    });
    if (!is_same(p.plan.send_order + rank * num_chunks, sent) ||
        !is_same(p.plan.receive_order + rank * num_chunks, received)) {
      return false;
    }
  }
  return true;
}

}  // namespace

cudaError_t RangedLaunch::launch(const LaunchOn& on, const DispatchParams& dispatch, int num_blocks,
                                 const Array& product) const {
  const Shape& shape = routing_.shape;
  const std::vector<int32_t>& group_sizes = routing_.plans[on.rank].arrays[8];
  std::vector<int32_t> group_starts;
  int32_t start = 0;
  for (int32_t size : group_sizes) {
    group_starts.push_back(start);
    start += size;
  }
  const Array starts = make_array(group_starts), sizes = make_array(group_sizes);
  const Array ids = make_array(routing_.ids[on.rank]);
  const auto num_chunks = static_cast<size_t>(num_chunks_of(shape.num_tokens));
  const Array send_order = make_array(num_chunks * shape.num_ranks * 4, 4);
  const Array receive_order = make_array(num_chunks * shape.num_ranks * 4, 4);

  PlanRangesParams plan = {};
  plan.num_ranks = shape.num_ranks;
  plan.routing = dispatch.routing;
  plan.groups = {starts->as<int32_t>(), sizes->as<int32_t>(), shape.local_experts};
  plan.ids = ids->as<int32_t>();
  plan.plan = {send_order->as<int32_t>(), receive_order->as<int32_t>()};
  const cudaStream_t stream = stream_of(on.rank);
  RangedDispatchParams ranged = {dispatch, plan.plan, plan.groups,
                                 make_ranges(on.random, shape.local_experts), counters_of(on.view)};
  ProductParams multiply = {rows_of(dispatch), plan.groups, 0, 0, product->as<uint64_t>()};
  void* arguments[] = {&multiply};
  cudaError_t error = cudaSuccess;
  const auto check = [&](cudaError_t found) { error = error == cudaSuccess ? found : error; };
  const auto run_product = [&](int first, int end) {
    multiply.first_group = first;
    multiply.num_groups = end - first;
    check(cudaLaunchKernel(reinterpret_cast<const void*>(sum_rows), dim3(1), dim3(64), arguments, 0,
                           stream));
  };
  if (!making_.has_no_exchange && on.random.one_in(6)) {
    check(LaunchDispatch(&dispatch, num_blocks, stream));
    run_product(0, shape.local_experts);
  } else {
    check(LaunchPlanRanges(plan, stream));
    check(is_right(plan) ? cudaSuccess : cudaErrorUnknown);
    cudaError_t of_dispatch = cudaSuccess;
    std::thread side([&] {
      if (making_.has_no_exchange) {
        reinterpret_cast<Header*>(on.view.slab[on.rank])->control.succeeded = 1;
      } else {
        of_dispatch = LaunchRangedDispatch(ranged, num_blocks, stream);
      }
    });
    for (int r = 0; r < ranged.ranges.count; ++r) {
      check(LaunchAwaitRange({on.view, plan.groups, ranged.ranges, ranged.counters, r}, stream));
      run_product(ranged.ranges.first[r], ranged.ranges.first[r + 1]);
    }
    side.join();
    check(of_dispatch);
  }
  check(LaunchEndRanges({on.view,
                         ranged.counters,
                         {product->data(), static_cast<int64_t>(product->bytes()), kNanByte}},
                        stream));
  return error;
}

std::string RangedLaunch::wrong(int rank, const DispatchParams& dispatch,
                                const Array& product) const {
  const std::vector<int32_t>& group_sizes = routing_.plans[rank].arrays[8];
  int64_t end = 0;
  for (int32_t size : group_sizes) end += size;
  if (making_.has_no_exchange) {
    const auto is_nan = [](char c) { return static_cast<unsigned char>(c) == kNanByte; };
    const char* first = product->data();
    return end == 0 || std::all_of(first, first + product->bytes(), is_nan) ? "" : "a product";
  }
  const Rows rows = rows_of(dispatch);
  for (int64_t row = 0; row < end; ++row) {
    if (product->as<uint64_t>()[row] != rows.checksum(row)) {
      return "product of row " + std::to_string(row);
    }
  }
  const bool is_left =
      GuardedArray::is_untouched(product->data() + end * 8, product->data() + product->bytes());
  return is_left ? "" : "a product after the last group";
}

cudaError_t load_ranged() {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, sum_rows);
  return error == cudaSuccess ? LoadRanges() : error;
}

}  // namespace emulation
