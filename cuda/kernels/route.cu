// route: computes the slots and rows of all ranks' tokens from their expert ids, in two launches.
//
// route_exchange gathers the ids of all ranks and counts them for each chunk of tokens. Ids outside
// [0, num_experts) become -1 before they are counted. route_assign computes slots and rows from the
// counts. Rows are in the order of local expert, source rank, token and choice. For each source and
// destination, slots are in the order of tokens. If rows do not fit, route_assign first finds the
// threshold, which is the first choice that is dropped. Slots and rows are prefix sums, so no order
// of atomic operations matters: equal inputs give equal bytes.
//
// Layout: a source's zone holds its ids, [batch, num_tokens, top_k]. A chunk is `tokens_per_chunk`
// tokens of one batch element. Each chunk has a flag and an entry in the counts.
//
// Waits: senders wait only for credits of an earlier epoch. Receivers wait for the flag of each
// chunk. The block with the highest index waits for the head of every rank before the launch ends.
// route_assign follows route_exchange on the stream and waits for no rank. If a block sees a
// failure when it begins or ends, it writes an empty routing: no slots, no rows, sizes 0.
//
// Launch: route_exchange with any number of blocks, which all send until no chunk is left.
// route_assign with one block for each batch element, source and chunk.
#include "device/copy.cuh"
#include "device/exchange.cuh"
#include "device/plan.cuh"
#include "device/scan.cuh"
#include "kernels/launch.h"

namespace moe_a2a {
namespace {

constexpr int kRouteThreads = kMaxTokensPerRouteChunk;
constexpr int kRouteWarps = kRouteThreads / kWarpThreads;
static_assert(kRouteThreads % kWarpThreads == 0);
static_assert(kRouteWarps <= kWarpThreads, "the lanes of a warp add up the warps' sums");

// The ranks to which each token of a chunk goes. A mask has a bit for each of `kBits` ranks.
struct NamedRanks {
  static constexpr int kBits = 64;
  unsigned long long masks[ceil_div(kMaxRanks, kBits)][kMaxTokensPerRouteChunk];

  __device__ void add(int token, uint32_t rank) {
    atomicOr(&masks[rank / kBits][token], 1ull << rank % kBits);
  }
  __device__ bool has(int token, uint32_t rank) const {
    return masks[rank / kBits][token] >> rank % kBits & 1;
  }
};

// Calls body(rank) for each rank below `num_ranks`, in one thread each. The loop is unrolled,
// because a variable number of iterations would need more registers.
template <typename Body>
__device__ __forceinline__ void for_each_rank(int num_ranks, Body&& body) {
#pragma unroll
  for (int first = 0; first < kMaxRanks; first += kRouteThreads) {
    const int rank = first + static_cast<int>(threadIdx.x);
    if (rank < num_ranks) body(rank);
  }
}

// A chunk of the tokens that one source has in one batch element.
struct Chunk {
  int batch, first_token, num_tokens;
  int64_t first_choice, num_choices;  // in a source's [batch, num_tokens, top_k]

  __device__ Chunk(const RouteParams& p, int index)
      : batch(index / p.chunks), first_token(index % p.chunks * p.tokens_per_chunk) {
    num_tokens = max(0, min(p.tokens_per_chunk, p.num_tokens - first_token));
    first_choice = (int64_t{batch} * p.num_tokens + first_token) * p.top_k;
    num_choices = int64_t{num_tokens} * p.top_k;
  }
};

__device__ int64_t choices_per_source(const RouteParams& p) {
  return int64_t{p.batch} * p.num_tokens * p.top_k;
}

__device__ int64_t counts_per_entry(const RouteParams& p) {
  return int64_t{p.levels()} * p.local_experts() + 1;
}

__device__ int32_t* expert_counts(const RouteParams& p, int batch, int source, int chunk) {
  const int64_t entry = (int64_t{batch} * p.view.num_ranks + source) * p.chunks + chunk;
  return p.expert_counts + entry * counts_per_entry(p);
}

__device__ void send_chunk(const RouteParams& p, uint64_t epoch, int index) {
  const Chunk chunk(p, index);
  for (int64_t i = threadIdx.x; i < chunk.num_choices; i += kRouteThreads) {
    int id = p.ids[chunk.first_choice + i];
    if (id < 0 || id >= p.num_experts) id = -1;
    for (int peer = 0; peer < p.view.num_ranks; ++peer) {
      if (peer == p.view.rank) continue;
      auto* to = reinterpret_cast<int32_t*>(zone(p.view, peer, epoch, p.view.rank, p.zone_bytes));
      to[chunk.first_choice + i] = id;
    }
  }
}

// Reads one chunk of ids from `source`, stores the ids in `all_ids`, and counts them. `histogram`
// [levels, local_experts] and `named` are in shared memory.
__device__ void receive_chunk(const RouteParams& p, uint64_t epoch, int source, int index,
                              int32_t* histogram, NamedRanks& named) {
  const Chunk chunk(p, index);
  const bool own = source == p.view.rank;
  const int local_experts = p.local_experts();
  const int first_expert = p.view.rank * local_experts;
  const int32_t* from = own ? p.ids
                            : reinterpret_cast<const int32_t*>(
                                  zone(p.view, p.view.rank, epoch, source, p.zone_bytes));
  int32_t* keep = p.all_ids + source * choices_per_source(p);
  const int levels = p.levels();
  for (int i = threadIdx.x; i < levels * local_experts; i += kRouteThreads) histogram[i] = 0;
  for (int first = 0; first < p.view.num_ranks; first += NamedRanks::kBits) {
    auto* masks = named.masks[first / NamedRanks::kBits];
    for (int i = threadIdx.x; i < chunk.num_tokens; i += kRouteThreads) masks[i] = 0;
  }
  __syncthreads();
  constexpr int kUnroll = Tuning::kLoadsOfWords;
  const int num_choices = static_cast<int>(chunk.num_choices);
  for (int base = threadIdx.x; base < num_choices; base += kUnroll * kRouteThreads) {
    int ids[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int i = base + u * kRouteThreads;
      ids[u] = i < num_choices ? load_landed(from + chunk.first_choice + i) : -1;
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int i = base + u * kRouteThreads;
      if (i >= num_choices) break;
      const int id = ids[u] >= 0 && ids[u] < p.num_experts ? ids[u] : -1;
      keep[chunk.first_choice + i] = id;
      if (id < 0) continue;
      const int rank = id / local_experts;
      named.add(i / p.top_k, rank);
      if (rank != p.view.rank) continue;
      const int level = levels == 1 ? 0 : i % p.top_k;
      atomicAdd(&histogram[level * local_experts + id - first_expert], 1);
    }
  }
  __syncthreads();
  int32_t* counts = expert_counts(p, chunk.batch, source, index % p.chunks);
  for (int e = threadIdx.x; e < local_experts; e += kRouteThreads) {
    int up_to_level = 0;
    for (int i = e; i < levels * local_experts; i += local_experts) {
      counts[i] = up_to_level += histogram[i];
    }
  }
  for (int rank = threadIdx.x / kWarpThreads; rank < p.view.num_ranks; rank += kRouteWarps) {
    int tokens = 0;
    for (int i = lane_index(); i < chunk.num_tokens; i += kWarpThreads) {
      tokens += named.has(i, rank);
    }
    tokens = __reduce_add_sync(kAllLanes, tokens);
    if (lane_index() != 0) continue;
    if (own) p.rank_counts[static_cast<int64_t>(index) * p.view.num_ranks + rank] = tokens;
    if (rank == p.view.rank) counts[levels * local_experts] = tokens;
  }
}

__global__ void __launch_bounds__(kRouteThreads)
    route_exchange_kernel(const __grid_constant__ Launched<RouteParams> launched) {
  MOE_A2A_OWN_PARAMS(RouteParams, p, launched);
  MOE_A2A_DYNAMIC_SHARED(4, int32_t, histogram);
  __shared__ BlockState block;
  __shared__ NamedRanks named;
  const RankView& view = p.view;
  const int num_chunks = p.batch * p.chunks;
  if (enter(view, block)) {
    const Team team(1, block.mailboxes);
    const uint64_t epoch = block.epoch;
    bool ok = true;
    if (block.admission == 0) {
      ok = *p.rank == view.rank;
      if (!ok && threadIdx.x == 0) {
        fail(view, ErrorKind::kWrongRank, Phase::kStart, view.rank, epoch, view.rank, *p.rank);
      }
    }
    delay_for_test(view, Phase::kSend);
    int index = take_item(control(view).next_send, team);
    if (index < num_chunks) ok = ok && wait_for_credits(view, team, epoch);
    while (ok && index < num_chunks) {
      send_chunk(p, epoch, index);
      raise_chunk_everywhere(view, team, epoch, index);
      if (index == 0) raise_heads(view, team, epoch);
      index = take_item(control(view).next_send, team);
    }
    if (ok) delay_for_test(view, Phase::kReceiveChunk);
    while (ok) {
      const int item = take_item(control(view).next_receive, team);
      if (item >= num_chunks * view.num_ranks) break;
      const int source = (view.rank + item) % view.num_ranks;
      const int index = item / view.num_ranks;
      ok = source == view.rank || wait_for_chunk(view, team, epoch, source, index);
      if (ok) receive_chunk(p, epoch, source, index, histogram, named);
    }
  }
  leave(view, block, nullptr, 0);
}

__device__ void fill(int32_t* values, int64_t count, int32_t value) {
  for (int64_t i = threadIdx.x; i < count; i += kRouteThreads) values[i] = value;
}

// Writes an empty plan after a failed exchange, whose counts and ids are not valid. Every block
// that sees the failure writes the complete plan, because other blocks may already have ended.
__device__ void write_empty_routing(const RouteParams& p) {
  const int64_t tokens = int64_t{p.batch} * p.num_tokens;
  const int64_t rows = int64_t{p.batch} * p.capacity;
  fill(p.plan.token_slot, tokens * p.view.num_ranks, -1);
  fill(p.plan.slot_token, tokens * p.view.num_ranks, -1);
  fill(p.plan.choice_rank, tokens * p.top_k, -1);
  fill(p.plan.slot_rows, tokens * p.top_k * p.view.num_ranks, -1);
  for (int32_t* row_array : {p.plan.row_rank, p.plan.row_slot, p.plan.row_k, p.plan.row_token}) {
    fill(row_array, rows, -1);
  }
  fill(p.plan.group_sizes, int64_t{p.batch} * (p.local_experts() / p.parts), 0);
  fill(p.plan.num_rows, p.batch, 0);
  fill(p.plan.num_dropped, p.batch, 0);
}

// Returns the counts of one level for source 0 and chunk 0, in a batch element.
__device__ const int32_t* counts_of_level(const RouteParams& p, int batch, int level) {
  return expert_counts(p, batch, 0, 0) + int64_t{level} * p.local_experts();
}

struct AssignShared {
  int32_t* first_row;  // [local_experts]: each expert's first row, after alignment
  int32_t* rows;       // [local_experts]: each expert's rows with a token
  int32_t* next_row;   // [counting_warps, local_experts]: the next free row of a warp and expert
};

// The numbers of tokens that a source sends to one destination.
struct SlotCounts {
  int before, in_all;  // in earlier chunks, in all chunks
};

// Sums counts. For each expert, `next_row` of warp 0 becomes the sum of the counts before this
// block's entry, and `rows` the sum of all counts. `landed` counts the tokens that
// the source sends to this rank. If the source is this rank, `sent` counts its tokens for every
// rank. No load depends on another load.
__device__ void sum_counts(const RouteParams& p, int batch, int source, int chunk_index,
                           const AssignShared& s, SlotCounts& landed, SlotCounts* sent) {
  const int local_experts = p.local_experts();
  const int num_ranks = p.view.num_ranks;
  const int num_entries = num_ranks * p.chunks;
  const int entry = source * p.chunks + chunk_index;
  const int32_t* counts = counts_of_level(p, batch, p.levels() - 1);
  const int64_t stride = counts_per_entry(p);
  // If there are fewer experts than threads, several threads share the entries of an expert.
  const int width = min(local_experts, kRouteThreads);
  const int shares = kRouteThreads / width, share = threadIdx.x / width;
  for (int e = threadIdx.x % width; share < shares && e < local_experts; e += width) {
    int before = 0, in_all = 0;
#pragma unroll 16
    for (int other = share; other < num_entries; other += shares) {
      const int count = counts[other * stride + e];
      in_all += count;
      if (other < entry) before += count;
    }
    atomicAdd(&s.rows[e], in_all);
    atomicAdd(&s.next_row[e], before);
  }
  for (int c = threadIdx.x; c < p.chunks; c += kRouteThreads) {
    const int count = expert_counts(p, batch, source, c)[stride - 1];
    atomicAdd(&landed.in_all, count);
    if (c < chunk_index) atomicAdd(&landed.before, count);
  }
  if (source != p.view.rank) return;
  const int32_t* rank_counts = p.rank_counts + int64_t{batch} * p.chunks * num_ranks;
  for (int i = threadIdx.x; i < p.chunks * num_ranks; i += kRouteThreads) {
    const int count = rank_counts[i];
    atomicAdd(&sent[i % num_ranks].in_all, count);
    if (i / num_ranks < chunk_index) atomicAdd(&sent[i % num_ranks].before, count);
  }
}

__device__ int rows_of_group(const RouteParams& p, const int32_t* rows, int group) {
  int sum = 0;
  for (int e = group * p.parts; e < (group + 1) * p.parts; ++e) sum += rows[e];
  return sum;
}

// Returns the rows that alignment adds after expert `e`; 0 unless `e` is the last of its group.
__device__ int padding_after(const RouteParams& p, const AssignShared& s, int e) {
  if (p.alignment == 1 || e % p.parts != p.parts - 1) return 0;
  const int rows = rows_of_group(p, s.rows, e / p.parts);
  return static_cast<int>(round_up(rows, p.alignment)) - rows;
}

// Computes `first_row` from `rows`. Returns the end of the last group. All threads call it.
__device__ int place_experts(const RouteParams& p, const AssignShared& s, int* warp_sums) {
  const int local_experts = p.local_experts();
  for (int e = threadIdx.x; e < local_experts; e += kRouteThreads) {
    s.first_row[e] = s.rows[e] + padding_after(p, s, e);
  }
  prefix_sum<kRouteThreads>(s.first_row, local_experts, warp_sums);
  const int last = local_experts - 1;
  return s.first_row[last] + s.rows[last] + padding_after(p, s, last);
}

// Finds the threshold if the capacity is too small, and subtracts dropped rows from `rows`. Every
// block of a batch element finds the same threshold. All threads call it.
static __device__ __noinline__ Threshold find_threshold(const RouteParams& p, int batch,
                                                        const AssignShared& s,
                                                        int32_t* landed_experts, int& padded_rows) {
  const int local_experts = p.local_experts();
  const int num_ranks = p.view.num_ranks;
  const int first_expert = p.view.rank * local_experts;
  const int64_t stride = counts_per_entry(p);
  const int32_t* batch_ids = p.all_ids + int64_t{batch} * p.num_tokens * p.top_k;
  int32_t* trial = s.next_row;
  // Computes `trial` = `rows` + the rows of add(). Returns true if `trial` fits the capacity.
  const auto fits = [&](auto&& add) {
    __syncthreads();  // All threads have read the previous `trial`.
    for (int e = threadIdx.x; e < local_experts; e += kRouteThreads) trial[e] = s.rows[e];
    if (threadIdx.x == 0) padded_rows = 0;
    __syncthreads();
    add();
    __syncthreads();
    int padded = 0;
    for (int g = threadIdx.x; g < local_experts / p.parts; g += kRouteThreads) {
      padded += static_cast<int>(round_up(rows_of_group(p, trial, g), p.alignment));
    }
    padded = __reduce_add_sync(kAllLanes, padded);
    if (lane_index() == 0) atomicAdd(&padded_rows, padded);
    __syncthreads();
    return padded_rows <= p.capacity;
  };
  // Keeps as many levels, chunks or tokens as fit, but fewer than `high`: adds their rows to `rows`
  // and returns their number. add(n) adds the rows of the first n of them to `trial`.
  const auto keep_most = [&](int high, auto&& add) {
    const int count = last_that_fits(high, [&](int n) { return fits([&] { add(n); }); });
    fits([&] { add(count); });
    for (int e = threadIdx.x; e < local_experts; e += kRouteThreads) s.rows[e] = trial[e];
    return count;
  };
  // Adds the counts of a level in chunks [0, end) of all sources. The counts include lower levels,
  // unless `only_this` is set.
  const auto add_level = [&](int level, bool only_this, int end) {
    const int32_t* counts = counts_of_level(p, batch, level);
    // The index of a count fits in 32 bits without sign.
    static_assert(int64_t{kMaxRouteExperts} * kMaxChunks <= UINT32_MAX);
    const uint32_t experts = local_experts;
    for (uint32_t i = threadIdx.x; i < num_ranks * end * experts; i += kRouteThreads) {
      const int number = static_cast<int>(i / experts), expert = static_cast<int>(i % experts);
      const int64_t at = int64_t{number / end * p.chunks + number % end} * stride + expert;
      const int before = only_this && level > 0 ? counts[at - local_experts] : 0;
      atomicAdd(&trial[expert], counts[at] - before);
    }
  };

  Threshold found;
  __syncthreads();  // All threads have read `rows`.
  for (int e = threadIdx.x; e < local_experts; e += kRouteThreads) s.rows[e] = 0;
  found.k = keep_most(p.top_k, [&](int levels) {
    if (levels > 0) add_level(levels - 1, false, p.chunks);
  });
  const int chunk = keep_most(p.chunks, [&](int end) { add_level(found.k, true, end); });
  const int first_token = chunk * p.tokens_per_chunk;
  const int num_tokens = min(p.tokens_per_chunk, p.num_tokens - first_token);
  const auto expert_of = [&](int source, int token) {
    const int64_t choice = int64_t{token} * p.top_k + found.k;
    return batch_ids[source * choices_per_source(p) + choice] - first_expert;
  };
  const int kept_tokens = keep_most(num_tokens, [&](int count) {
    for (int i = threadIdx.x; i < num_ranks * count; i += kRouteThreads) {
      const int expert = expert_of(i / count, first_token + i % count);
      if (expert >= 0 && expert < local_experts) atomicAdd(&trial[expert], 1);
    }
  });
  found.token = first_token + kept_tokens;

  // Every thread looks at the sources of the token, one after the other.
  for_each_rank(num_ranks, [&](int source) {
    const int expert = expert_of(source, found.token);
    landed_experts[source] = expert >= 0 && expert < local_experts ? expert : -1;
  });
  __syncthreads();
  const auto group_of = [&](int source) {
    const int expert = landed_experts[source];
    return expert < 0 ? -1 : expert / p.parts;
  };
  int room = p.capacity - padded_rows;
  for (found.source = 0; found.source < num_ranks; ++found.source) {
    const int group = group_of(found.source);
    if (group < 0) continue;
    int rows = rows_of_group(p, s.rows, group);
    for (int other = 0; other < found.source; ++other) rows += group_of(other) == group;
    if (rows % p.alignment != 0) continue;
    if (room < p.alignment) break;
    room -= p.alignment;
  }
  __syncthreads();  // All threads have read `rows`.
  for_each_rank(found.source, [&](int source) {
    const int expert = landed_experts[source];
    if (expert >= 0) atomicAdd(&s.rows[expert], 1);
  });
  return found;
}

// Counts again the kept rows before this block's chunk: find_threshold() changes `next_row`.
static __device__ __noinline__ void sum_kept(const RouteParams& p, int batch, int entry,
                                             const Threshold& threshold, const AssignShared& s) {
  const int local_experts = p.local_experts();
  const int first_expert = p.view.rank * local_experts;
  const int64_t stride = counts_per_entry(p);
  for (int e = threadIdx.x; e < local_experts; e += kRouteThreads) s.next_row[e] = 0;
  __syncthreads();
  const int at_chunk = threshold.token / p.tokens_per_chunk;
  const int32_t* counts = expert_counts(p, batch, 0, 0);
  const uint32_t experts = local_experts;
  for (uint32_t i = threadIdx.x; i < entry * experts; i += kRouteThreads) {
    const int other = static_cast<int>(i / experts), expert = static_cast<int>(i % experts);
    const int level = threshold.k - (other % p.chunks >= at_chunk);
    if (level < 0) continue;
    atomicAdd(&s.next_row[expert],
              counts[other * stride + int64_t{level} * local_experts + expert]);
  }
  // In the threshold's chunk, read ids: counts do not tell which choices of index k are kept.
  const int first_token = at_chunk * p.tokens_per_chunk;
  const int num_tokens = threshold.token - first_token + 1;
  const int64_t first_of_batch = int64_t{batch} * p.num_tokens;
  for (int i = threadIdx.x; i < p.view.num_ranks * num_tokens; i += kRouteThreads) {
    const int source = i / num_tokens, token = first_token + i % num_tokens;
    if (source * p.chunks + at_chunk >= entry) continue;
    if (!threshold.keeps(threshold.k, token, source)) continue;
    const int64_t choice = (first_of_batch + token) * p.top_k + threshold.k;
    const int expert = p.all_ids[source * choices_per_source(p) + choice] - first_expert;
    if (expert >= 0 && expert < local_experts) atomicAdd(&s.next_row[expert], 1);
  }
}

// Calls assign(token, slot) for each token of the chunk; the slot is -1 unless named(token). Calls
// leave_empty(slot) for each empty slot that has the same number as a token of the chunk.
template <typename Named, typename Assign, typename LeaveEmpty>
__device__ void assign_slots(const Chunk& chunk, const SlotCounts& counts, int* warp_sums,
                             Named&& named, Assign&& assign, LeaveEmpty&& leave_empty) {
  const int token = threadIdx.x;  // tokens_per_chunk <= kRouteThreads
  const bool has_slot = token < chunk.num_tokens && named(token);
  const int slot = counts.before + count_before(has_slot, warp_sums);
  if (token < chunk.num_tokens) {
    assign(token, has_slot ? slot : -1);
    if (chunk.first_token + token >= counts.in_all) leave_empty(chunk.first_token + token);
  }
}

__global__ void __launch_bounds__(kRouteThreads)
    route_assign_kernel(const __grid_constant__ Launched<RouteParams> launched,
                        int counting_warps) {
  MOE_A2A_OWN_PARAMS(RouteParams, p, launched);
  MOE_A2A_DYNAMIC_SHARED(4, int32_t, dynamic_shared);
  __shared__ int32_t slot_of_token[kRouteThreads];
  __shared__ SlotCounts landed, sent[kMaxRanks];
  __shared__ int warp_sums[kRouteWarps];
  __shared__ int32_t landed_experts[kMaxRanks];
  __shared__ int padded_rows, all_rows;
  const int num_ranks = p.view.num_ranks;
  const int local_experts = p.local_experts();
  const int entries = num_ranks * p.chunks;  // per batch element
  const int batch = block_index() / entries;
  const int entry = block_index() % entries;
  const int source = entry / p.chunks;
  const int chunk_index = entry % p.chunks;
  const Chunk chunk(p, batch * p.chunks + chunk_index);
  const bool has_failed = load_relaxed_sys(&control(p.view).poison) != 0;
  const AssignShared s{dynamic_shared, dynamic_shared + local_experts,
                       dynamic_shared + 2 * local_experts};
  int32_t* ids = s.next_row + counting_warps * local_experts;  // of the chunk
  const int warp = threadIdx.x / kWarpThreads;
  const int lane = threadIdx.x % kWarpThreads;

  for (int i = threadIdx.x; i < (1 + counting_warps) * local_experts; i += kRouteThreads) {
    s.rows[i] = 0;  // also next_row, which follows
  }
  for_each_rank(num_ranks, [&](int rank) { sent[rank] = {}; });
  if (threadIdx.x == 0) {
    landed = {};
    all_rows = 0;
  }
  const int32_t* all_ids = p.all_ids + source * choices_per_source(p) + chunk.first_choice;
#pragma unroll 8
  for (int i = threadIdx.x; i < chunk.num_choices; i += kRouteThreads) ids[i] = all_ids[i];
  if (__syncthreads_or(has_failed)) return write_empty_routing(p);

  sum_counts(p, batch, source, chunk_index, s, landed, sent);
  __syncthreads();
  int end_of_groups = place_experts(p, s, warp_sums);
  const bool drops = p.may_drop && end_of_groups > p.capacity;
  Threshold threshold = {};
  if (drops) {
    for (int e = threadIdx.x; e < local_experts; e += kRouteThreads) {
      atomicAdd(&all_rows, s.rows[e]);
    }
    threshold = find_threshold(p, batch, s, landed_experts, padded_rows);
    sum_kept(p, batch, entry, threshold, s);
    end_of_groups = place_experts(p, s, warp_sums);
  }
  const auto is_kept = [&](int64_t choice) {
    if (!drops) return true;
    const auto token = static_cast<int>(choice / p.top_k), k = static_cast<int>(choice % p.top_k);
    return threshold.keeps(k, chunk.first_token + token, source);
  };

  // Assign the slots of the source's tokens at this rank.
  const auto goes_to = [&](int rank) {
    return [&, rank](int token) {
      bool named = false;
      for (int k = 0; k < p.top_k; ++k) {
        const int expert = ids[token * p.top_k + k] - rank * local_experts;
        named = named || (expert >= 0 && expert < local_experts);
      }
      return named;
    };
  };
  const int64_t tokens_before_batch = int64_t{batch} * num_ranks * p.num_tokens;
  int32_t* slot_rows =
      p.plan.slot_rows + (tokens_before_batch + int64_t{source} * p.num_tokens) * p.top_k;
  assign_slots(
      chunk, landed, warp_sums, goes_to(p.view.rank),
      [&](int token, int slot) { slot_of_token[token] = slot; },
      [&](int slot) {
        for (int k = 0; k < p.top_k; ++k) slot_rows[int64_t{slot} * p.top_k + k] = -1;
      });

  // Assign rows. Each counting warp takes a contiguous range of the chunk's choices.
  const int first_expert = p.view.rank * local_experts;
  const int64_t per_warp = round_up(ceil_div(chunk.num_choices, counting_warps), kWarpThreads);
  const int64_t first = warp * per_warp;
  const int64_t last = min(first + per_warp, chunk.num_choices);
  // Count in the next warp's `next_row`. A prefix sum over warps then turns counts into first rows.
  if (warp < counting_warps - 1) {
    for (int64_t base = first; base < last; base += kWarpThreads) {
      const int64_t choice = base + lane;
      const int expert = choice < last ? ids[choice] - first_expert : -1;
      if (expert >= 0 && expert < local_experts && is_kept(choice)) {
        atomicAdd(&s.next_row[(warp + 1) * local_experts + expert], 1);
      }
    }
  }
  __syncthreads();
  for (int e = threadIdx.x; e < local_experts; e += kRouteThreads) {
    int next = s.first_row[e] + s.next_row[e];
    s.next_row[e] = next;
    for (int w = 1; w < counting_warps; ++w) {
      next += s.next_row[w * local_experts + e];
      s.next_row[w * local_experts + e] = next;
    }
  }
  __syncthreads();
  const int64_t rows_before_batch = int64_t{batch} * p.capacity;
  if (warp < counting_warps) {
    for (int64_t base = first; base < last; base += kWarpThreads) {
      const int64_t choice = base + lane;
      const int id = choice < last ? ids[choice] : -1;
      const int expert = id - first_expert;
      const bool here = id >= 0 && expert >= 0 && expert < local_experts;
      const int row = take_row(s.next_row + warp * local_experts, expert, here && is_kept(choice));
      if (choice >= last) continue;
      const int token = choice / p.top_k;
      const int k = choice % p.top_k;
      const int slot = slot_of_token[token];
      const bool fits = row >= 0 && row < p.capacity;
      if (slot >= 0) {
        slot_rows[int64_t{slot} * p.top_k + k] = !here ? -1 : fits ? row : -2;
      }
      if (fits) {
        write_row(p.plan, rows_before_batch + row, source, slot, k, chunk.first_token + token);
      }
    }
  }

  // Write the plan's entries for rows without a token. Each block checks an equal share of rows.
  const int64_t share = ceil_div(p.capacity, entries);
  const int64_t share_end = min((entry + 1) * share, int64_t{p.capacity});
  for (int64_t row = entry * share + threadIdx.x; row < share_end; row += kRouteThreads) {
    if (carries_token(s.first_row, s.rows, local_experts, row)) continue;
    write_empty_row(p.plan, rows_before_batch + row, row >= end_of_groups);
  }

  // Assign the slots of this rank's tokens at every rank.
  if (source == p.view.rank) {
    int32_t* token_slot = p.plan.token_slot + tokens_before_batch;
    int32_t* slot_token = p.plan.slot_token + tokens_before_batch;
    int32_t* choice_rank = p.plan.choice_rank + chunk.first_choice;
    for (int64_t i = threadIdx.x; i < chunk.num_choices; i += kRouteThreads) {
      const int id = ids[i];
      choice_rank[i] = id >= 0 ? id / local_experts : -1;
    }
    for (int rank = 0; rank < num_ranks; ++rank) {
      int32_t* tokens_of_slots = slot_token + int64_t{rank} * p.num_tokens;
      assign_slots(
          chunk, sent[rank], warp_sums, goes_to(rank),
          [&](int token, int slot) {
            token_slot[int64_t{chunk.first_token + token} * num_ranks + rank] = slot;
            if (slot >= 0) tokens_of_slots[slot] = chunk.first_token + token;
          },
          [&](int slot) { tokens_of_slots[slot] = -1; });
    }
  }

  if (entry == 0) {
    const int groups = local_experts / p.parts;
    for (int g = threadIdx.x; g < groups; g += kRouteThreads) {
      const int end = g + 1 < groups ? s.first_row[(g + 1) * p.parts] : end_of_groups;
      p.plan.group_sizes[batch * groups + g] =
          min(end, p.capacity) - min(s.first_row[g * p.parts], p.capacity);
    }
    int kept = 0, in_all = 0;
    for (int e = threadIdx.x; e < local_experts; e += kRouteThreads) {
      kept += min(s.first_row[e] + s.rows[e], p.capacity) - min(s.first_row[e], p.capacity);
      in_all += s.rows[e];
    }
    __shared__ int sums[2];
    if (threadIdx.x < 2) sums[threadIdx.x] = 0;
    __syncthreads();
    atomicAdd(&sums[0], kept);
    atomicAdd(&sums[1], in_all);
    __syncthreads();
    if (threadIdx.x == 0) {
      p.plan.num_rows[batch] = sums[0];
      p.plan.num_dropped[batch] = (drops ? all_rows : sums[1]) - sums[0];
    }
  }

  // The domain may have failed meanwhile. Other blocks may then have written an empty routing.
  __syncthreads();
  bool failed = false;
  if (threadIdx.x == 0) {
    fence_acq_rel_sys();  // Orders this block's results before it overwrites them.
    failed = load_relaxed_sys(&control(p.view).poison) != 0;
  }
  if (__syncthreads_or(failed)) write_empty_routing(p);
}

constexpr int64_t assign_shared_bytes(int local_experts, int tokens_per_chunk, int top_k,
                                      int counting_warps) {
  const int64_t values =
      int64_t{2 + counting_warps} * local_experts + int64_t{tokens_per_chunk} * top_k;
  return values * static_cast<int64_t>(sizeof(int32_t));
}

// The most dynamic shared memory that a launch requests; a block may have more.
constexpr int kAssignSharedBytes = 160 * 1024;
constexpr int kExchangeSharedBytes = kMaxRouteCounts * sizeof(int32_t);
static_assert(kMaxLocalExperts <= kMaxRouteCounts);
static_assert(kExchangeSharedBytes + sizeof(NamedRanks) + sizeof(RouteParams) +
                  sizeof(BlockState) <=
              Tuning::kMaxSharedBytes);
static_assert(assign_shared_bytes(kMaxLocalExperts, kMaxTokensPerRouteChunk, kMaxTopK, 1) <=
              kAssignSharedBytes);

}  // namespace

cudaError_t MOE_A2A_FORM::LaunchRoute(const RouteParams* ranks, int num_blocks,
                                      cudaStream_t stream) {
  const RouteParams& p = *ranks;
  const size_t histogram_bytes = p.levels() * p.local_experts() * sizeof(int32_t);
  const cudaError_t error =
      Launch(route_exchange_kernel, ranks, num_blocks, kRouteThreads, histogram_bytes, stream);
  if (error != cudaSuccess) return error;
  const auto shared_bytes = [&](int counting_warps) {
    return assign_shared_bytes(p.local_experts(), p.tokens_per_chunk, p.top_k, counting_warps);
  };
  int counting_warps = kRouteWarps;
  while (shared_bytes(counting_warps) > kAssignSharedBytes) counting_warps /= 2;
  return Launch(route_assign_kernel, ranks, p.batch * p.view.num_ranks * p.chunks, kRouteThreads,
                shared_bytes(counting_warps), stream, counting_warps);
}

cudaError_t MOE_A2A_FORM::LoadRoute() {
  const auto allowed = cudaFuncAttributeMaxDynamicSharedMemorySize;
  const cudaError_t error =
      cudaFuncSetAttribute(route_exchange_kernel, allowed, kExchangeSharedBytes);
  if (error != cudaSuccess) return error;
  return cudaFuncSetAttribute(route_assign_kernel, allowed, kAssignSharedBytes);
}

}  // namespace moe_a2a
