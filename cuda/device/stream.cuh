// Rows that stream through shared memory by bulk copies, which keep many bytes in flight from few warps.
//
// A warp owns kStages stages of kSegmentBytes. Its first lane issues the loads, one per segment of a row,
// and waits for them by mbarriers. stream_copy() stores each stage to any number of destinations, by bulk
// copies too, so that a row is read once; a stage is loaded again when its stores have read it.
// stream_sum() adds the stages of several rows up, in registers of all lanes.
//
// Bulk copies go through a proxy of their own. Fences stand where ordinary accesses meet them: between
// the acquire of a flag or credit and the first copy behind it, and between ordinary reads of a stage
// and its next load. Stores are waited for in full before a flag says that they have landed.
#ifndef MOE_A2A_DEVICE_STREAM_CUH_
#define MOE_A2A_DEVICE_STREAM_CUH_

#include "device/sum.cuh"

namespace moe_a2a {

constexpr int kStages = 12;
constexpr int kSegmentBytes = 1024;  // two 16-byte packs per lane
constexpr int kWarpsPerBlock = kThreads / kWarpThreads;

// A warp's part of a block's dynamic shared memory.
struct StreamShared {
  alignas(128) char stages[kStages][kSegmentBytes];
  alignas(8) uint64_t landed[kStages];  // mbarriers
  // Of the token that the warp works on: what a sum reads, or what a copy writes.
  const char* sources[kWarpThreads];
  float factors[kWarpThreads];
  char* destinations[kWarpThreads];
};

constexpr int kStreamSharedBytes = kWarpsPerBlock * sizeof(StreamShared);

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// What a warp remembers between rows: loads consumed so far, which give stage and phase.
struct Stream {
  StreamShared* shared;
  uint32_t count = 0;

  __device__ explicit Stream(char* dynamic_shared)
      : shared(reinterpret_cast<StreamShared*>(dynamic_shared) + threadIdx.x / kWarpThreads) {
    if (lane_index() != 0) return;
    for (uint64_t& barrier : shared->landed) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&barrier))
                   : "memory");
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }

  // Loads a segment into the stage of load `index`. First lane.
  __device__ void load(uint32_t index, const char* from, uint32_t bytes) {
    const uint32_t stage = index % kStages;
    const uint32_t barrier = shared_address(&shared->landed[stage]);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared_address(shared->stages[stage])),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
  }

  __device__ void wait(uint32_t index) {
    const uint32_t barrier = shared_address(&shared->landed[index % kStages]);
    const uint32_t parity = index / kStages % 2;
    uint32_t done = 0;
    while (!done) {
      asm volatile(
          "{\n\t.reg .pred p;\n\t"
          "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
          "selp.u32 %0, 1, 0, p;\n\t}"
          : "=r"(done)
          : "r"(barrier), "r"(parity)
          : "memory");
    }
  }
};

// Orders this thread's ordinary accesses, and what it has acquired, before bulk copies issued later.
__device__ inline void fence_global_for_bulk() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
__device__ inline void fence_shared_for_bulk() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Bulk stores of one thread: issued, gathered into groups, waited for by the group.
__device__ inline void bulk_store(char* to, const char* shared_from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(shared_from)), "r"(bytes)
               : "memory");
}
__device__ inline void end_store_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until all but the last kPending groups have read their shared memory.
template <int kPending>
__device__ inline void wait_until_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Until all groups are complete and visible to this thread.
__device__ inline void wait_until_stored() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// The segments of a row that a warp of a team looks after.
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

// Copies a row to the warp's first `num_destinations` `shared->destinations`, which its first lane sees.
// The stores may be under way when it returns. The first lane works; the others go past.
__device__ inline void stream_copy(Stream& stream, const Team& team, const char* from,
                                   int64_t row_bytes, int num_destinations) {
  // Loads run kAhead segments ahead of the stores; as many groups of stores may still be reading.
  // Together they take all stages, so a stage that is loaded has been read by its last stores.
  constexpr int kAhead = kStages / 2;
  if (lane_index() != 0) return;
  const Segments segments(team, row_bytes);
  int64_t ahead = segments.first;
  uint32_t next_load = stream.count;
  const auto load_next = [&] {
    if (ahead >= row_bytes) return;
    stream.load(next_load++, from + ahead, segments.bytes(ahead));
    ahead += segments.step;
  };
  for (int i = 0; i < kAhead; ++i) load_next();
  for (int64_t offset = segments.first; offset < row_bytes; offset += segments.step) {
    stream.wait(stream.count);
    const char* stage = stream.shared->stages[stream.count++ % kStages];
    for (int i = 0; i < num_destinations; ++i) {
      bulk_store(stream.shared->destinations[i] + offset, stage, segments.bytes(offset));
    }
    end_store_group();
    wait_until_read<kAhead>();
    load_next();
  }
}

// Zeroes a row from `zeros`, kSegmentBytes of shared memory. The first lane works, as above.
__device__ inline void stream_zeros(const Team& team, const char* zeros, char* to,
                                    int64_t row_bytes) {
  if (lane_index() != 0) return;
  const Segments segments(team, row_bytes);
  for (int64_t offset = segments.first; offset < row_bytes; offset += segments.step) {
    bulk_store(to + offset, zeros, segments.bytes(offset));
  }
  end_store_group();
}

// Which of a warp's listed rows are what: `before` landed rows, `own` rows of this rank, landed again.
struct SourceCounts {
  int before, own, total;
};

// out = sum of landed rows + round_to_T(sum of factor * own rows) + sum of landed rows, in the order of
// the warp's `shared->sources`, which all lanes see. The warps of a team share out the row's segments.
template <typename T>
__device__ __forceinline__ void stream_sum(Stream& stream, const Team& team,
                                           const SourceCounts& counts, int64_t row_bytes,
                                           char* out) {
  constexpr int kCount = kVectorBytes / sizeof(T);
  constexpr int kPacks = kSegmentBytes / (kWarpThreads * kVectorBytes);
  const StreamShared& shared = *stream.shared;
  const Segments segments(team, row_bytes);

  // What is loaded next: segment by segment, all sources of each.
  int64_t ahead = segments.first;
  int ahead_source = 0;
  uint32_t next_load = stream.count;
  const auto load_next = [&] {
    if (ahead >= row_bytes || counts.total == 0) return;
    if (lane_index() == 0) {
      stream.load(next_load, shared.sources[ahead_source] + ahead, segments.bytes(ahead));
    }
    ++next_load;
    if (++ahead_source == counts.total) {
      ahead_source = 0;
      ahead += segments.step;
    }
  };
  for (int stage = 0; stage < kStages; ++stage) load_next();

  for (int64_t offset = segments.first; offset < row_bytes; offset += segments.step) {
    float sum[kPacks][kCount] = {};
    float own[kPacks][kCount] = {};
    for (int source = 0; source < counts.total; ++source) {
      const bool is_own = source >= counts.before && source < counts.before + counts.own;
      const float factor = shared.factors[source];
      stream.wait(stream.count);
      const char* stage = shared.stages[stream.count++ % kStages];
#pragma unroll
      for (int u = 0; u < kPacks; ++u) {
        // Behind the row's end lies what an earlier load left: added, and never stored.
        const auto pack = *reinterpret_cast<const Pack<T, kCount>*>(
            stage + (u * kWarpThreads + lane_index()) * kVectorBytes);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          if (is_own) {
            own[u][i] += factor * to_float(pack.v[i]);
          } else {
            sum[u][i] += to_float(pack.v[i]);
          }
        }
      }
      fence_shared_for_bulk();  // The lanes' reads come before the load that refills the stage.
      __syncwarp();
      load_next();
      if (source == counts.before + counts.own - 1 && counts.own > 0) {
#pragma unroll
        for (int u = 0; u < kPacks; ++u) {
#pragma unroll
          for (int i = 0; i < kCount; ++i) sum[u][i] += to_float(from_float<T>(own[u][i]));
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kPacks; ++u) {
      const int64_t at = offset + (u * kWarpThreads + lane_index()) * kVectorBytes;
      if (at >= row_bytes) continue;
      Pack<T, kCount> pack;
#pragma unroll
      for (int i = 0; i < kCount; ++i) pack.v[i] = from_float<T>(sum[u][i]);
      store_pack(reinterpret_cast<T*>(out + at), pack);
    }
  }
}

}  // namespace moe_a2a

#endif  // MOE_A2A_DEVICE_STREAM_CUH_
