// Sums of rows that stream through shared memory: bulk copies run ahead of the arithmetic, so that few
// warps keep many bytes in flight.
//
// A warp owns kStages stages of kSegmentBytes. Its first lane issues one bulk copy per (segment, source);
// all lanes wait for a stage's mbarrier, add its elements, and hand the stage back. Landed rows were
// written by other processors' ordinary stores: the issuing lane puts a proxy fence between the acquire
// of their flag and the first copy. Every copy that is issued is waited for before the call returns.
#ifndef MOE_A2A_DEVICE_STREAM_CUH_
#define MOE_A2A_DEVICE_STREAM_CUH_

#include "device/sum.cuh"

namespace moe_a2a {

constexpr int kStages = 8;
constexpr int kSegmentBytes = 1024;  // two 16-byte packs per lane
constexpr int kWarpsPerBlock = kThreads / kWarpThreads;

// One row of a sum.
struct Source {
  const char* row;
  float factor;
};

// A warp's part of a block's dynamic shared memory.
struct StreamShared {
  alignas(128) char stages[kStages][kSegmentBytes];
  alignas(8) uint64_t landed[kStages];  // mbarriers
  Source sources[kWarpThreads];
};

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// What a warp remembers between sums: copies issued so far, which give stage and phase.
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

  __device__ void issue(uint32_t copy, const char* from, uint32_t bytes) {
    const uint32_t stage = copy % kStages;
    const uint32_t barrier = shared_address(&shared->landed[stage]);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared_address(shared->stages[stage])),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
  }

  __device__ void wait(uint32_t copy) {
    const uint32_t barrier = shared_address(&shared->landed[copy % kStages]);
    const uint32_t parity = copy / kStages % 2;
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

  // Orders ordinary accesses of this thread before bulk copies that are issued behind a barrier.
  __device__ static void fence_landed_rows() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
  }
  __device__ static void fence_stages() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
};

// Which of a warp's sources are what: `before` landed rows, `own` rows of this rank, landed rows again.
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
  const Source* sources = stream.shared->sources;
  const int warps = team.threads / kWarpThreads;
  const int64_t step = int64_t{warps} * kSegmentBytes;
  const int64_t first = int64_t{team.thread / kWarpThreads} * kSegmentBytes;
  const auto segment_bytes = [&](int64_t offset) {
    return static_cast<uint32_t>(min(row_bytes - offset, int64_t{kSegmentBytes}));
  };

  // The copy that is issued next: its segment and its source.
  int64_t ahead = first;
  int ahead_source = 0;
  uint32_t issued = stream.count;
  const auto issue_next = [&] {
    if (ahead >= row_bytes || counts.total == 0) return;
    if (lane_index() == 0) {
      stream.issue(issued, sources[ahead_source].row + ahead, segment_bytes(ahead));
    }
    ++issued;
    if (++ahead_source == counts.total) {
      ahead_source = 0;
      ahead += step;
    }
  };
  for (int stage = 0; stage < kStages; ++stage) issue_next();

  uint32_t consumed = stream.count;
  for (int64_t offset = first; offset < row_bytes; offset += step) {
    float sum[kPacks][kCount] = {};
    float own[kPacks][kCount] = {};
    for (int source = 0; source < counts.total; ++source) {
      const bool is_own = source >= counts.before && source < counts.before + counts.own;
      const float factor = sources[source].factor;
      stream.wait(consumed);
      const char* stage = stream.shared->stages[consumed % kStages];
#pragma unroll
      for (int u = 0; u < kPacks; ++u) {
        // Behind the row's end lies what an earlier copy left: added, and never stored.
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
      // The lanes' reads come before the copy that refills the stage.
      Stream::fence_stages();
      __syncwarp();
      ++consumed;
      issue_next();
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
  stream.count = consumed;
}

}  // namespace moe_a2a

#endif  // MOE_A2A_DEVICE_STREAM_CUH_
