// What a launch receives: one struct per kernel, passed by value.
#ifndef MOE_A2A_PARAMS_H_
#define MOE_A2A_PARAMS_H_

#include <cstdint>

#include "element.h"
#include "layout.h"
#include "status.h"
#include "token_format.h"
#include "tuning.h"

namespace moe_a2a {

#ifdef MOE_A2A_TIMELINE
// Moments of a launch (device/timeline.cuh), in the order in which they usually come.
enum class Mark : int {
  kStart,     // of the kernel
  kEntered,   // the epoch is known
  kPlanned,   // routed dispatch: the own tokens' slots are known
  kCredit,    // the zones are free
  kWritten,   // the last piece has been written to its destination
  kRaised,    // and its flag
  kHeads,     // the call has been announced
  kIds,       // routed dispatch: the ids of all ranks are here
  kRows,      // routed dispatch: the rows of all choices are known
  kAwait,     // the last piece to receive is waited for
  kLanded,    // it has landed
  kReceived,  // and is where it belongs
  kArrive,    // the block has done its work
  kEnd        // of the last block
};
constexpr int kNumMarks = 14;
static_assert(static_cast<int>(Mark::kEnd) + 1 == kNumMarks);
#endif

// A rank's view of its exchange domain.
struct RankView {
  int32_t rank;
  int32_t num_ranks;
  char* slab[kMaxRanks];  // of every rank, own one included
  ErrorRecord* error;     // host memory
  uint64_t timeout_ns;
  uint64_t first_timeout_ns;  // for a peer that was never seen here; no less than timeout_ns
  uint64_t signature;         // of this call; equal on all ranks
  uint64_t run;     // of this execution; equal on all ranks that do not replay a graph, else 0
  uint64_t launch;  // not 0; two launches of this rank that overlap have different ones
  Operation operation;
#ifdef MOE_A2A_TIMELINE
  uint64_t* timeline;  // [blocks, kMaxTeams, kNumMarks]
#endif
};

// An output that must not keep plausible numbers when the exchange fails.
struct FailureFill {
  void* data;
  int64_t bytes;
  uint8_t byte;  // 0xFF or 0x80 (NaN in the array's dtype) for floats, 0 for integers
};

// Lists of fields that host, device and Python read in one order. A list is written once, as MOE_A2A_...(each), and the
// struct and the names follow from it.
#define MOE_A2A_NAME(name) #name,

// Integer arrays of the routing that the exchanges read, in the order of the operands of their calls, which the lowering
// makes (tests/test_layout.py compares).
// clang-format off
#define MOE_A2A_ROUTING_ARRAYS(each)                      \
  each(token_slot)   /* [num_tokens, num_ranks] */        \
  each(slot_token)   /* [num_ranks, num_tokens] */        \
  each(choice_rank)  /* [num_tokens, top_k] */            \
  each(slot_rows)    /* [num_ranks, num_tokens, top_k] */ \
  each(row_slot)     /* [capacity]; kPaddingRow or kTailRow without a token */
// clang-format on

struct RoutingView {
#define MOE_A2A_FIELD(name) const int32_t* name;
  MOE_A2A_ROUTING_ARRAYS(MOE_A2A_FIELD)
#undef MOE_A2A_FIELD
  int32_t num_tokens;  // also the number of landing slots per source
  int32_t top_k;
  int32_t capacity;
};
constexpr const char* kRoutingArrayNames[] = {MOE_A2A_ROUTING_ARRAYS(MOE_A2A_NAME)};

// `row_slot` of rows without a token: within a group, which alignment adds; and after the last group.
constexpr int32_t kPaddingRow = -1;
constexpr int32_t kTailRow = -2;

// The results of route, in their order: the fields of RoutePlan in jax_moe_a2a/_src/plan.py (tests/test_layout.py
// compares). Shapes are those of plan_shapes() there, with a leading batch axis.
// clang-format off
#define MOE_A2A_PLAN_ARRAYS(each) \
  each(token_slot)                \
  each(slot_token)                \
  each(choice_rank)               \
  each(slot_rows)                 \
  each(row_rank)                  \
  each(row_slot)                  \
  each(row_k)                     \
  each(row_token)                 \
  each(group_sizes)               \
  each(num_rows)                  \
  each(num_dropped)
// clang-format on

struct RoutePlan {
#define MOE_A2A_FIELD(name) int32_t* name;
  MOE_A2A_PLAN_ARRAYS(MOE_A2A_FIELD)
#undef MOE_A2A_FIELD
};
#define MOE_A2A_MEMBER(name) &RoutePlan::name,
constexpr int32_t* RoutePlan::* kPlanArrays[] = {MOE_A2A_PLAN_ARRAYS(MOE_A2A_MEMBER)};
#undef MOE_A2A_MEMBER
constexpr const char* kPlanArrayNames[] = {MOE_A2A_PLAN_ARRAYS(MOE_A2A_NAME)};
constexpr int kNumPlanArrays = sizeof(kPlanArrays) / sizeof(*kPlanArrays);
#undef MOE_A2A_NAME

struct RouteParams {
  RankView view;
  const int32_t* ids;   // [batch, num_tokens, top_k]
  const int32_t* rank;  // [1]: this device's rank as the running program sees it
  int32_t batch, num_tokens, top_k, num_experts, capacity, alignment;
  int32_t tokens_per_chunk, chunks;  // per batch element
  // The choice that is dropped last, after which the others follow in a ring; -1: no row can drop, because the
  // capacity holds the worst case.
  int32_t first_choice;
  int32_t parts;  // neighbouring experts that are one group; 1 where rows can drop
  // Scratch between the two launches.
  int32_t* all_ids;  // [num_ranks, batch, num_tokens, top_k], -1 where no expert is named
  int32_t*
      expert_counts;  // [batch, num_ranks, chunks, levels * local_experts + 1]; last: tokens for me
  int32_t* rank_counts;  // [batch, chunks, num_ranks]: own tokens per destination
  RoutePlan plan;

  MOE_A2A_HOST_DEVICE int32_t local_experts() const { return num_experts / view.num_ranks; }
  // Counts of each expert: where rows can drop, of the choices up to each one in the order in which they ask for
  // room; else of all choices.
  MOE_A2A_HOST_DEVICE int32_t levels() const { return first_choice < 0 ? 1 : top_k; }
};

// One payload array that is moved as bytes.
struct MovedArray {
  const char* in;
  char* out;
  int64_t row_bytes;     // of a token's row: what lands in a slot
  int64_t choice_bytes;  // 0: whole rows; else one choice's share, row_bytes = top_k * choice_bytes
  int64_t zone_offset;
  int32_t width;  // bytes per access: 16, 4, 2 or 1
};

// What a weighted dispatch makes of the one array that it moves, row by row, instead of storing it:
// weight * moved, and the inner product of moved and `rows`.
struct Weighting {
  ElementType type;
  const float* weights;  // [capacity]; null: the array's `out` is not wanted
  const char* rows;      // like `out`; null: `dotted` is not wanted
  float* dotted;         // [capacity]
};

MOE_A2A_HOST_DEVICE inline bool is_weighted(const Weighting& w) {
  return w.weights != nullptr || w.rows != nullptr;
}

// How the leaves of a dispatch are quantized where they are sent. Each is two of the arrays that move,
// values and then scales: `in` of the values is the operand, and their `out` are rows of the operand's
// type if they are decoded.
struct Encoding {
  TokenFormat format;
  ElementType type;
  bool decode;
  int32_t num_leaves;
  // NvFp4's, of all tokens or of each. To be decoded by, the latter travel as the last of the arrays.
  float global_scale;
  const float* token_scales;  // [num_tokens]; null
};

// Bytes of a decoded row whose values take `value_bytes`.
MOE_A2A_HOST_DEVICE constexpr int64_t decoded_bytes(const Encoding& encoding, int64_t value_bytes) {
  const int item_bytes = element_bytes(encoding.type);
  return value_bytes * (8 / value_bits(encoding.format)) * item_bytes;
}

// Who does what in a launch: the first `send_blocks` blocks to start send first, in teams of warps; then
// all receive, in other teams.
struct Roles {
  int32_t send_blocks, send_teams, receive_teams;
};

// Rows that a team of a launch zeroes at a time, where they carry no token: few, if there are few.
MOE_A2A_HOST_DEVICE constexpr int rows_per_zero_item(uint32_t capacity, uint32_t blocks) {
  const uint32_t rows = capacity / (Tuning::kZeroItemsPerBlock * blocks);
  return rows < 1 ? 1 : rows > kWarpThreads ? kWarpThreads : static_cast<int>(rows);
}

struct DispatchParams {
  RankView view;
  RoutingView routing;
  int32_t num_arrays;
  Roles roles;
  bool
      leaves_tail;  // rows after the last group are not written; else they are zeroed, like padding
  int64_t zone_bytes;  // of one source
  MovedArray arrays[kMaxArrays];
  FailureFill fills[kMaxArrays];
  Weighting weighting;
};

struct FormatDispatchParams {
  DispatchParams exchange;  // without weighting
  Encoding encoding;
  int32_t num_results;
};

struct RoutedDispatchParams {
  DispatchParams exchange;  // without weighting; of its routing only the numbers
  const int32_t* ids;       // [num_tokens, top_k]
  const int32_t* rank;      // [1]: this device's rank as the running program sees it
  int32_t num_experts, alignment;
  int32_t first_choice;  // as in RouteParams
  RoutePlan plan;
  FailureFill plan_fills[kNumPlanArrays];
  Encoding encoding;    // its format is 0 where tokens travel as they are
  int32_t num_results;  // of the payload
};

// One payload array whose rows are summed.
struct SummedArray {
  const void* rows;  // [capacity, elements]; null where the pairs of CombineParams take its place
  void* out;         // [num_tokens, elements]
  int64_t elements;
  int64_t zone_offset;
  bool vectorized;  // rows and outputs may be read 16 bytes at a time
};

struct CombineParams {
  RankView view;
  RoutingView routing;
  ElementType type;   // of all summed arrays
  bool float32_wire;  // partial sums cross in float32, else in `type`
  bool listed;        // all sums go through a warp's list (device/sum.cuh)
  int32_t num_summed;
  int32_t
      num_moved;  // choice scalars that only move: `in` is [capacity], `out` [num_tokens, top_k]
  Roles roles;
  int64_t zone_bytes;
  SummedArray summed[kMaxArrays];
  MovedArray moved[kMaxArrays];
  FailureFill fills[2 * kMaxArrays];
  // Weighted combine: summed[0] is the sum over pairs of weights * rows.
  int32_t num_pairs;
  int32_t weights_per_row;  // 0 where there are none
  int64_t elements_per_weight;
  const void* pair_rows[kMaxPairs];
  const float* pair_weights[kMaxPairs];  // [capacity, elements / elements_per_weight]
  // Partial sums cross in this format, if not 0: all sums are listed then, and cross neither in float32 nor
  // in `type`. NvFp4's global scale.
  TokenFormat wire_format;
  float wire_global_scale;
};

MOE_A2A_HOST_DEVICE inline const RankView& view_of(const RouteParams& p) { return p.view; }
MOE_A2A_HOST_DEVICE inline const RankView& view_of(const DispatchParams& p) { return p.view; }
MOE_A2A_HOST_DEVICE inline const RankView& view_of(const FormatDispatchParams& p) {
  return p.exchange.view;
}
MOE_A2A_HOST_DEVICE inline const RankView& view_of(const RoutedDispatchParams& p) {
  return p.exchange.view;
}
MOE_A2A_HOST_DEVICE inline const RankView& view_of(const CombineParams& p) { return p.view; }

// What a kernel's parameters may take. Ranks that share a device pass twice as much (device/ranks.cuh), for
// which CUDA 12.1 has room.
static_assert(sizeof(RouteParams) <= 4096 && sizeof(DispatchParams) <= 4096 &&
              sizeof(RoutedDispatchParams) <= 4096 && sizeof(FormatDispatchParams) <= 4096 &&
              sizeof(CombineParams) <= 4096);

}  // namespace moe_a2a

#endif  // MOE_A2A_PARAMS_H_
