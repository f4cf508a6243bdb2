// Computes the tiles of a product, and the order in which clusters take them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "device/team.cuh"
#include "gemm/form.h"

namespace moe_a2a::gemm {

// The next work of a cluster: a tile of results for each of its blocks.
//
// The two blocks have neighbouring tiles along the axis F::kPaired. If a group has an odd number of
// tiles along this axis, its last tiles have no neighbour. For these, the blocks have neighbouring
// tiles along the other axis. In both cases, the blocks share the loads of an operand.
struct alignas(16) Work {
  int32_t start, size;  // of the group's rows; size is negative if no work is left
  int32_t weight;
  uint32_t tile;  // index along the paired axis << 16 | along the other axis << 1 | is_odd()

  __device__ bool is_end() const { return size < 0; }
  __device__ bool is_odd() const { return (tile & 1) != 0; }
};

// Returns true if the blocks share loads of operand a; otherwise they share loads of operand b.
template <typename F>
__device__ inline bool shares_a(const Work& work) {
  return (F::kPaired == Axis::kN) != work.is_odd();
}

// The tiles of a group's rows with F::kVaries.
//
// Loads limit the speed of a tile of few rows, and an odd tile shares fewer loads than a pair. A
// group therefore has pairs of tiles of kBaseRows rows, and then up to four tiles for the remaining
// rows. These last tiles have equal extents. with_extent() lists the possible extents.
struct RowTiles {
  static constexpr int kMost = Tuning::kFew.n;
  int32_t full;  // tiles of kBaseRows rows
  int32_t last;  // tiles of `extent` rows
  int32_t extent;

  __device__ explicit RowTiles(int32_t size) {
    full = max(0, size / (2 * kBaseRows) - 1) * 2;
    const int32_t rest = size - full * kBaseRows;  // less than 4 * kBaseRows
    last = (rest + kMost - 1) / kMost;
    const int32_t rows = last == 0 ? 0 : (rest + last - 1) / last;
    const int step = rows <= 96 ? 32 : rows <= 112 ? 16 : 8;
    extent = (rows + step - 1) / step * step;
  }
  __device__ int32_t count() const { return full + last; }
};

// A tile of one block, which begins at `m` and `n`. `end_m`, `end_n` and `end_k` are the ends of
// the group's product along each axis. With F::kVaries, `end_n` is the end of the tile's rows.
template <typename F>
struct Tile {
  int32_t m, n;
  int32_t end_m, end_n, end_k;
  int32_t extent;  // along n, for F::kVaries

  Tile() = default;
  __device__ Tile(const GemmParams& p, const Work& work, uint32_t rank) {
    const int32_t paired = (work.tile >> 16) + (work.is_odd() ? 0 : rank),
                  other = ((work.tile & 0xFFFF) >> 1) + (work.is_odd() ? rank : 0);
    m = (F::kPaired == Axis::kM ? paired : other) * F::kResultM;
    const int32_t n_tile = F::kPaired == Axis::kM ? other : paired;
    end_m = F::kRows == Axis::kM ? work.size : p.m;
    end_n = F::kRows == Axis::kN ? work.size : p.n;
    end_k = F::kRows == Axis::kK ? work.size : p.k;
    if constexpr (F::kVaries) {
      const RowTiles tiles(work.size);
      const bool is_last = n_tile >= tiles.full;
      n = is_last ? tiles.full * kBaseRows + (n_tile - tiles.full) * tiles.extent
                  : n_tile * kBaseRows;
      extent = is_last ? tiles.extent : kBaseRows;
      end_n = min(end_n, n + extent);
    } else {
      n = n_tile * F::kResultN;
    }
    if (work.weight < 0) end_k = 0;
  }

  __device__ int steps() const { return max(F::kLeastSteps, (end_k + F::kStepK - 1) / F::kStepK); }
  __device__ int loaded_rows() const {
    if constexpr (!F::kVaries) return F::kTileN;
    return extent <= F::kRowsOfBoxB                ? F::kRowsOfBoxB
           : extent <= F::kBoxesB * F::kRowsOfBoxB ? F::kBoxesB * F::kRowsOfBoxB
                                                   : F::kTileN;
  }
  // Returns the number of steps without a product past the end of k. A product covers 16 of k.
  __device__ int whole_steps() const { return (end_k + 15) / F::kStepK; }
};

// Finds a tile by its index among all tiles. Indices increase from call to call. All lanes of a
// warp call it.
template <typename F>
class Walk {
 public:
  __device__ explicit Walk(const GemmParams& p) : p_(p) { read_groups(); }

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
    return {of_lane(start_), size, of_lane(weight_), place(tile, paired(size), others(size))};
  }

 private:
  __device__ int tiles_m(int size) const {
    return ((F::kRows == Axis::kM ? size : p_.m) + F::kResultM - 1) / F::kResultM;
  }
  __device__ int tiles_n(int size) const {
    if constexpr (F::kVaries) return RowTiles(size).count();
    return ((F::kRows == Axis::kN ? size : p_.n) + F::kResultN - 1) / F::kResultN;
  }
  __device__ int paired(int size) const {
    return F::kPaired == Axis::kM ? tiles_m(size) : tiles_n(size);
  }
  __device__ int others(int size) const {
    return F::kPaired == Axis::kM ? tiles_n(size) : tiles_m(size);
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
        const int pairs = paired(size_), other = others(size_);
        count_ =
            F::kBlocks == 1 ? pairs * other : pairs / 2 * other + pairs % 2 * ((other + 1) / 2);
      }
    }
    end_ = count_;
#pragma unroll
    for (int distance = 1; distance < kWarpThreads; distance *= 2) {
      const int below = __shfl_up_sync(kAllLanes, end_, distance);
      if (lane_index() >= distance) end_ += below;
    }
  }

  // Returns Work::tile of tile number `tile` of a group.
  static __device__ uint32_t place(int tile, int paired, int others) {
    const int rows = paired / F::kBlocks;
    if (tile >= rows * others) {
      return (paired - 1) << 16 | (tile - rows * others) * 2 << 1 | 1;
    }
    const int band = tile / (kBand * others);
    const int height = min(kBand, rows - band * kBand);
    const int rest = tile - band * kBand * others;
    return (band * kBand + rest % height) * F::kBlocks << 16 | rest / height << 1;
  }

  const GemmParams& p_;
  int first_group_ = 0;
  int before_ = 0;             // tiles of groups before first_group_
  int start_, size_, weight_;  // the group of this lane
  int count_;                  // tiles of this lane's group
  int end_;                    // tiles of this lane's and all earlier lanes' groups
};

}  // namespace moe_a2a::gemm
