// fill_slots: fills the spare slots of ranks with replicas of popular experts, bit for bit like
// `fill_loop` in jax_moe_a2a/_src/placement/fill.py.
//
// Layout: one warp makes a plan. The latency of four reductions limits each step, and more warps
// would add barriers. Lane l has the rows of ranks l, l + 32, ... in registers. In the loop, only
// lane l accesses slots l, l + 32, ... of a rank. Slots are in shared memory.
//
// Launch: a block of one warp for each plan. A separate kernel for up to 64 ranks keeps fewer ranks
// in the registers of a lane, because each step reads all of these registers.
#include "placement/fill_slots.h"

#include "device/ptx.cuh"
#include "device/team.cuh"
#include "layout.h"
#include "runtime/cuda_error.h"

namespace moe_a2a {
namespace {

constexpr int kSharedArrays = 3;
static_assert(kSharedArrays * sizeof(int32_t) * kMaxPlannedExperts <= 48 << 10);

struct Largest {
  int value, index;

  // `at` must be larger than all earlier indices.
  __device__ void add(int other, int at) {
    if (other > value) *this = {other, at};
  }
};

// Returns the largest value of all lanes; of equal values, the one with the smallest index.
__device__ Largest largest_of_warp(Largest own) {
  const int value = __reduce_max_sync(kAllLanes, own.value);
  return {value, __reduce_min_sync(kAllLanes, own.value == value ? own.index : INT32_MAX)};
}

__device__ int divide_up(int a, int b) { return a / b + (a % b > 0); }

template <int kRanksPerLane>
__global__ void __launch_bounds__(kWarpThreads) fill_slots_kernel(const FillSlots p) {
  MOE_A2A_DYNAMIC_SHARED(4, int32_t, shared);
  const int lane = lane_index(), num_experts = p.num_ranks * p.num_local;
  const int width = p.num_local + p.spare;
  int32_t *const experts = shared, *const rows = experts + num_experts,
                 *const replicas = rows + num_experts;
  const int64_t first = int64_t{blockIdx.x} * num_experts;
  int32_t* const slot_experts = p.slot_experts + int64_t{blockIdx.x} * p.num_ranks * width;
  int32_t* const slot_rows = p.slot_rows + int64_t{blockIdx.x} * p.num_ranks * width;

  int largest = INT32_MIN;
  for (int i = lane; i < num_experts; i += kWarpThreads) {
    experts[i] = p.experts[first + i];
    rows[i] = p.rows[first + i];
    replicas[i] = 1;
    largest = max(largest, rows[i]);
  }
  for (int i = lane; i < p.num_ranks * p.spare; i += kWarpThreads) {
    const int slot = i / p.spare * width + p.num_local + i % p.spare;
    slot_experts[slot] = -1;
    slot_rows[slot] = 0;
  }
  __syncwarp();

  int loads[kRanksPerLane], free[kRanksPerLane], total = 0;
#pragma unroll
  for (int i = 0; i < kRanksPerLane; ++i) {
    const int rank = lane + i * kWarpThreads;
    const bool is_rank = rank < p.num_ranks;
    loads[i] = is_rank ? 0 : INT32_MIN;
    free[i] = is_rank ? p.spare : 0;
    if (!is_rank) continue;
    for (int slot = 0; slot < p.num_local; ++slot) loads[i] += rows[rank * p.num_local + slot];
    total += loads[i];
  }
  total = __reduce_add_sync(kAllLanes, total);
  largest = __reduce_max_sync(kAllLanes, largest);
  const int target = max(divide_up(total, p.num_ranks), divide_up(largest, p.most));
  __syncwarp();  // All lanes have read the rows.

#pragma unroll 1
  for (int step = 0; step < p.num_ranks * p.spare; ++step) {
    Largest emptiest = {INT32_MIN, 0}, fullest = {INT32_MIN, 0}, popular = {-1, 0};
#pragma unroll
    for (int i = 0; i < kRanksPerLane; ++i) {
      const int rank = lane + i * kWarpThreads;
      emptiest.add(free[i] > 0 ? ~loads[i] : INT32_MIN, rank);  // largest ~load: least load
      fullest.add(loads[i], rank);
    }
    fullest = largest_of_warp(fullest);
    emptiest = largest_of_warp(emptiest);
    const int from = fullest.index, to = emptiest.index;
    for (int slot = lane; slot < p.num_local; slot += kWarpThreads) {
      const int i = from * p.num_local + slot;
      popular.add(replicas[i] < p.most ? rows[i] : -1, slot);
    }
    popular = largest_of_warp(popular);
    int left = 0;
#pragma unroll
    for (int i = 0; i < kRanksPerLane; ++i) {
      if (lane + i * kWarpThreads == to) left = free[i];
    }
    left = __shfl_sync(kAllLanes, left, to % kWarpThreads);

    const int lacking = target - ~emptiest.value, excess = fullest.value - target;
    const int taken = min(left > 1 ? min(lacking, excess) : lacking, popular.value);
    if (left == 0 || min(taken, excess) < p.min_rows) break;
#pragma unroll
    for (int i = 0; i < kRanksPerLane; ++i) {
      const int rank = lane + i * kWarpThreads;
      if (rank == from) loads[i] -= taken;
      if (rank == to) loads[i] += taken, --free[i];
    }
    if (popular.index % kWarpThreads == lane) {
      const int i = from * p.num_local + popular.index;
      const int slot = to * width + width - left;
      rows[i] -= taken;
      ++replicas[i];
      slot_experts[slot] = experts[i];
      slot_rows[slot] = taken;
    }
  }

  __syncwarp();
  for (int i = lane; i < num_experts; i += kWarpThreads) {
    const int slot = i / p.num_local * width + i % p.num_local;
    slot_experts[slot] = experts[i];
    slot_rows[slot] = rows[i];
  }
}

using Kernel = void (*)(FillSlots);
constexpr int kFewPerLane = 2, kMostPerLane = kMaxRanks / kWarpThreads;
static_assert(kMaxRanks % kWarpThreads == 0);
constexpr Kernel kKernelOfFew = fill_slots_kernel<kFewPerLane>;
constexpr Kernel kKernelOfMany = fill_slots_kernel<kMostPerLane>;

}  // namespace

cudaError_t LoadFillSlots() {
  for (Kernel kernel : {kKernelOfFew, kKernelOfMany}) {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

Problem LaunchFillSlots(const FillSlots& call, cudaStream_t stream) {
  if (call.batch == 0) return {};
  FillSlots params = call;
  void* arguments[] = {&params};
  const Kernel kernel = call.num_ranks <= kFewPerLane * kWarpThreads ? kKernelOfFew : kKernelOfMany;
  const cudaError_t error = cudaLaunchKernel(
      reinterpret_cast<const void*>(kernel), dim3(call.batch), dim3(kWarpThreads), arguments,
      kSharedArrays * sizeof(int32_t) * call.num_ranks * call.num_local, stream);
  return ProblemOf(error, "launching fill_slots");
}

}  // namespace moe_a2a
