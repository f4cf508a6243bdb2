// choose: chooses the experts of each token. The ids are equal to those of `_composition` in
// jax_moe_a2a/_src/layer/choose.py, because keys are only compared, or added in the same order.
//
// Layout: one warp chooses for a token. Each lane has consecutive keys of one group in registers.
// Lower lanes have lower expert ids, and several lanes may share a group. A step finds the largest
// key of the warp by a scan of each lane's keys, a reduction, and a vote for the lowest lane that
// has this key. One step per choice takes less time than a sort, because there are few choices.
//
// Launch: a warp for each token.
#include "router/choose.h"

#include <cmath>

#include "device/team.cuh"
#include "runtime/cuda_error.h"

namespace moe_a2a {
namespace {

constexpr int kWarps = 4;          // of a block
constexpr int kTaken = INT32_MIN;  // in place of a key: less than every key

// Returns an integer that orders `key` as lax.top_k does: NaN is the highest, and zeros of both
// signs are equal. The two lowest negative NaNs are also equal.
__device__ int order_of(float key) {
  const int bits = static_cast<int>(__float_as_uint(key == 0.f ? 0.f : key));
  return max(bits < 0 ? bits ^ INT32_MAX : bits, kTaken + 1);
}

__device__ float key_of(int order) {
  return __uint_as_float(static_cast<unsigned>(order < 0 ? order ^ INT32_MAX : order));
}

// The keys of a lane (order_of()), in the order of experts.
template <int kKeys>
struct LaneKeys {
  int orders[kKeys];

  // Returns the largest key, and sets `index` to its index. Of equal keys, takes the first.
  __device__ int largest(int* index) const {
    int result = orders[0];
    *index = 0;
#pragma unroll
    for (int i = 1; i < kKeys; ++i) {
      if (orders[i] > result) result = orders[i], *index = i;
    }
    return result;
  }

  __device__ void remove(int index) {
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      if (i == index) orders[i] = kTaken;
    }
  }
};

// Returns the lowest lane in the mask `lanes` whose `own` is equal to `value`.
__device__ int lowest_lane_with(int value, int own, unsigned lanes) {
  return __ffs(static_cast<int>(__ballot_sync(kAllLanes, own == value) & lanes)) - 1;
}

// Returns the value of the lane's group: the sum of its `number` highest keys, from high to low.
template <int kKeys>
__device__ int value_of_group(LaneKeys<kKeys> keys, int group_lanes, int number) {
  const int lane = lane_index();
  const unsigned lanes = (kAllLanes >> (kWarpThreads - group_lanes))
                         << lane / group_lanes * group_lanes;
  float value = 0;
  for (int step = 0; step < number; ++step) {
    int index;
    const int own = keys.largest(&index);
    int largest = own;
    for (int mask = group_lanes / 2; mask > 0; mask /= 2) {
      largest = max(largest, __shfl_xor_sync(kAllLanes, largest, mask));
    }
    if (lowest_lane_with(largest, own, lanes) == lane) keys.remove(index);
    value = step == 0 ? key_of(largest) : value + key_of(largest);
  }
  return order_of(value);
}

__device__ float log_sigmoid(float x) { return fminf(x, 0.f) - log1pf(expf(-fabsf(x))); }

__device__ float softmax_of_warp(float x) {
  float largest = x;
  for (int mask = kWarpThreads / 2; mask > 0; mask /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, mask));
  }
  const float own = expf(x - largest);
  float sum = own;
  for (int mask = kWarpThreads / 2; mask > 0; mask /= 2) {
    sum += __shfl_xor_sync(kAllLanes, sum, mask);
  }
  return own / sum;
}

template <int kKeys>
__global__ void __launch_bounds__(kWarps* kWarpThreads) choose_kernel(const Choose p) {
  const int64_t token = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpThreads;
  if (token >= p.num_tokens) return;
  const int lane = lane_index();
  const int64_t choice = token * p.num_choices + lane;
  const bool has_choice = lane < p.num_choices;
  if (p.mask != nullptr && !p.mask[token]) {
    if (has_choice) p.ids[choice] = -1, p.weights[choice] = 0, p.chosen[choice] = 0;
    return;
  }

  const int group_lanes = LanesOfGroup(p.num_groups), group = lane / group_lanes;
  const int size = p.num_experts / p.num_groups, in_group = lane % group_lanes * kKeys;
  const int num_keys = group < p.num_groups ? size - in_group : 0;  // may be negative, or > kKeys
  const int first = group * size + in_group;                        // the expert of the first key
  const float* const row = p.keys + token * p.num_experts + first;
  LaneKeys<kKeys> keys;
  if (kKeys % 4 == 0 && size % 4 == 0) {
#pragma unroll
    for (int i = 0; i + 3 < kKeys; i += 4) {
      const bool has_keys = i < num_keys;
      const uint4 bits = has_keys ? *reinterpret_cast<const uint4*>(row + i) : uint4{};
      keys.orders[i] = has_keys ? order_of(__uint_as_float(bits.x)) : kTaken;
      keys.orders[i + 1] = has_keys ? order_of(__uint_as_float(bits.y)) : kTaken;
      keys.orders[i + 2] = has_keys ? order_of(__uint_as_float(bits.z)) : kTaken;
      keys.orders[i + 3] = has_keys ? order_of(__uint_as_float(bits.w)) : kTaken;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kKeys; ++i) keys.orders[i] = i < num_keys ? order_of(row[i]) : kTaken;
  }

  if (p.num_groups > 1) {
    int value = value_of_group(keys, group_lanes, p.top_in_group);
    if (group >= p.num_groups) value = kTaken;
    bool is_best = false;
    for (int step = 0; step < p.top_groups; ++step) {
      const int largest = __reduce_max_sync(kAllLanes, value);
      if (lowest_lane_with(largest, value, kAllLanes) / group_lanes == group) {
        is_best = true;
        value = kTaken;
      }
    }
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      if (!is_best && i < num_keys) keys.orders[i] = order_of(-INFINITY);
    }
  }

  int id = 0;  // in lane k, the k-th choice
  for (int step = 0; step < p.num_choices; ++step) {
    int index;
    const int own = keys.largest(&index);
    const int winner = lowest_lane_with(__reduce_max_sync(kAllLanes, own), own, kAllLanes);
    const int expert = __shfl_sync(kAllLanes, first + index, winner);
    if (lane == winner) keys.remove(index);
    if (lane == step) id = expert;
  }

  const float value = has_choice ? p.values[token * p.num_experts + id] : 0.f;
  float weight = value;
  if (p.renormalizes) {
    const float log_score = p.is_sigmoid ? log_sigmoid(value) : value;
    weight = softmax_of_warp(has_choice ? log_score : -INFINITY);
  }
  if (has_choice) {
    p.ids[choice] = id;
    p.weights[choice] = weight * p.scale;
    p.chosen[choice] = value;
  }
}

using Kernel = void (*)(Choose);
const Kernel kKernels[] = {choose_kernel<1>, choose_kernel<2>,  choose_kernel<4>,
                           choose_kernel<8>, choose_kernel<16>, choose_kernel<32>};

}  // namespace

cudaError_t LoadChoose() {
  cudaFuncAttributes attributes;
  for (const Kernel kernel : kKernels) {
    const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

Problem LaunchChoose(const Choose& call, cudaStream_t stream) {
  if (call.num_tokens == 0) return {};
  const int size = call.num_experts / call.num_groups, lanes = LanesOfGroup(call.num_groups);
  int kernel = 0;
  while (lanes << kernel < size) ++kernel;
  const auto num_blocks = static_cast<unsigned>((call.num_tokens + kWarps - 1) / kWarps);
  Choose params = call;
  void* arguments[] = {&params};
  const cudaError_t error =
      cudaLaunchKernel(reinterpret_cast<const void*>(kKernels[kernel]), dim3(num_blocks),
                       dim3(kWarps * kWarpThreads), arguments, 0, stream);
  return ProblemOf(error, "launching choose");
}

}  // namespace moe_a2a
