// The layout of a slab. Host, device and Python compute every offset with these functions.
//
//   slab       = | Header | ring half 0 ............ | ring half 1 ............ |
//   ring half  = | zone of source 0 | zone of source 1 | ... |        (one exchange lands here)
//   zone       = | payload array 0: [num_slots, stride] | payload array 1 | ... |
//
// The distance between ring halves does not depend on shapes. If it did, a launch of another shape
// could overwrite data of the previous launch that a slow rank still reads.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define MOE_A2A_HOST_DEVICE __host__ __device__
#else
#define MOE_A2A_HOST_DEVICE
#endif

namespace moe_a2a {

// The emulator (tests/emulation) sets smaller numbers, so that even a few tokens share flags.
#ifndef MOE_A2A_BLOCK_THREADS
#define MOE_A2A_BLOCK_THREADS 512
#endif
#ifndef MOE_A2A_MAX_CHUNKS
#define MOE_A2A_MAX_CHUNKS 4096
#endif

constexpr int kProtocolVersion = 3;
constexpr int kRingDepth = 2;                   // exchanges that may run at once between ranks
constexpr int kMaxRanks = 128;                  // in a domain
constexpr int kMaxChunks = MOE_A2A_MAX_CHUNKS;  // flags per (ring half, source)
constexpr int kMaxTopK = 32;                    // one choice per lane of a warp
constexpr int kMaxArrays = 16;                  // payload arrays of one exchange
constexpr int kMaxPairs = 8;                    // (rows, weights) pairs of one weighted combine

// Whole and split exchanges have separate workspaces, because they may run at the same time.
enum class WorkspaceKind : int64_t { kWhole = 0, kSplit = 1 };
constexpr bool is_split(WorkspaceKind kind) { return kind == WorkspaceKind::kSplit; }

// Limits of routed_dispatch, whose blocks each compute the complete plan in shared memory.
constexpr int kMaxFusedTokens = 512;     // per rank
constexpr int kMaxFusedChoices = 16384;  // of all ranks together
constexpr int kMaxFusedExperts = 1000;   // per rank
constexpr int kMaxFusedIds = 0xFFFF;     // experts of all ranks; an id has kSignatureBits

constexpr bool fits_routed_dispatch(int64_t num_ranks, int64_t num_tokens, int64_t top_k,
                                    int64_t num_experts) {
  return num_tokens <= kMaxFusedTokens && num_ranks * num_tokens * top_k <= kMaxFusedChoices &&
         num_experts <= kMaxFusedIds && num_experts / num_ranks <= kMaxFusedExperts;
}

constexpr int kThreads = MOE_A2A_BLOCK_THREADS;  // threads of a block, except in route
constexpr int kWarpThreads = 32;
constexpr int kMaxTeams = kThreads / kWarpThreads;
constexpr int64_t kVectorBytes = 16;
constexpr int64_t kZoneAlignment = 128;
constexpr int64_t kHalfStride = int64_t{32} << 30;  // distance of the ring halves

// A flag is `epoch << kSignatureBits | signature & kSignatureMask`.
constexpr int kSignatureBits = 16;
constexpr uint64_t kSignatureMask = (uint64_t{1} << kSignatureBits) - 1;

MOE_A2A_HOST_DEVICE constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
MOE_A2A_HOST_DEVICE constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

static_assert(kMaxTopK <= kWarpThreads, "a warp's lanes hold the choices of a token");
// Teams of several warps need named barriers. A block has 16; __syncthreads() is barrier 0.
static_assert(kThreads % kWarpThreads == 0 && (kMaxTeams & (kMaxTeams - 1)) == 0);
static_assert(1 + kMaxTeams / 2 <= 16);
static_assert(kZoneAlignment % kVectorBytes == 0);

// A source announces a call to a destination by writing this struct there.
struct Head {
  uint64_t signature;
  uint64_t run;  // RankView::run
  uint64_t flag;
};

// The state of a rank's launches. Peers write only `poison`.
struct Control {
  uint64_t next_epoch;    // epoch of the next exchange; a launch's last block adds 1
  uint64_t poison;        // not 0: a rank of the domain has failed; set until the workspace closes
  uint64_t owner;         // RankView::launch of the running launch; two at once are an error
  uint32_t claimed;       // not 0: a block of this rank has begun to write the error record
  uint32_t admitted;      // blocks of this launch that have started; the last one sets it to 0
  uint32_t arrived;       // blocks of this launch that have finished; the last one sets it to 0
  uint32_t next_send;     // the next send item for a team; reset at the end of a launch
  uint32_t next_receive;  // the next receive item for a team; reset at the end of a launch
#ifdef MOE_A2A_TEST_HOOKS
  uint32_t mutation;     // the fault that a test has requested (Mutation)
  uint32_t delay_phase;  // the Phase that a test delays
  uint64_t delay_ns;
  uint32_t depth;  // ring halves in use; 0: all
#endif
};

struct alignas(128) Header {
  Control control;
  alignas(128) Head head[kRingDepth][kMaxRanks];        // by source
  alignas(128) uint64_t credit[kRingDepth][kMaxRanks];  // by destination
  alignas(128) uint64_t chunk[kRingDepth][kMaxRanks][kMaxChunks];
  // Expert ids of routed_dispatch, by source, token and choice: `epoch << kSignatureBits | id`.
  alignas(128) uint64_t id[kRingDepth][kMaxFusedChoices];
};

constexpr int64_t kHeaderBytes = round_up(sizeof(Header), int64_t{2} << 20);
constexpr int64_t kSlabAddressBytes = kHeaderBytes + kRingDepth * kHalfStride;
static_assert(kHeaderBytes % kZoneAlignment == 0 && kHalfStride % kZoneAlignment == 0);

MOE_A2A_HOST_DEVICE constexpr int64_t half_offset(int ring_half) {
  return kHeaderBytes + ring_half * kHalfStride;
}

// Returns the distance in bytes between rows of a payload array in a zone.
MOE_A2A_HOST_DEVICE constexpr int64_t row_stride(int64_t row_bytes) {
  return round_up(row_bytes, kVectorBytes);
}

MOE_A2A_HOST_DEVICE constexpr int64_t array_bytes(int64_t num_slots, int64_t row_bytes) {
  return round_up(num_slots * row_stride(row_bytes), kZoneAlignment);
}

// Returns how many slots share a flag: few, so that little work is left after the last flag.
MOE_A2A_HOST_DEVICE constexpr int64_t slots_per_chunk(int64_t num_slots) {
  return num_slots > kMaxChunks ? ceil_div(num_slots, kMaxChunks) : 1;
}
MOE_A2A_HOST_DEVICE constexpr int64_t num_chunks_of(int64_t num_slots) {
  return ceil_div(num_slots, slots_per_chunk(num_slots));
}
// Returns the number of send items of a format dispatch. If each slot has its own flag, an item is
// a token for all its ranks. Otherwise an item is a chunk of the slots at one rank.
MOE_A2A_HOST_DEVICE constexpr int64_t num_format_items(int64_t num_tokens, int64_t num_ranks) {
  return slots_per_chunk(num_tokens) == 1 ? num_tokens : num_chunks_of(num_tokens) * num_ranks;
}

}  // namespace moe_a2a
