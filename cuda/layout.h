// Where everything lies in a workspace slab. Every offset is computed here, once, for host and device;
// Python reads the same functions through the bindings.
//
//   slab  = | Header | ring slot 0 ............ | ring slot 1 ............ |
//   slot  = | zone of source 0 | zone of source 1 | ... |        (one exchange lands here)
//   zone  = | payload array 0: [num_slots, stride] | payload array 1 | ... |
//
// The distance between ring slots is a constant of the reserved address space: a shape never moves a
// slot, so a late reader of one shape is never overwritten by an early writer of another.
#ifndef MOE_A2A_LAYOUT_H_
#define MOE_A2A_LAYOUT_H_

#include <cstdint>

#ifdef __CUDACC__
#define MOE_A2A_HOST_DEVICE __host__ __device__
#else
#define MOE_A2A_HOST_DEVICE
#endif

namespace moe_a2a {

// The emulator of tests/emulation has fewer threads in a block, and fewer flags, so that few tokens share them.
#ifndef MOE_A2A_BLOCK_THREADS
#define MOE_A2A_BLOCK_THREADS 512
#endif
#ifndef MOE_A2A_MAX_CHUNKS
#define MOE_A2A_MAX_CHUNKS 4096
#endif

constexpr int kProtocolVersion = 3;
constexpr int kRingDepth = 2;                   // exchanges that may be under way between two ranks
constexpr int kMaxRanks = 64;                   // in one exchange domain
constexpr int kMaxChunks = MOE_A2A_MAX_CHUNKS;  // flags per (ring slot, source)
constexpr int kMaxTopK = 32;                    // a warp's lanes hold one token's choices
constexpr int kMaxArrays = 16;                  // payload arrays of one exchange
constexpr int kMaxPairs = 8;                    // (rows, weights) pairs of one weighted combine

// A topology has rings, each with a workspace of its own: the even ones for whole exchanges, the odd ones for
// split ones, which may overlap with them. Two, but where ranks are beyond the load/store domain: there
// workspaces do not grow, and every size has its own (jax_moe_a2a/_src/network.py).
enum class Ring : int64_t { kWhole = 0, kSplit = 1 };
constexpr bool is_split(Ring ring) { return static_cast<int64_t>(ring) % 2 == 1; }

// What routed_dispatch takes: every block computes the whole routing, in shared memory.
constexpr int kMaxFusedTokens = 512;     // per rank
constexpr int kMaxFusedChoices = 16384;  // of all ranks
constexpr int kMaxFusedExperts = 1000;   // per rank: an id of any rank fits into kSignatureBits

// `choices` of all ranks, `local_experts` of one.
constexpr bool fits_routed_dispatch(int64_t num_tokens, int64_t choices, int64_t local_experts) {
  return num_tokens <= kMaxFusedTokens && choices <= kMaxFusedChoices &&
         local_experts <= kMaxFusedExperts;
}

constexpr int kThreads = MOE_A2A_BLOCK_THREADS;  // of a block, except of route
constexpr int kWarpThreads = 32;
constexpr int kMaxTeams = kThreads / kWarpThreads;
constexpr int64_t kVectorBytes = 16;
constexpr int64_t kZoneAlignment = 128;
constexpr int64_t kSlotStride = int64_t{32} << 30;

// A flag is `epoch << kSignatureBits | signature & kSignatureMask`.
constexpr int kSignatureBits = 16;
constexpr uint64_t kSignatureMask = (uint64_t{1} << kSignatureBits) - 1;

MOE_A2A_HOST_DEVICE constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
MOE_A2A_HOST_DEVICE constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

static_assert(kMaxRanks <= 64, "a set of ranks is a bit mask of 64 bits");
static_assert(kMaxTopK <= kWarpThreads, "a warp's lanes hold the choices of a token");
// Teams are a power of two of whole warps. Those of several warps have a named barrier each, beside the block's barrier 0;
// a block has 16 barriers.
static_assert(kThreads % kWarpThreads == 0 && (kMaxTeams & (kMaxTeams - 1)) == 0);
static_assert(1 + kMaxTeams / 2 <= 16);
static_assert(kZoneAlignment % kVectorBytes == 0);

// What a source raises at a destination beside the flags of its chunks: who speaks, and about what.
struct Head {
  uint64_t signature;
  uint64_t run;  // which execution of a program; 0 where the call was captured in a CUDA graph
  uint64_t flag;
};

// Words of the own rank. Peers write `poison` only.
struct Control {
  uint64_t next_epoch;  // the epoch the next exchange takes; the last block of a launch advances it
  uint64_t poison;      // not 0: a rank of the domain has failed; sticky
  uint64_t owner;    // RankView::launch of the launch under way; a second one beside it is an error
  uint32_t claimed;  // not 0: a block of this rank has written the error record
  uint32_t admitted;      // blocks of this launch that have started; wraps by itself
  uint32_t arrived;       // blocks of this launch that have finished; wraps by itself
  uint32_t next_send;     // pieces of sending and of receiving handed out in this launch; the
  uint32_t next_receive;  // last block resets both
  uint32_t succeeded;     // the last exchange of this rank was whole
#ifdef MOE_A2A_TEST_HOOKS
  uint32_t mutation;     // which rule of the protocol to break (Mutation), for tests that must fail
  uint32_t delay_phase;  // Phase in which this rank is slow
  uint64_t delay_ns;
  uint32_t depth;  // ring slots in use; 0 for all of them
#endif
};

// How a rank reaches those beyond its load/store domain: by puts of NVSHMEM, from memory in which its rows
// are laid out as they land. Zero where there are none.
struct Network {
  uint64_t beyond;  // a bit for each of those ranks
  char* outgoing;   // | ring slot 0 | ring slot 1 |, each | zone at rank 0 | zone at rank 1 | ... |
  int64_t slot_stride;
  int32_t pe[kMaxRanks];  // NVSHMEM's number of each rank's process
};

struct alignas(128) Header {
  Control control;
  alignas(128) Head head[kRingDepth][kMaxRanks];        // by source
  alignas(128) uint64_t credit[kRingDepth][kMaxRanks];  // by destination
  alignas(128) uint64_t chunk[kRingDepth][kMaxRanks][kMaxChunks];
  // Expert ids of routed_dispatch, by source, token and choice: each comes in a flag of its own.
  alignas(128) uint64_t id[kRingDepth][kMaxFusedChoices];
  alignas(128) Network network;
};

constexpr int64_t kHeaderBytes = round_up(sizeof(Header), int64_t{2} << 20);
constexpr int64_t kSlabAddressBytes = kHeaderBytes + kRingDepth * kSlotStride;
static_assert(kHeaderBytes % kZoneAlignment == 0 && kSlotStride % kZoneAlignment == 0);

MOE_A2A_HOST_DEVICE constexpr int64_t slot_offset(int ring_slot,
                                                  int64_t slot_stride = kSlotStride) {
  return kHeaderBytes + ring_slot * slot_stride;
}

// Distance between two rows of one payload array in a zone.
MOE_A2A_HOST_DEVICE constexpr int64_t row_stride(int64_t row_bytes) {
  return round_up(row_bytes, kVectorBytes);
}

// Bytes that one payload array takes in a zone.
MOE_A2A_HOST_DEVICE constexpr int64_t array_bytes(int64_t num_slots, int64_t row_bytes) {
  return round_up(num_slots * row_stride(row_bytes), kZoneAlignment);
}

// Landing slots that share one flag: one, as long as there are flags for all. A flag costs its sender a
// fence, but the fewer slots are under way unannounced, the less is left to do after the last flag.
MOE_A2A_HOST_DEVICE constexpr int64_t slots_per_chunk(int64_t num_slots) {
  return num_slots > kMaxChunks ? ceil_div(num_slots, kMaxChunks) : 1;
}
MOE_A2A_HOST_DEVICE constexpr int64_t num_chunks_of(int64_t num_slots) {
  return ceil_div(num_slots, slots_per_chunk(num_slots));
}
// The pieces of work in which a dispatch that quantizes sends: tokens, each to all of its ranks, while every
// slot has a flag of its own; else chunks of the slots at each rank, this one included.
MOE_A2A_HOST_DEVICE constexpr int64_t num_format_items(int64_t num_tokens, int64_t num_ranks) {
  return slots_per_chunk(num_tokens) == 1 ? num_tokens : num_chunks_of(num_tokens) * num_ranks;
}

}  // namespace moe_a2a

#endif  // MOE_A2A_LAYOUT_H_
