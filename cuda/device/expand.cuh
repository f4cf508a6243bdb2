// Writes the rows of this rank's experts: copies landed rows, and zeroes rows without a token.
#pragma once

#include "device/copy.cuh"
#include "device/stream.cuh"

namespace moe_a2a {

// Returns true if rows move through shared memory: rows of 16-byte words, but no choice arrays.
__device__ inline bool is_streamed(const MovedArray& array) {
  return array.choice_bytes == 0 && array.width == kVectorBytes;
}

// Copies landed rows of a few slots. Lane i * top_k + k holds choice k of the i-th slot: `row` is
// the index of the choice's row, or negative; `from` is the address of the landed row.
__device__ inline void expand_rows(const MovedArray& array, const Team& team, Stream& stream,
                                   int top_k, int row, const char* from) {
  if (array.choice_bytes > 0) {
    if (row < 0 || !team.is_first_warp()) return;
    copy_choice(array.out + row * array.choice_bytes,
                from + lane_index() % top_k * array.choice_bytes, array.choice_bytes, array.width);
    return;
  }
  const uint32_t choices = __ballot_sync(kAllLanes, row >= 0);
  const uint32_t of_my_slot = choices & (kAllLanes >> (kWarpThreads - top_k))
                                            << lane_index() / top_k * top_k;
  const bool is_first = row >= 0 && lane_index() == __ffs(of_my_slot) - 1;
  const uint32_t firsts = __ballot_sync(kAllLanes, is_first);
  if (is_streamed(array)) {
    const uint32_t earlier = (1u << lane_index()) - 1;
    if (row >= 0) {
      stream.shared->destinations[__popc(choices & earlier)] = array.out + row * array.row_bytes;
    }
    if (is_first) {
      const int place = __popc(firsts & earlier);
      stream.shared->sources[place] = from;
      stream.shared->destinations_end[place] = __popc(choices & earlier) + __popc(of_my_slot);
    }
    stream_copy(stream, team, __popc(firsts), array.row_bytes);
    return;
  }
  for (uint32_t left = firsts; left != 0; left &= left - 1) {
    const int first = __ffs(left) - 1;
    const uint32_t of_slot = __shfl_sync(kAllLanes, of_my_slot, first);
    const char* landed = reinterpret_cast<const char*>(
        __shfl_sync(kAllLanes, reinterpret_cast<uint64_t>(from), first));
    spread_row(array, team, landed, row, of_slot);
  }
}

// Returns true if a row has no token and the dispatch must zero it.
__device__ inline bool is_zeroed(const DispatchParams& p, int64_t row) {
  const int slot = p.routing.row_slot[row];
  return p.leaves_tail ? slot == kPaddingRow : slot < 0;
}

// Zeroes row first + i for each lane i whose `is_empty` is set. `empty` is the mask of these lanes.
__device__ inline void zero_rows_of(const MovedArray& array, const Team& team, const char* zeros,
                                    int first, bool is_empty, uint32_t empty) {
  if (array.choice_bytes > 0) {
    const int64_t my_row = first + lane_index();
    if (is_empty && team.is_first_warp()) {
      copy_choice(array.out + my_row * array.choice_bytes, nullptr, array.choice_bytes,
                  array.width);
    }
    return;
  }
  for (uint32_t left = empty; left != 0; left &= left - 1) {
    char* row = array.out + (first + __ffs(left) - 1) * array.row_bytes;
    if (is_streamed(array)) {
      stream_zeros(team, zeros, row, array.row_bytes);
    } else {
      zero_row(team, row, array.row_bytes, array.width);
    }
  }
}

}  // namespace moe_a2a
