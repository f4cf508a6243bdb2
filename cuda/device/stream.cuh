// Streams rows through shared memory by bulk copies, so that few warps keep many bytes in flight.
//
// A warp has kStages stages of shared memory, which its first lane loads and stores in turn. Each
// stage has an mbarrier for its loads. A stage can be stored to any number of destinations, so a
// row is read only once. docs/protocol.md, section 5, lists the fences that bulk copies need.
#pragma once

#include "device/ptx.cuh"
#include "device/team.cuh"
#include "tuning.h"

namespace moe_a2a {

// Segments of rows are large, because every bulk copy has a fixed cost.
constexpr int kStages = Tuning::kStages;
constexpr int kLoadsAhead = Tuning::kLoadsAhead;  // how far loads run ahead of stores
constexpr int kSegmentBytes = Tuning::kSegmentBytes;
static_assert(kLoadsAhead > 0 && kLoadsAhead < kStages);
// Bulk copies need aligned stages. A phase of an mbarrier counts up to 2^20 - 1 bytes.
static_assert(kSegmentBytes % 128 == 0 && kSegmentBytes < 1 << 20);

// The dynamic shared memory of one warp.
struct StreamShared {
  alignas(128) char stages[kStages][kSegmentBytes];
  alignas(8) uint64_t landed[kStages];  // mbarriers
  // The list of the rows that the warp copies, and of the destinations of each row.
  const char* sources[kWarpThreads];
  int destinations_end[kWarpThreads];  // where each row's `destinations` end
  char* destinations[kWarpThreads];
};

constexpr int kStreamSharedBytes = kMaxTeams * sizeof(StreamShared);  // of all warps
// A dispatch also has a segment of zeros and less than 16 KiB of other static shared memory.
static_assert(kStreamSharedBytes + kSegmentBytes + (16 << 10) <= Tuning::kMaxSharedBytes);

// The state of a warp's first lane between calls of stream_copy(), when no load is under way.
struct Stream {
  StreamShared* shared;
  int stage = 0;  // the next stage to wait for
  uint32_t parity = 0;

  __device__ explicit Stream(char* dynamic_shared)
      : shared(reinterpret_cast<StreamShared*>(dynamic_shared) + threadIdx.x / kWarpThreads) {
    if (lane_index() != 0) return;
    for (uint64_t& barrier : shared->landed) init_load_barrier(&barrier);
    fence_load_barriers();
  }

  // Waits for the next stage, and returns its memory, which is valid until the stage's next load.
  __device__ const char* next() {
    wait_until_loaded(&shared->landed[stage], parity);
    const char* landed = shared->stages[stage];
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
    return landed;
  }
};

// The segments of a row that one warp of a team copies.
struct Segments {
  int64_t row_bytes, first, step;

  __device__ Segments(const Team& team, int64_t row_bytes)
      : row_bytes(row_bytes),
        first(int64_t{team.thread() / kWarpThreads} * kSegmentBytes),
        step(int64_t{team.threads() / kWarpThreads} * kSegmentBytes) {}
  __device__ uint32_t bytes(int64_t offset) const {
    return static_cast<uint32_t>(min(row_bytes - offset, int64_t{kSegmentBytes}));
  }
};

// Does the work of stream_copy(). The first lane calls it.
__device__ inline void copy_listed(Stream& stream, const Segments& segments, int num_rows) {
  // Loads run ahead, even into the next row. A stage is loaded again after its stores have read it.
  StreamShared& shared = *stream.shared;
  int load_row = 0;
  int into = stream.stage;
  int64_t load_offset = segments.first;
  const auto load_next = [&] {
    if (load_row >= num_rows) return;
    bulk_load(shared.stages[into], shared.sources[load_row] + load_offset,
              segments.bytes(load_offset), &shared.landed[into]);
    into = into + 1 == kStages ? 0 : into + 1;
    load_offset += segments.step;
    if (load_offset < segments.row_bytes) return;
    load_offset = segments.first;
    ++load_row;
  };
  for (int i = 0; i < kLoadsAhead; ++i) load_next();
  int first = 0;
  for (int row = 0; row < num_rows; ++row) {
    const int end = shared.destinations_end[row];
    for (int64_t offset = segments.first; offset < segments.row_bytes; offset += segments.step) {
      const char* stage = stream.next();
      for (int i = first; i < end; ++i) {
        bulk_store(shared.destinations[i] + offset, stage, segments.bytes(offset));
      }
      end_store_group();
      wait_until_read<kStages - kLoadsAhead>();
      load_next();
    }
    first = end;
  }
}

// Copies the first `num_rows` rows of the warp's list. All lanes write the list, then call this
// function, and may then rewrite the list. Stores may still be under way when it returns.
__device__ inline void stream_copy(Stream& stream, const Team& team, int num_rows,
                                   int64_t row_bytes) {
  const Segments segments(team, row_bytes);
  __syncwarp();  // All lanes have written the list. A warp without a segment does not read it.
  if (segments.first >= row_bytes) return;
  if (lane_index() == 0) copy_listed(stream, segments, num_rows);
  __syncwarp();
}

// `zeros` is kSegmentBytes of zeros in shared memory. Only the first lane of a warp stores.
__device__ inline void stream_zeros(const Team& team, const char* zeros, char* to,
                                    int64_t row_bytes) {
  if (lane_index() != 0) return;
  const Segments segments(team, row_bytes);
  for (int64_t offset = segments.first; offset < row_bytes; offset += segments.step) {
    bulk_store(to + offset, zeros, segments.bytes(offset));
  }
  end_store_group();
}

}  // namespace moe_a2a
