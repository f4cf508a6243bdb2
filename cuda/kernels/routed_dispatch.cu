// routed_dispatch: route and dispatch in one launch, for few tokens. With few tokens, launches and
// waits for other ranks take most of the time.
//
// Holds afterwards: the bits that route and then dispatch (or format_dispatch) would write.
//
// Layout: as in route, dispatch and format_dispatch, with one slot in each chunk. Ids land in the
// header. A 64-bit word has an id and its epoch. If the epoch is current, the id has arrived.
//
// A sender needs only this rank's ids, which determine the slots of its tokens. While rows travel,
// every block computes the complete plan in shared memory from the ids of all ranks (plan_rows).
// Then the block waits for rows, token by token.
//
// Waits: as in dispatch. Receivers also wait for the ids of every rank. The first block to start
// sends the ids before any rows. A sender receives only if more items remain than the other blocks
// have teams. With a format, receivers also wait for this rank's tokens, which land in a zone.
//
// Why ordinary accesses, even for encoded tokens: with few rows, a bulk copy takes longer.
//
// Launch: any number of blocks.
#include "device/copy.cuh"
#include "device/encode.cuh"
#include "device/exchange.cuh"
#include "device/plan.cuh"
#include "device/scan.cuh"
#include "kernels/launch.h"
#include "kernels/table.h"

namespace moe_a2a {
namespace {

constexpr int kGroupTokens = kWarpThreads;  // tokens of one source in one ballot
constexpr int kMaxGroups = kMaxFusedTokens / kGroupTokens;
static_assert(kMaxFusedTokens % kGroupTokens == 0);
constexpr int kMaskBits = 64;               // ranks that have a bit in a mask
constexpr int kLoads = Tuning::kPlanLoads;  // loads that a thread has in flight
static_assert(kMaxTeams % kLoads == 0);
// An id travels in the signature bits of a flag. If all these bits are set, the id is -1.
static_assert(kMaxFusedIds <= kSignatureMask);

// The wire form of leaves: unchanged, or numbers of type T in a token format.
struct Unencoded {
  static constexpr bool kEncodes = false;
};
template <TokenFormat F, typename T>
struct InFormat {
  static constexpr bool kEncodes = true;
  static constexpr TokenFormat kFormat = F;
  using Type = T;
};

// The set of a source's tokens that go to one rank, with a bit for each token.
struct TokenSet {
  uint32_t bits[kMaxGroups];

  __device__ bool has(int token) const {
    return bits[token / kGroupTokens] >> token % kGroupTokens & 1;
  }
  __device__ int slot(int token) const {
    return before(token / kGroupTokens) +
           __popc(bits[token / kGroupTokens] & ((1u << token % kGroupTokens) - 1));
  }
  __device__ int before(int group) const {
    int count = 0;
    for (int g = 0; g < group; ++g) count += __popc(bits[g]);
    return count;
  }
};

// The shared memory whose size does not depend on the call.
struct Shared {
  BlockState block;
  TokenSet sent[kMaxRanks];    // this rank's tokens, by destination
  TokenSet landed[kMaxRanks];  // tokens of other ranks that land here, by source
  int32_t warp_sums[kMaxTeams];
  int32_t end_of_groups;  // the first row after the last group
  int32_t all_rows;       // rows of this rank before drops
  int32_t padded_rows;    // rows of a trial in drop_rows()
};

// A warp's shared memory: a segment that it encodes or decodes, and the segment's destinations.
struct Workbench {
  alignas(16) char segment[kMadeBytes];
  char* destinations[kWarpThreads];
  int slots[kWarpThreads];
};

struct Tables {
  int32_t* first_row;  // [local_experts]
  int32_t* rows;       // [local_experts]: rows with a token
  int32_t* next_row;   // [kMaxTeams, local_experts], by warp
  int32_t* row;        // [num_ranks, num_tokens, top_k]: ids, then rows (-1: not here, -2: dropped)
};

__device__ int local_experts(const RoutedDispatchParams& p) {
  return p.num_experts / p.exchange.view.num_ranks;
}

__device__ int choices_per_source(const RoutedDispatchParams& p) {
  return p.exchange.routing.num_tokens * p.exchange.routing.top_k;
}

// Reads the ids of the tokens of `num_sources` sources from `first_source` on. Warps take groups of
// 32 tokens. For each group, lane l calls store(source, group, named) for token group * 32 + l.
// `named` is the bitwise or of name(id) of the token's ids; name(-1) is 0.
template <typename Name, typename Store>
__device__ void find_tokens(const RoutedDispatchParams& p, const Tables& t, int first_source,
                            int num_sources, Name&& name, Store&& store) {
  const int num_ranks = p.exchange.view.num_ranks;
  const int num_tokens = p.exchange.routing.num_tokens;
  const int top_k = p.exchange.routing.top_k;
  const int groups = ceil_div(num_tokens, kGroupTokens);
  for (int i = threadIdx.x / kWarpThreads; i < num_sources * groups; i += kMaxTeams) {
    int source = first_source + i / groups;
    if (source >= num_ranks) source -= num_ranks;
    const int group = i % groups;
    const int token = group * kGroupTokens + lane_index();
    const int32_t* ids = t.row + source * choices_per_source(p) + token * top_k;
    auto named = name(-1);
#pragma unroll 8
    for (int k = 0; k < top_k; ++k) named |= name(token < num_tokens ? ids[k] : -1);
    store(source, group, named);
  }
}

// While the first warp runs enter(), the last warp reads the credits. The epoch is not known yet,
// so each lane reads the credit of one peer for one ring half.
constexpr int kSeenPeers = kWarpThreads / kRingDepth;
static_assert(kWarpThreads % kRingDepth == 0);
constexpr int kCreditWarp = kMaxTeams - 1;
static_assert(kMaxTeams > 2, "the warps between the first and the last load ids");

__device__ bool is_credit_warp() { return threadIdx.x / kWarpThreads == kCreditWarp; }

__device__ uint64_t see_credit(const RankView& view) {
  const int peer = lane_index() % kSeenPeers;
  if (!is_credit_warp() || peer >= view.num_ranks) return 0;
  return load_acquire_sys(&header(view, view.rank)->credit[lane_index() / kSeenPeers][peer]);
}

// Returns true if see_credit() has seen all credits. The last warp calls it.
__device__ bool has_credits(const RankView& view, uint64_t epoch, uint64_t seen) {
  const int peer = lane_index() % kSeenPeers;
  const bool matters = lane_index() / kSeenPeers == ring_half(view, epoch) &&
                       peer < view.num_ranks && peer != view.rank;
  const bool is_there = !matters || epoch <= ring_depth(view) || seen >= epoch - ring_depth(view);
  return __all_sync(kAllLanes, is_there) && view.num_ranks <= kSeenPeers;
}

// Computes the slots of this rank's tokens at every rank. The last warp, which has the least to
// plan, waits for credits that see_credit() has not seen. Returns false if a credit did not arrive.
__device__ bool plan_sends(const RoutedDispatchParams& p, uint64_t epoch, uint64_t seen_credit,
                           Shared& shared, const Tables& t) {
  const RankView& view = p.exchange.view;
  const Team warp(kMaxTeams, shared.block.mailboxes);
  const bool is_free = !is_credit_warp() || has_credits(view, epoch, seen_credit) ||
                       wait_for_credits(view, warp, epoch);
  const float ranks_per_expert = __frcp_rn(static_cast<float>(local_experts(p)));
  // A mask has 64 ranks, so with more ranks, the warps read the ids again.
  for (int first = 0; first < view.num_ranks; first += kMaskBits) {
    const auto rank_of = [&](int id) -> uint64_t {
      // id / local_experts: for 16-bit ids, 0.5 is far larger than the rounding errors
      const int rank = static_cast<int>((id + 0.5f) * ranks_per_expert) - first;
      return id < 0 || rank < 0 || rank >= kMaskBits ? 0 : uint64_t{1} << rank;
    };
    const int count = min(kMaskBits, view.num_ranks - first);
    find_tokens(p, t, view.rank, 1, rank_of, [&](int, int group, uint64_t ranks) {
      for (int rank = 0; rank < count; ++rank) {
        const uint32_t tokens = __ballot_sync(kAllLanes, ranks >> rank & 1);
        if (lane_index() == 0) shared.sent[first + rank].bits[group] = tokens;
      }
    });
  }
  return __syncthreads_and(is_free);
}

// Copies this rank's ids; invalid ids become -1. The first and the last warp do other work.
__device__ void load_own_ids(const RoutedDispatchParams& p, int32_t* own_ids) {
  if (threadIdx.x < kWarpThreads || is_credit_warp()) return;
#pragma unroll 4
  for (int i = threadIdx.x - kWarpThreads; i < choices_per_source(p);
       i += kThreads - 2 * kWarpThreads) {
    const int id = p.ids[i];
    own_ids[i] = id >= 0 && id < p.num_experts ? id : -1;
  }
}

// Returns the address at which the ids of `source` land at a rank.
__device__ uint64_t* landed_ids(const RoutedDispatchParams& p, int at_rank, uint64_t epoch,
                                int source) {
  const RankView& view = p.exchange.view;
  return header(view, at_rank)->id[ring_half(view, epoch)] + source * choices_per_source(p);
}

// Sends this rank's ids to every peer. All threads of the block call it.
__device__ void send_ids(const RoutedDispatchParams& p, uint64_t epoch, const int32_t* own_ids) {
  const RankView& view = p.exchange.view;
  for (int i = threadIdx.x; i < choices_per_source(p); i += kThreads) {
    const uint64_t word = make_flag(epoch, static_cast<uint32_t>(own_ids[i]));
    for (int peer = 0; peer < view.num_ranks; ++peer) {
      if (peer != view.rank) store_relaxed_sys(landed_ids(p, peer, epoch, view.rank) + i, word);
    }
  }
}

template <typename Form>
__device__ void raise_token(const RankView& view, const Team& team, uint64_t epoch,
                            const Shared& shared, int token) {
  team.sync();
  for (int rank = team.thread(); rank < view.num_ranks; rank += team.threads()) {
    if (!Form::kEncodes && rank == view.rank) continue;  // The token does not land in a zone.
    const TokenSet& sent = shared.sent[rank];
    if (sent.has(token)) store_chunk_flag(view, epoch, rank, sent.slot(token));
  }
}

// Encodes a token's leaves and stores them at all its ranks, at this rank last.
template <typename Form>
__device__ void send_leaves(const RoutedDispatchParams& p, const Team& team, uint64_t epoch,
                            const Shared& shared, Workbench& bench, int token) {
  const RankView& view = p.exchange.view;
  int count = 0;
  for (int base = 1; base <= view.num_ranks; base += kWarpThreads) {
    const int i = base + lane_index();
    const int sum = view.rank + i;
    const int rank = sum < view.num_ranks ? sum : sum - view.num_ranks;
    const bool lands = i <= view.num_ranks && shared.sent[rank].has(token);
    const uint32_t all = __ballot_sync(kAllLanes, lands);
    if (lands) {
      const int place = count + __popc(all & ((1u << lane_index()) - 1));
      bench.destinations[place] = zone(view, rank, epoch, view.rank, p.exchange.zone_bytes);
      bench.slots[place] = shared.sent[rank].slot(token);
    }
    count += __popc(all);
  }
  if (count == 0) return;
  __syncwarp();
  PlainSegments segments(bench.segment);
  encode_leaves<Form::kFormat, typename Form::Type>(
      p.exchange, p.encoding, team, {bench.destinations, bench.slots, count}, segments, token);
}

// Sends one token to all its ranks. Loads the token's data once.
template <typename Form>
__device__ void send_token(const RoutedDispatchParams& params, const Team& team, uint64_t epoch,
                           const Shared& shared, Workbench* bench, int token) {
  const DispatchParams& p = params.exchange;
  const RankView& view = p.view;
  if (breaks(view, kFlagBeforeRows)) raise_token<Form>(view, team, epoch, shared, token);
  int a = 0;
  if constexpr (Form::kEncodes) {
    send_leaves<Form>(params, team, epoch, shared, *bench, token);
    a = 2 * params.encoding.num_leaves;
  }
  for (; a < p.num_arrays; ++a) {
    const MovedArray& array = p.arrays[a];
    with_width(array.width, [&](auto word) {
      using W = typename decltype(word)::type;
      read_row<W>(team, array.in + token * array.row_bytes, array.row_bytes, [&](auto&& write) {
        // Begin with the next rank, so that ranks do not all send to the same rank at first.
        for (int i = 1; i < view.num_ranks + Form::kEncodes; ++i) {
          const int sum = view.rank + i;
          const int rank = sum < view.num_ranks ? sum : sum - view.num_ranks;
          const TokenSet& sent = shared.sent[rank];
          if (!sent.has(token)) continue;
          char* to = zone(view, rank, epoch, view.rank, p.zone_bytes) + array.zone_offset +
                     sent.slot(token) * row_stride(array.row_bytes);
          write(reinterpret_cast<W*>(to));
        }
      });
    });
  }
  raise_token<Form>(view, team, epoch, shared, token);
}

// Gathers the ids of all ranks in `row`. Returns false if some did not arrive. All threads call it.
__device__ bool receive_ids(const RoutedDispatchParams& p, uint64_t epoch, int32_t* row) {
  const RankView& view = p.exchange.view;
  const uint64_t* landed = landed_ids(p, view.rank, epoch, 0);
  const int each = choices_per_source(p);
  const int own = view.rank * each;
  const int others = (view.num_ranks - 1) * each;
  bool here = true;
  for (int base = threadIdx.x; base < others; base += kLoads * kThreads) {
    uint64_t words[kLoads];
    // Most ids have arrived by now, so load several ids together.
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      const int other = base + u * kThreads;
      const int i = other < own ? other : other + each;
      words[u] = other < others ? load_relaxed_sys(landed + i) : 0;
    }
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      const int other = base + u * kThreads;
      if (other >= others) break;
      const int i = other < own ? other : other + each;
      here = here && (words[u] >> kSignatureBits == epoch ||
                      wait_for_word(view, landed + i, epoch, i / each, &words[u]));
      const uint32_t id = words[u] & kSignatureMask;
      row[i] = id == kSignatureMask ? -1 : static_cast<int>(id);
    }
  }
  return __syncthreads_and(here);
}

// Returns the rows of an expert, with the rows that alignment adds.
__device__ int padded(const RoutedDispatchParams& p, int rows) {
  return p.alignment == 1 ? rows : static_cast<int>(round_up(rows, p.alignment));
}

constexpr int kDropped = -2;  // replaces the id of a choice that is dropped

// Sets the ids of dropped choices to kDropped. Before the call, `rows` counts all choices. After
// the call, count_rows() must run again. All threads call it, at most once.
static __device__ __noinline__ void drop_rows(const RoutedDispatchParams& p, Shared& shared,
                                              const Tables& t) {
  const RoutingView& routing = p.exchange.routing;
  const int num_ranks = p.exchange.view.num_ranks;
  const int experts = local_experts(p);
  const int first_expert = p.exchange.view.rank * experts;
  const int num_tokens = routing.num_tokens, top_k = routing.top_k;
  const int of_choice = num_ranks * num_tokens, all = of_choice * top_k;
  int32_t* trial = t.next_row;
  // Returns the id of choice i, in the order in which choices are kept.
  const auto id_of = [&](int i) -> int32_t& {
    const int source = i % num_ranks, token = i % of_choice / num_ranks, k = i / of_choice;
    return t.row[(source * num_tokens + token) * top_k + k];
  };
  for (int e = threadIdx.x; e < experts; e += kThreads) atomicAdd(&shared.all_rows, t.rows[e]);
  // Counts the rows of the first `count` choices in `trial`. Returns true if these rows fit.
  const auto fits = [&](int count) {
    __syncthreads();  // All threads have read the previous `trial`.
    for (int e = threadIdx.x; e < experts; e += kThreads) trial[e] = 0;
    if (threadIdx.x == 0) shared.padded_rows = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += kThreads) {
      const int expert = id_of(i) - first_expert;
      if (expert >= 0 && expert < experts) atomicAdd(&trial[expert], 1);
    }
    __syncthreads();
    int rows = 0;
    for (int e = threadIdx.x; e < experts; e += kThreads) rows += padded(p, trial[e]);
    rows = __reduce_add_sync(kAllLanes, rows);
    if (lane_index() == 0) atomicAdd(&shared.padded_rows, rows);
    __syncthreads();
    return shared.padded_rows <= routing.capacity;
  };
  const int kept = last_that_fits(all, fits);
  for (int i = kept + static_cast<int>(threadIdx.x); i < all; i += kThreads) {
    int32_t& id = id_of(i);
    if (id >= first_expert && id < first_expert + experts) id = kDropped;
  }
  for (int i = threadIdx.x; i < kMaxTeams * experts; i += kThreads) t.next_row[i] = 0;
  __syncthreads();
}

// Counts the rows of each expert from the ids in `row`, and computes `rows` and `first_row`.
// `next_row` must be zeros. For each warp, it becomes each expert's number of rows before the
// warp's range of choices. Returns the end of the last expert's rows. All threads call it.
template <typename IsHere>
__device__ int count_rows(const RoutedDispatchParams& p, Shared& shared, const Tables& t, int all,
                          int per_warp, IsHere&& is_here) {
  const int experts = local_experts(p);
  const int first_expert = p.exchange.view.rank * experts;
  const int warp = threadIdx.x / kWarpThreads;
  const int first = warp * per_warp;
  const int last = min(first + per_warp, all);
  int32_t* next_row = t.next_row + warp * experts;
  for (int base = first; base < last; base += kWarpThreads) {
    const int id = base + lane_index() < last ? t.row[base + lane_index()] : -1;
    if (is_here(id)) atomicAdd(&next_row[id - first_expert], 1);
  }
  __syncthreads();  // All threads have read the ids, so rows can replace them.
  for (int e = threadIdx.x; e < experts; e += kThreads) {
    int count = 0;
    for (int w = 0; w * per_warp < all; w += kLoads) {
      int of_warp[kLoads];
#pragma unroll
      for (int u = 0; u < kLoads; ++u) of_warp[u] = t.next_row[(w + u) * experts + e];
#pragma unroll
      for (int u = 0; u < kLoads; ++u) {
        t.next_row[(w + u) * experts + e] = count;
        count += of_warp[u];
      }
    }
    t.rows[e] = count;
    t.first_row[e] = padded(p, count);
  }
  prefix_sum<kThreads>(t.first_row, experts, shared.warp_sums);
  return t.first_row[experts - 1] + padded(p, t.rows[experts - 1]);
}

// Replaces the ids of all ranks by rows, in the order of local expert, source, token and choice.
// Each warp takes a contiguous range of the choices, 32 at a time. Avoids divisions (each of twenty
// instructions of 4 ns), because each block computes its plan before it receives.
__device__ void plan_rows(const RoutedDispatchParams& p, Shared& shared, const Tables& t) {
  const RankView& view = p.exchange.view;
  const int experts = local_experts(p);
  const int first_expert = view.rank * experts;
  const auto is_here = [&](int id) {
    return static_cast<uint32_t>(id - first_expert) < static_cast<uint32_t>(experts) ? 1u : 0u;
  };
  const int warp = threadIdx.x / kWarpThreads;
  const int lane = lane_index();
  const auto store = [&](int source, int group, uint32_t here) {
    const uint32_t tokens = __ballot_sync(kAllLanes, here != 0);
    if (lane == 0) shared.landed[source].bits[group] = tokens;
  };
  find_tokens(p, t, view.rank + 1, view.num_ranks - 1, is_here, store);
  const int all = view.num_ranks * choices_per_source(p);
  const int per_warp = round_up(ceil_div(all, kMaxTeams), kWarpThreads);
  const int first = warp * per_warp;
  const int last = min(first + per_warp, all);
  int32_t* next_row = t.next_row + warp * experts;
  int end_of_groups = count_rows(p, shared, t, all, per_warp, is_here);
  if (p.may_drop && end_of_groups > p.exchange.routing.capacity) {
    drop_rows(p, shared, t);
    end_of_groups = count_rows(p, shared, t, all, per_warp, is_here);
  }
  if (threadIdx.x == 0) shared.end_of_groups = end_of_groups;
  for (int base = first; base < last; base += kWarpThreads) {
    const int id = base + lane < last ? t.row[base + lane] : -1;
    const int expert = id - first_expert;
    const bool here = is_here(id) != 0;
    const int of_expert = take_row(next_row, expert, here);
    const int row = here ? t.first_row[expert] + of_expert : id == kDropped ? -2 : -1;
    if (base + lane < last) t.row[base + lane] = row < p.exchange.routing.capacity ? row : -2;
  }
  __syncthreads();
}

// Writes the slots of this rank's token `token`. Also marks slot number `token` as empty at each
// rank that receives at most `token` tokens. One warp calls it.
__device__ void write_sent(const RoutedDispatchParams& p, const Shared& shared, int token) {
  const RoutingView& routing = p.exchange.routing;
  const int num_ranks = p.exchange.view.num_ranks;
  const int num_tokens = routing.num_tokens;
  for (int rank = lane_index(); rank < num_ranks; rank += kWarpThreads) {
    const TokenSet& sent = shared.sent[rank];
    const int slot = sent.has(token) ? sent.slot(token) : -1;
    p.plan.token_slot[token * num_ranks + rank] = slot;
    int32_t* tokens_of_slots = p.plan.slot_token + rank * num_tokens;
    if (slot >= 0) tokens_of_slots[slot] = token;
    if (token >= sent.before(ceil_div(num_tokens, kGroupTokens))) tokens_of_slots[token] = -1;
  }
  if (lane_index() >= routing.top_k) return;
  const int choice = token * routing.top_k + lane_index();
  const int id = p.ids[choice];
  const bool is_valid = id >= 0 && id < p.num_experts;
  p.plan.choice_rank[choice] = is_valid ? id / local_experts(p) : -1;
}

// Writes the plan's entries for the rows of a token of `source`. Also marks slot number `token` as
// empty if at most `token` tokens land. Lane k has the row of choice k.
__device__ void write_landed(const RoutedDispatchParams& p, const TokenSet& landed, int source,
                             int token, int row) {
  const RoutingView& routing = p.exchange.routing;
  if (lane_index() >= routing.top_k) return;
  int32_t* slot_rows =
      p.plan.slot_rows + source * routing.num_tokens * routing.top_k + lane_index();
  if (token >= landed.before(ceil_div(routing.num_tokens, kGroupTokens))) {
    slot_rows[token * routing.top_k] = -1;
  }
  if (!landed.has(token)) return;
  const int slot = landed.slot(token);
  slot_rows[slot * routing.top_k] = row;
  if (row < 0) return;
  write_row(p.plan, row, source, slot, lane_index(), token);
}

// Copies the values and the scales of a landed row at the same time.
__device__ void spread_encoded(const MovedArray& values, const MovedArray& scales, const Team& team,
                               const char* from_values, const char* from_scales, int row,
                               uint32_t choices) {
  constexpr int kUnroll = Tuning::kLoadsOfEncoded;
  const int of_values = values.row_bytes / kVectorBytes;
  const int all = of_values + static_cast<int>(scales.row_bytes / kVectorBytes);
  for (int base = 0; base < all; base += kUnroll * team.threads()) {
    const int first = base + team.thread();
    uint4 v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int i = first + u * team.threads();
      const char* from = i < of_values ? from_values : from_scales - of_values * kVectorBytes;
      if (i < all) v[u] = load_landed(reinterpret_cast<const uint4*>(from) + i);
    }
    for (uint32_t left = choices; left != 0; left &= left - 1) {
      const int64_t to_row = __shfl_sync(kAllLanes, row, __ffs(left) - 1);
      char* in_values = values.out + to_row * values.row_bytes;
      char* in_scales = scales.out + to_row * scales.row_bytes - of_values * kVectorBytes;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int i = first + u * team.threads();
        if (i < all) reinterpret_cast<uint4*>(i < of_values ? in_values : in_scales)[i] = v[u];
      }
    }
  }
}

// Writes one token of `source` to its rows. Returns false if the token did not arrive.
template <typename Form>
__device__ bool receive_token(const RoutedDispatchParams& p, const Team& team, uint64_t epoch,
                              Workbench* bench, const TokenSet& landed, int source, int token,
                              int row) {
  const DispatchParams& exchange = p.exchange;
  const RankView& view = exchange.view;
  const uint32_t choices = __ballot_sync(kAllLanes, row >= 0);
  if (choices == 0) return true;
  const int slot = landed.slot(token);
  const bool own = !Form::kEncodes && source == view.rank;
  if (!own && !wait_for_chunk(view, team, epoch, source, slot)) return false;
  const char* from_zone = zone(view, view.rank, epoch, source, exchange.zone_bytes);
  int a = 0;
  if constexpr (Form::kEncodes) {
    if (p.encoding.decode) {
      PlainSegments segments(bench->segment);
      for (; a < 2 * p.encoding.num_leaves; a += 2) {
        decode_leaf<Form::kFormat, typename Form::Type>(exchange, p.encoding, a / 2, team,
                                                        bench->destinations, segments, row, choices,
                                                        from_zone, slot);
      }
    }
  }
  for (; a < exchange.num_arrays; ++a) {
    const MovedArray& array = exchange.arrays[a];
    if constexpr (Form::kEncodes) {
      if (array.out == nullptr) continue;  // token scales, which only decode_leaf() reads
      const bool has_scales = a < 2 * p.encoding.num_leaves && a % 2 == 0;
      if (has_scales && array.width == kVectorBytes &&
          exchange.arrays[a + 1].width == kVectorBytes) {
        const MovedArray& scales = exchange.arrays[++a];
        spread_encoded(
            array, scales, team, from_zone + array.zone_offset + slot * row_stride(array.row_bytes),
            from_zone + scales.zone_offset + slot * row_stride(scales.row_bytes), row, choices);
        continue;
      }
    }
    const char* from = own ? array.in + token * array.row_bytes
                           : from_zone + array.zone_offset + slot * row_stride(array.row_bytes);
    if (array.choice_bytes > 0) {
      if (row < 0 || !team.is_first_warp()) continue;
      copy_choice(array.out + row * array.choice_bytes, from + lane_index() * array.choice_bytes,
                  array.choice_bytes, array.width);
      continue;
    }
    spread_row(array, team, from, row, choices);
  }
  return true;
}

// Among `count` rows from `first`, zeroes the rows without a token and writes their plan entries.
template <typename Form>
__device__ void zero_rows(const RoutedDispatchParams& p, const Team& team, const Shared& shared,
                          const Tables& t, int first, int count) {
  const int my_row = first + lane_index();
  const bool is_empty =
      lane_index() < count && !carries_token(t.first_row, t.rows, local_experts(p), my_row);
  const bool is_tail = my_row >= shared.end_of_groups;
  if (is_empty && team.is_first_warp()) write_empty_row(p.plan, my_row, is_tail);
  const bool is_zeroed = is_empty && !(is_tail && p.exchange.leaves_tail);
  for (uint32_t left = __ballot_sync(kAllLanes, is_zeroed); left != 0; left &= left - 1) {
    const int64_t row = first + __ffs(left) - 1;
    const auto zero = [&](const MovedArray& array) {
      const int64_t bytes = array.choice_bytes > 0 ? array.choice_bytes : array.row_bytes;
      zero_row(team, array.out + row * bytes, bytes, array.width);
    };
    for (int a = 0; a < p.exchange.num_arrays; ++a) {
      if (Form::kEncodes && p.exchange.arrays[a].out == nullptr) continue;
      zero(p.exchange.arrays[a]);
    }
    if constexpr (Form::kEncodes) {
      const int num_decoded = p.encoding.decode ? p.encoding.num_leaves : 0;
      for (int leaf = 0; leaf < num_decoded; ++leaf) {
        zero(decoded_rows(p.exchange, p.encoding, leaf));
      }
    }
  }
}

// Writes the plan's group sizes, number of rows and number of drops. One warp calls it.
__device__ void write_sizes(const RoutedDispatchParams& p, const Shared& shared, const Tables& t) {
  const int capacity = p.exchange.routing.capacity;
  int kept = 0, in_all = 0;
  for (int e = lane_index(); e < local_experts(p); e += kWarpThreads) {
    const int begin = min(t.first_row[e], capacity);
    const int padded_end = t.first_row[e] + padded(p, t.rows[e]);
    p.plan.group_sizes[e] = min(padded_end, capacity) - begin;
    kept += min(t.first_row[e] + t.rows[e], capacity) - begin;
    in_all += t.rows[e];
  }
  kept = __reduce_add_sync(kAllLanes, kept);
  in_all = __reduce_add_sync(kAllLanes, in_all);
  if (lane_index() != 0) return;
  *p.plan.num_rows = kept;
  *p.plan.num_dropped = max(in_all, shared.all_rows) - kept;
}

// Work items of receivers: this rank's tokens (unless they land), rows to zero, tokens that land.
struct ReceiveItems {
  int own, zero, all;
  int rows_each;  // rows to zero in one work item

  __device__ explicit ReceiveItems(const RoutedDispatchParams& p, bool own_land) {
    const RoutingView& routing = p.exchange.routing;
    rows_each = rows_per_zero_item(routing.capacity, num_blocks());
    own = own_land ? 0 : routing.num_tokens;
    zero = (static_cast<uint32_t>(routing.capacity) + rows_each - 1) / rows_each;
    all = p.exchange.view.num_ranks * routing.num_tokens + zero;
  }
};

// Returns true if a block that has sent must also receive. Otherwise the other blocks have a team
// for each remaining item, and end before this block has a plan. All threads call it.
__device__ bool is_needed(const RoutedDispatchParams& p, const ReceiveItems& items) {
  const Roles& roles = p.exchange.roles;
  const int others = (num_blocks() - roles.send_blocks) * roles.receive_teams;
  const int taken = threadIdx.x == 0 ? peek(&control(p.exchange.view).next_receive) : 0;
  return __syncthreads_or(threadIdx.x == 0 && taken + others < items.all);
}

// Takes items until none is left, or until a token does not arrive. `asked` is the first request.
template <typename Form>
__device__ void receive(const RoutedDispatchParams& p, const Team& team, uint64_t epoch,
                        const Shared& shared, Workbench* bench, const Tables& t,
                        const ReceiveItems& items, uint32_t asked) {
  const RankView& view = p.exchange.view;
  const RoutingView& routing = p.exchange.routing;
  const int sources = view.num_ranks - 1 + Form::kEncodes;
  for (int item = team.broadcast(asked); item < items.all;
       item = take_item(control(view).next_receive, team)) {
    const int after_own = item - items.own;
    if (after_own >= 0 && after_own < items.zero) {
      if (after_own == 0 && team.is_first_warp()) write_sizes(p, shared, t);
      const int first = after_own * items.rows_each;
      zero_rows<Form>(p, team, shared, t, first, min(items.rows_each, routing.capacity - first));
      continue;
    }
    // Tokens arrive in ascending order, because each source sends them in this order.
    const int landed_item = after_own - items.zero;
    const int source =
        landed_item < 0 ? view.rank : (view.rank + 1 + landed_item % sources) % view.num_ranks;
    const int token = landed_item < 0 ? item : landed_item / sources;
    const bool own = source == view.rank;
    const TokenSet& landed = own ? shared.sent[source] : shared.landed[source];
    const int choice = (source * routing.num_tokens + token) * routing.top_k + lane_index();
    const int row = lane_index() < routing.top_k ? t.row[choice] : -1;
    if (team.is_first_warp()) {
      if (own) write_sent(p, shared, token);
      write_landed(p, landed, source, token, row);
    }
    if (!receive_token<Form>(p, team, epoch, bench, landed, source, token, row)) return;
  }
}

constexpr int64_t kBenchBytes = kMaxTeams * sizeof(Workbench);

template <typename Form>
__global__ void __launch_bounds__(kThreads, 1)
    routed_dispatch_kernel(const __grid_constant__ Launched<RoutedDispatchParams> launched) {
  MOE_A2A_OWN_PARAMS(RoutedDispatchParams, p, launched);
  MOE_A2A_DYNAMIC_SHARED(16, char, dynamic_shared);
  __shared__ Shared shared;
  const RankView& view = p.exchange.view;
  Workbench* const bench =
      Form::kEncodes ? reinterpret_cast<Workbench*>(dynamic_shared) + threadIdx.x / kWarpThreads
                     : nullptr;
  auto* const tables =
      reinterpret_cast<int32_t*>(dynamic_shared + (Form::kEncodes ? kBenchBytes : 0));
  const int experts = local_experts(p);
  const Tables t = {tables, tables + experts, tables + 2 * experts,
                    tables + (2 + kMaxTeams) * experts};
  const Roles& roles = p.exchange.roles;
  const Team senders(roles.send_teams, shared.block.mailboxes);
  const Team receivers(roles.receive_teams, shared.block.mailboxes);
  int32_t* own_ids = t.row + view.rank * choices_per_source(p);
  // The loads and the request below run at the same time, because none needs a wait.
  uint32_t asked = ask_before_entering(view, roles, senders);
  const uint64_t seen_credit = see_credit(view);
  load_own_ids(p, own_ids);
  const int32_t rank = block_index() == 0 && threadIdx.x == 0 ? *p.rank : view.rank;
  if (threadIdx.x == 0) shared.all_rows = 0;
  bool ok = enter(view, shared.block);
  const uint64_t epoch = shared.block.epoch;
  if (rank != view.rank) {
    fail(view, ErrorKind::kWrongRank, Phase::kStart, view.rank, epoch, view.rank, rank);
  }
  const bool sends = view.num_ranks > 1 && is_sender(view, shared.block, roles);
  const ReceiveItems items(p, Form::kEncodes);
  if (ok) {
    delay_for_test(view, Phase::kSend);
    if (sends && !all_send(roles)) asked = ask_for_item(control(view).next_send, senders);
    const bool is_free = plan_sends(p, epoch, seen_credit, shared, t);
    if (is_free && shared.block.admission == 0) send_ids(p, epoch, own_ids);
    if (is_free && sends) {
      send_items(view, senders, epoch, p.exchange.routing.num_tokens, asked,
                 [&](int token) { send_token<Form>(p, senders, epoch, shared, bench, token); });
    }
    for (int i = threadIdx.x; i < kMaxTeams * experts; i += kThreads) t.next_row[i] = 0;
    ok = (!sends || is_needed(p, items)) && receive_ids(p, epoch, t.row);
  }
  if (ok) {
    // Only a receiver requests its first item before it plans, because a sender plans late.
    if (!sends) asked = ask_for_item(control(view).next_receive, receivers);
    delay_for_test(view, Phase::kReceiveChunk);
    plan_rows(p, shared, t);
    if (sends) asked = ask_for_item(control(view).next_receive, receivers);
    receive<Form>(p, receivers, epoch, shared, bench, t, items, asked);
  }
  leave(view, shared.block, p.exchange.fills, p.num_results, p.plan_fills, kNumPlanArrays);
}

constexpr int64_t shared_bytes(int local_experts, int64_t choices, bool encodes) {
  const int64_t table = int64_t{2 + kMaxTeams} * local_experts + choices;
  return table * static_cast<int64_t>(sizeof(int32_t)) + (encodes ? kBenchBytes : 0);
}
constexpr int64_t most_shared_bytes(bool encodes) {
  return shared_bytes(kMaxFusedExperts, kMaxFusedChoices, encodes);
}
// If ranks share a device, their parameters are also in shared memory.
static_assert(most_shared_bytes(true) + sizeof(Shared) + sizeof(RoutedDispatchParams) <=
              Tuning::kMaxSharedBytes);

struct RoutedDispatchKernels {
  using Key = std::tuple<TokenFormat, ElementType>;  // for kNoFormat, ElementType{}
  using Kernel = void (*)(Launched<RoutedDispatchParams>);

  template <typename Add>
  static void list(Add&& add) {
    add({kNoFormat, {}}, routed_dispatch_kernel<Unencoded>, most_shared_bytes(false));
    for_each(TokenFormats{}, [&](auto format) {
      for_each(Elements{}, [&](auto element) {
        using T = typename decltype(element)::type;
        add({format, Element<T>::kType}, routed_dispatch_kernel<InFormat<format, T>>,
            most_shared_bytes(true));
      });
    });
  }
};

}  // namespace

cudaError_t MOE_A2A_FORM::LaunchRoutedDispatch(const RoutedDispatchParams* ranks, int num_blocks,
                                               cudaStream_t stream) {
  const RoutedDispatchParams& params = *ranks;
  const int num_ranks = params.exchange.view.num_ranks;
  const RoutingView& routing = params.exchange.routing;
  const int64_t choices = int64_t{num_ranks} * routing.num_tokens * routing.top_k;
  const int experts = params.num_experts / num_ranks;
  const Encoding& encoding = params.encoding;
  const bool encodes = encoding.format != kNoFormat;
  return LaunchListed<RoutedDispatchKernels>(
      {encoding.format, encodes ? encoding.type : ElementType{}}, ranks, num_blocks,
      shared_bytes(experts, choices, encodes), stream);
}

cudaError_t MOE_A2A_FORM::LoadRoutedDispatch() { return LoadListed<RoutedDispatchKernels>(); }

}  // namespace moe_a2a
