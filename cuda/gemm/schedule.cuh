// Lists the tiles, and the order in which clusters take them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "device/team.cuh"
#include "gemm/form.h"

namespace moe_a2a::gemm {

// The next work of a cluster: a tile of results for each of its blocks.
//
// The two blocks of a cluster have neighbouring tiles along m, which need the same columns of b. If
// a group has an odd number of tiles along m, the blocks share the last row of tiles: they have
// neighbouring tiles along n, which need the same rows of a.
struct alignas(16) Work {
  int32_t start, size;  // rows of the group; the size is negative if no work is left
  int32_t weight;
  uint32_t tile;  // along m << 16 | along n << 1 | shares a

  __device__ bool is_end() const { return size < 0; }
  __device__ bool shares_a() const { return (tile & 1) != 0; }
};

// A tile of one block: its first row and column, and the ends of the product's axes for the tile's
// group.
template <typename F>
struct Tile {
  int32_t m, n;
  int32_t end_m, end_n, end_k;

  Tile() = default;
  __device__ Tile(const GemmParams& p, const Work& work, uint32_t rank) {
    const uint32_t m_tile = work.tile >> 16, n_tile = (work.tile & 0xFFFF) >> 1;
    m = (m_tile + (work.shares_a() ? 0 : rank)) * F::kResultM;
    n = (n_tile + (work.shares_a() ? rank : 0)) * F::kResultN;
    end_m = F::kRows == Axis::kM ? work.size : p.m;
    end_n = F::kRows == Axis::kN ? work.size : p.n;
    end_k = F::kRows == Axis::kK ? work.size : p.k;
    if (work.weight < 0) end_k = 0;
  }

  __device__ int steps() const { return max(F::kLeastSteps, (end_k + F::kStepK - 1) / F::kStepK); }
  // Returns the number of steps in which all products, each over 16 of k, have elements. If rows
  // lie along k, another step may follow.
  __device__ int whole_steps() const { return (end_k + 15) / F::kStepK; }
};

// Walks through the tiles of all groups. All lanes of a warp call it. Positions only increase.
template <typename F>
class Walk {
 public:
  __device__ explicit Walk(const GemmParams& p) : p_(p) { read_groups(); }

  // Returns the work at `position`.
  __device__ Work at(int position) {
    int count = __shfl_sync(kAllLanes, end_, kWarpThreads - 1);
    while (position - before_ >= count) {
      before_ += count;
      first_group_ += kWarpThreads;
      if (first_group_ >= p_.num_groups) return {0, -1, 0, 0};
      read_groups();
      count = __shfl_sync(kAllLanes, end_, kWarpThreads - 1);
    }
    const int lane = __ffs(__ballot_sync(kAllLanes, position - before_ < end_)) - 1;
    const auto of_lane = [&](int value) { return __shfl_sync(kAllLanes, value, lane); };
    const int32_t size = of_lane(size_);
    const int tile = position - before_ - of_lane(end_ - count_);
    return {of_lane(start_), size, of_lane(weight_), place(tile, tiles_m(size), tiles_n(size))};
  }

 private:
  __device__ int tiles_m(int size) const {
    return ((F::kRows == Axis::kM ? size : p_.m) + F::kResultM - 1) / F::kResultM;
  }
  __device__ int tiles_n(int size) const {
    return ((F::kRows == Axis::kN ? size : p_.n) + F::kResultN - 1) / F::kResultN;
  }

  // Reads the next groups, one for each lane.
  __device__ void read_groups() {
    const int group = first_group_ + lane_index();
    start_ = size_ = count_ = 0;
    weight_ = -1;
    if (group < p_.num_groups) {
      start_ = p_.starts[group];
      size_ = p_.sizes[group];
      weight_ = p_.weights[group];
      if (F::kRows != Axis::kK || (weight_ >= 0 && (!F::kAdds || size_ > 0))) {
        const int m = tiles_m(size_), n = tiles_n(size_);
        count_ = F::kBlocks == 1 ? m * n : m / 2 * n + m % 2 * ((n + 1) / 2);
      }
    }
    end_ = count_;
#pragma unroll
    for (int distance = 1; distance < kWarpThreads; distance *= 2) {
      const int below = __shfl_up_sync(kAllLanes, end_, distance);
      if (lane_index() >= distance) end_ += below;
    }
  }

  // Returns Work::tile of a group's tile.
  static __device__ uint32_t place(int tile, int tiles_m, int tiles_n) {
    const int rows = tiles_m / F::kBlocks;
    if (tile >= rows * tiles_n) {
      return (tiles_m - 1) << 16 | (tile - rows * tiles_n) * 2 << 1 | 1;
    }
    const int band = tile / (kBand * tiles_n);
    const int height = min(kBand, rows - band * kBand);
    const int rest = tile - band * kBand * tiles_n;
    return (band * kBand + rest % height) * F::kBlocks << 16 | rest / height << 1;
  }

  const GemmParams& p_;
  int first_group_ = 0;
  int before_ = 0;             // tiles of groups before first_group_
  int start_, size_, weight_;  // the group of this lane
  int count_, end_;  // tiles of this group; tiles of this lane's and all earlier lanes' groups
};

}  // namespace moe_a2a::gemm
