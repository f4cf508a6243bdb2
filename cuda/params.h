// The parameters of each kernel: one struct per kernel, passed by value.
#pragma once

#include <cstdint>
#include <type_traits>

#include "element.h"
#include "layout.h"
#include "status.h"
#include "token_format.h"
#include "tuning.h"

namespace moe_a2a {

struct RankView {
  int32_t rank;
  int32_t num_ranks;
  char* slab[kMaxRanks];  // the slabs of all ranks, including this rank
  ErrorRecord* error;     // in host memory
  uint64_t timeout_ns;
  uint64_t first_timeout_ns;  // for a peer that has never sent; at least timeout_ns
  uint64_t signature;         // of this call; equal on all ranks
  uint64_t run;     // id of the execution; equal on all ranks, or 0 (docs/protocol.md, section 9)
  uint64_t launch;  // not 0; two launches that overlap on this rank have different numbers
  Operation operation;
};

// An output, and the byte that a failed exchange writes to all its bytes.
struct FailureFill {
  void* data;
  int64_t bytes;
  uint8_t byte;  // 0xFF or 0x80, which make NaN; 0 for integers
};

#define MOE_A2A_NAME(name) #name,

// The routing arrays that kernels read, in the order of a call's operands (tests/test_layout.py).
// clang-format off
#define MOE_A2A_ROUTING_ARRAYS(each)                      \
  each(token_slot)   /* [num_tokens, num_ranks] */        \
  each(slot_token)   /* [num_ranks, num_tokens] */        \
  each(choice_rank)  /* [num_tokens, top_k] */            \
  each(slot_rows)    /* [num_ranks, num_tokens, top_k] */ \
  each(row_slot)     /* [capacity]; kPaddingRow or kTailRow if the row has no token */
// clang-format on

struct RoutingView {
#define MOE_A2A_FIELD(name) const int32_t* name;
  MOE_A2A_ROUTING_ARRAYS(MOE_A2A_FIELD)
#undef MOE_A2A_FIELD
  int32_t num_tokens;  // also the number of slots per source
  int32_t top_k;
  int32_t capacity;
};
constexpr const char* kRoutingArrayNames[] = {MOE_A2A_ROUTING_ARRAYS(MOE_A2A_NAME)};

// `row_slot` of rows without a token: padding after a group, and rows after the last group.
constexpr int32_t kPaddingRow = -1;
constexpr int32_t kTailRow = -2;

// The results of route, as in jax_moe_a2a/_src/plan/plan.py, but with a leading batch axis.
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
  const int32_t* rank;  // [1]: the rank of this device in the mesh of the running program
  int32_t batch, num_tokens, top_k, num_experts, capacity, alignment;
  int32_t tokens_per_chunk, chunks;  // chunks of each batch element
  bool may_drop;                     // false: all rows always fit
  int32_t parts;                     // consecutive experts that form one group
  int64_t zone_bytes;                // of one source
  // Scratch between the two launches.
  int32_t* all_ids;  // [num_ranks, batch, num_tokens, top_k]; invalid ids are -1
  // [batch, num_ranks, chunks, levels * local_experts + 1]; last entry: tokens for this rank
  int32_t* expert_counts;
  int32_t* rank_counts;  // [batch, chunks, num_ranks]: this rank's tokens per destination
  RoutePlan plan;

  MOE_A2A_HOST_DEVICE int32_t local_experts() const { return num_experts / view.num_ranks; }
  // Returns the number of counts per expert. With drops, count i covers choices 0 to i of tokens.
  MOE_A2A_HOST_DEVICE int32_t levels() const { return may_drop ? top_k : 1; }
};

// A payload array that moves as bytes.
struct MovedArray {
  const char* in;
  char* out;
  int64_t row_bytes;     // of a token, and of its slot
  int64_t choice_bytes;  // of a choice array's entry (row_bytes / top_k); or 0
  int64_t zone_offset;
  int32_t width;  // bytes per load and store: 16, 4, 2 or 1
};

// A weighted dispatch moves one array. It returns each row times a weight, the inner product of
// each row and the same row of `rows`, or both.
struct Weighting {
  ElementType type;
  const float* weights;  // [capacity]; null: no scaled rows
  const char* rows;      // like the array's `out`; null: no inner products
  float* dotted;         // [capacity]: the inner products

  MOE_A2A_HOST_DEVICE bool is_used() const { return weights != nullptr || rows != nullptr; }
};

// How the source encodes the leaves of a dispatch. Each leaf has two MovedArrays: values, then
// scales. The values' `in` is the leaf. If a call returns only decoded rows, both `out` are null.
struct Encoding {
  TokenFormat format;
  ElementType type;
  bool decode;
  int32_t num_leaves;
  char* decoded[kMaxArrays / 2];  // the decoded rows of each leaf if the destination decodes
  // NvFp4: one scale, or one per token. With `decode`, token scales travel as the last array.
  float global_scale;
  const float* token_scales;  // [num_tokens], or null
};

// Returns the bytes of a decoded row whose values have `value_bytes`.
MOE_A2A_HOST_DEVICE constexpr int64_t decoded_bytes(const Encoding& encoding, int64_t value_bytes) {
  const int item_bytes = element_bytes(encoding.type);
  return value_bytes * (8 / value_bits(encoding.format)) * item_bytes;
}

// The first `send_blocks` blocks that start are senders, with `send_teams` teams each. Then all
// blocks receive, with `receive_teams` teams each.
struct Roles {
  int32_t send_blocks, send_teams, receive_teams;
};

// Returns the number of rows of a work item that zeroes rows without a token.
MOE_A2A_HOST_DEVICE constexpr int rows_per_zero_item(uint32_t capacity, uint32_t blocks) {
  const uint32_t rows = capacity / (Tuning::kZeroItemsPerBlock * blocks);
  return rows < 1 ? 1 : rows > kWarpThreads ? kWarpThreads : static_cast<int>(rows);
}

struct DispatchParams {
  RankView view;
  RoutingView routing;
  int32_t num_arrays;
  Roles roles;
  bool leaves_tail;    // true: rows after the last group are not written; false: they become zeros
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
  DispatchParams exchange;  // without weighting; its routing has only sizes
  const int32_t* ids;       // [num_tokens, top_k]
  const int32_t* rank;      // as in RouteParams
  int32_t num_experts, alignment;
  bool may_drop;  // as in RouteParams
  RoutePlan plan;
  FailureFill plan_fills[kNumPlanArrays];
  Encoding encoding;    // format kNoFormat: tokens are not encoded
  int32_t num_results;  // payload results
};

// The wire dtype of partial sums: the dtype of the rows, or float32.
enum class WireType : uint8_t { kOfRows, kFloat32 };

struct SummedArray {
  const void* rows;    // [capacity, elements]; null in a weighted combine, which has pairs
  void* out;           // [num_tokens, elements]
  const void* addend;  // [num_tokens, elements], added before the sums are rounded; or null
  int64_t elements;
  int64_t zone_offset;
  bool vectorized;  // rows of all its arrays have 16-byte alignment and multiples of 16 bytes
};

struct CombineParams {
  RankView view;
  RoutingView routing;
  ElementType type;  // of all summed arrays
  WireType wire;     // of partial sums without a format
  bool listed;       // all rows are summed through a SourceList
  int32_t num_summed;
  int32_t num_moved;  // number of choice arrays: `in` is [capacity], `out` is [num_tokens, top_k]
  Roles roles;
  int64_t zone_bytes;
  SummedArray summed[kMaxArrays];
  MovedArray moved[kMaxArrays];
  FailureFill fills[2 * kMaxArrays];
  // In a weighted combine, summed[0] is the sum of weights * rows over all pairs.
  int32_t num_pairs;
  int32_t weights_per_row;  // 0 without pairs
  int64_t elements_per_weight;
  const void* pair_rows[kMaxPairs];
  const float* pair_weights[kMaxPairs];  // [capacity, elements / elements_per_weight]
  TokenFormat wire_format;  // of partial sums; with a format, `listed` is true and `wire` kOfRows
  float wire_global_scale;  // of NvFp4
};

// Returns the member of a kernel's parameters that describes its exchange.
template <typename Params>
MOE_A2A_HOST_DEVICE auto& exchange_of(Params& p) {
  using P = std::remove_const_t<Params>;
  if constexpr (std::is_same_v<P, FormatDispatchParams> ||
                std::is_same_v<P, RoutedDispatchParams>) {
    return p.exchange;
  } else {
    return p;
  }
}
template <typename Params>
MOE_A2A_HOST_DEVICE const RankView& view_of(const Params& p) {
  return exchange_of(p).view;
}

// Before CUDA 12.1, a kernel's parameters have at most 4096 bytes. A launch for ranks that share a
// device needs CUDA 12.1 or newer, because it passes two structs (device/ranks.cuh).
static_assert(sizeof(RouteParams) <= 4096 && sizeof(DispatchParams) <= 4096 &&
              sizeof(RoutedDispatchParams) <= 4096 && sizeof(FormatDispatchParams) <= 4096 &&
              sizeof(CombineParams) <= 4096);

}  // namespace moe_a2a
