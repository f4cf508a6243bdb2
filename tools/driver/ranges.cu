// ranged dispatch: send and receive in the order of experts, and announce when the rows of a range of experts have been
// written. docs/protocol_ranges.md has the rules.
//
// Holds afterwards: the same as for dispatch. The counter of each range names this call and the number of the range's rows.
//
// Layout: that of dispatch, which does not depend on the order of chunks.
//
// Waits: the exchange waits as dispatch does. await_range waits for the exchange of its own rank. Only later launches on
// its stream wait for await_range.
#include "ranges.cuh"

// This file uses the functions of the ordinary dispatch. The program has the launcher of dispatch already.
#define LaunchDispatch LaunchDispatchNextToRanges
#define LoadDispatch LoadDispatchNextToRanges
#include "kernels/dispatch.cu"
#undef LaunchDispatch
#undef LoadDispatch

namespace moe_a2a {
namespace {

#ifdef MOE_A2A_EMULATION
// Replaces a word by `wanted` if it is `expected`, with release order. Returns the previous word.
__device__ uint64_t replace_release(uint64_t* word, uint64_t expected, uint64_t wanted,
                                    emulation::Site site = emulation::Site::here()) {
  const int order = emulation::is_left_out(site) ? __ATOMIC_RELAXED : __ATOMIC_RELEASE;
  __atomic_compare_exchange_n(word, &expected, wanted, false, order, __ATOMIC_RELAXED);
  return expected;
}
#else
// Replaces a word by `wanted` if it is `expected`, with release order. Returns the previous word.
__device__ uint64_t replace_release(uint64_t* word, uint64_t expected, uint64_t wanted) {
  uint64_t before;
  asm volatile("atom.release.gpu.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(before)
               : "l"(word), "l"(expected), "l"(wanted)
               : "memory");
  return before;
}
#endif

__device__ bool breaks_rule(const RankView& view, uint32_t rule) {
  return breaks(view, static_cast<Mutation>(rule));
}

// Returns the first row of the groups from `expert` on.
__device__ int first_row_of(const RangeGroups& groups, int expert) {
  if (groups.num_experts == 0) return 0;
  if (expert < groups.num_experts) return groups.starts[expert];
  return groups.starts[groups.num_experts - 1] + groups.sizes[groups.num_experts - 1];
}

// ---- The orders of chunks

// A chunk's key says when the chunk is needed. If there are more experts than keys, neighbouring experts share a key.
constexpr int kMaxKeys = 64;

__device__ int num_keys(const RangeGroups& groups) { return min(groups.num_experts, kMaxKeys); }

__device__ int key_of(const RangeGroups& groups, int expert) {
  return groups.num_experts <= kMaxKeys ? expert : expert * kMaxKeys / groups.num_experts;
}

// Returns the first expert of `destination` that the token of a slot has chosen, or the number of experts if none.
__device__ int first_expert_sent(const PlanRangesParams& p, int destination, int slot) {
  const int experts = p.groups.num_experts;
  const int token = p.routing.slot_token[int64_t{destination} * p.routing.num_tokens + slot];
  if (token < 0 || token >= p.routing.num_tokens) return experts;
  int first = experts;
  for (int k = 0; k < p.routing.top_k; ++k) {
    const int id = p.ids[int64_t{token} * p.routing.top_k + k];
    const int expert = id < 0 ? -1 : id - destination * experts;
    if (expert >= 0) first = min(first, expert);
  }
  return first;
}

// Returns the expert of the first row that a slot of `source` has on this rank, or the number of experts if none.
__device__ int first_expert_received(const PlanRangesParams& p, int source, int slot) {
  const int64_t slot_index = int64_t{source} * p.routing.num_tokens + slot;
  int first_row = INT32_MAX;
  for (int k = 0; k < p.routing.top_k; ++k) {
    const int row = p.routing.slot_rows[slot_index * p.routing.top_k + k];
    if (row >= 0) first_row = min(first_row, row);
  }
  if (first_row >= first_row_of(p.groups, p.groups.num_experts)) return p.groups.num_experts;
  int expert = 0, end = p.groups.num_experts;  // the last group that starts at the row or before.
  while (end - expert > 1) {
    const int middle = (expert + end) / 2;
    (p.groups.starts[middle] <= first_row ? expert : end) = middle;
  }
  return expert;
}

// Writes one order. The first `num_ranks` blocks write the order of a destination each, the other blocks that of a source.
__global__ void __launch_bounds__(kThreads)
    plan_ranges_kernel(const __grid_constant__ PlanRangesParams p) {
  __shared__ uint8_t keys[kMaxChunks];
  static_assert(kMaxKeys <= UINT8_MAX);
  const bool is_sent = static_cast<int>(blockIdx.x) < p.num_ranks;
  const int rank = static_cast<int>(blockIdx.x) - (is_sent ? 0 : p.num_ranks);
  const int per_chunk = slots_per_chunk(p.routing.num_tokens);
  const int num_chunks = num_chunks_of(p.routing.num_tokens);
  for (int chunk = threadIdx.x; chunk < num_chunks; chunk += kThreads) {
    int first = p.groups.num_experts;
    for (int slot = chunk * per_chunk; slot < min((chunk + 1) * per_chunk, p.routing.num_tokens);
         ++slot) {
      first = min(
          first, is_sent ? first_expert_sent(p, rank, slot) : first_expert_received(p, rank, slot));
    }
    keys[chunk] = first < p.groups.num_experts ? key_of(p.groups, first) : num_keys(p.groups);
  }
  __syncthreads();
  // Each warp takes keys in turn. It writes the chunks of a key after the chunks of all smaller keys.
  int32_t* order = (is_sent ? p.plan.send_order : p.plan.receive_order) + rank * num_chunks;
  for (int key = threadIdx.x / kWarpThreads; key <= num_keys(p.groups); key += kMaxTeams) {
    int place = 0;
    for (int base = 0; base < num_chunks; base += kWarpThreads) {
      const int chunk = base + lane_index();
      place += __popc(__ballot_sync(kAllLanes, chunk < num_chunks && keys[chunk] < key));
    }
    for (int base = 0; base < num_chunks; base += kWarpThreads) {
      const int chunk = base + lane_index();
      const bool is_next = chunk < num_chunks && keys[chunk] == key;
      const uint32_t all = __ballot_sync(kAllLanes, is_next);
      if (is_next) order[place + __popc(all & ((1u << lane_index()) - 1))] = chunk;
      place += __popc(all);
    }
  }
}

// ---- The exchange

// Holds what each block of a launch reads once.
struct RangeState {
  uint64_t call;
  int32_t first_row[kMaxRanges + 1];
};

// Number of work items after which a team counts the rows that it has written. Counting waits for the stores.
constexpr int kItemsPerCount = 4;

// Adds to the counter of a range. It is not inlined, because the kernel has no registers to spare.
static __device__ __noinline__ void add_rows(uint64_t* word, uint64_t call, uint32_t rows) {
  uint64_t seen = load_relaxed_sys(word);
  while (true) {
    const bool is_first = seen >> kCountBits != call;
    const uint64_t wanted = (is_first ? call << kCountBits : seen) + rows;
    const uint64_t before = replace_release(word, seen, wanted);
    if (before == seen) return;
    seen = before;
  }
}

// Holds how many rows a team has written and not counted yet. Lane r of each warp has the number for range r.
class RowCount {
 public:
  __device__ RowCount(const RangedDispatchParams& p, const RangeState& state)
      : counters_(p.counters), num_ranges_(p.ranges.count), state_(state) {}

  // Notes one row of each lane; negative: none.
  __device__ void add(int row) {
    for (int r = 0; r < num_ranges_; ++r) {
      const bool is_here = row >= state_.first_row[r] && row < state_.first_row[r + 1];
      const int rows = __popc(__ballot_sync(kAllLanes, is_here));
      if (lane_index() == r) rows_ += rows;
    }
  }

  __device__ void note_wait() {
    atomicAdd(reinterpret_cast<unsigned long long*>(&counters_->waits), 1ull);
  }

  __device__ void end_item(const Team& team) {
    if (++items_ == kItemsPerCount) count(team);
  }

  // Counts all rows that have been noted. All threads of the team call it.
  __device__ void count(const Team& team) {
    items_ = 0;
    if (__ballot_sync(kAllLanes, rows_ > 0) == 0) return;
    wait_until_stored();  // Each thread waits for its own bulk stores.
    team.sync();
    if (team.is_first_warp() && rows_ > 0) {
      add_rows(&counters_->rows[lane_index()], state_.call, rows_);
    }
    rows_ = 0;
  }

 private:
  RangeCounters* counters_;
  int num_ranges_;
  const RangeState& state_;
  uint32_t rows_ = 0;
  int items_ = 0;
};

__device__ int checked_chunk(const RankView& view, uint64_t epoch, int peer, int num_chunks,
                             int chunk) {
  if (chunk >= 0 && chunk < num_chunks) return chunk;
  fail(view, ErrorKind::kBounds, Phase::kStart, peer, epoch, num_chunks, chunk);
  return 0;
}

// Sends the chunks of all peers in the order of their experts, if this block is a sender.
__device__ void send_in_order(const RangedDispatchParams& params, const BlockState& block,
                              const Team& team, Stream& stream, int num_chunks, uint32_t asked) {
  const DispatchParams& p = params.exchange;
  const RankView& view = p.view;
  if (!begin_sending(view, block, p.roles, team, asked)) return;
  const int peers = view.num_ranks - 1;
  send_items(view, team, block.epoch, num_chunks * peers, asked, [&](int item) {
    const int destination = (view.rank + 1 + item % peers) % view.num_ranks;
    const int place = destination * num_chunks + item / peers;
    const int chunk =
        checked_chunk(view, block.epoch, destination, num_chunks, params.plan.send_order[place]);
    if (breaks(view, kFlagBeforeRows)) {
      raise_chunk(view, team, block.epoch, destination, chunk);
      __nanosleep(20000);
    }
    send_chunk(p, team, stream, block.epoch, destination, chunk);
    mark(view, Mark::kWritten);
    raise_chunk(view, team, block.epoch, destination, chunk);
  });
}

// Returns true if a chunk of `source` has landed. Does not wait.
__device__ bool has_landed(const RankView& view, const Team& team, uint64_t epoch, int source,
                           int chunk) {
  const uint64_t* flag = chunk_flag(view, epoch, source, chunk);
  const uint64_t expected = make_flag(epoch, view.signature);
  return team.broadcast(team.thread() != 0 || load_acquire_sys(flag) == expected);
}

// Does what expand_chunk() does, and notes the rows.
template <typename T>
__device__ void expand_and_count(const DispatchParams& p, const Team& team, Stream& stream,
                                 float* partials, RowCount& count, uint64_t epoch, int source,
                                 int chunk) {
  const RankView& view = p.view;
  const RoutingView& routing = p.routing;
  const int top_k = routing.top_k;
  const int64_t per_chunk = slots_per_chunk(routing.num_tokens);
  const int end = min((chunk + 1) * per_chunk, int64_t{routing.num_tokens});
  const char* from_zone = zone(view, view.rank, epoch, source, p.zone_bytes);
  bool landed = source == view.rank;
  for (int first = chunk * per_chunk; first < end; first += slots_per_look(p)) {
    const int slot = first + lane_index() / top_k;
    const int64_t slot_index = int64_t{source} * routing.num_tokens + slot;
    int row = -1, token = 0;
    if (slot < min(end, first + slots_per_look(p))) {
      row = routing.slot_rows[slot_index * top_k + lane_index() % top_k];
      if (source == view.rank) token = routing.slot_token[slot_index];
    }
    if (row >= routing.capacity || (row >= 0 && (token < 0 || token >= routing.num_tokens))) {
      fail(view, ErrorKind::kBounds, Phase::kReceiveChunk, source, epoch, routing.capacity, row);
      row = -1;
    }
    if (!landed) {
      if (!has_landed(view, team, epoch, source, chunk)) {
        count.count(team);  // These rows may be the last ones that a range needs.
        if (!wait_for_chunk(view, team, epoch, source, chunk)) return;
        if (team.thread() == 0) count.note_wait();
      }
      fence_global_for_bulk();  // The chunk's flag has been acquired.
      landed = true;
    }
    if (__ballot_sync(kAllLanes, row >= 0) == 0) continue;
    for (int a = 0; a < p.num_arrays; ++a) {
      const MovedArray& array = p.arrays[a];
      const char* from = source == view.rank
                             ? array.in + token * array.row_bytes
                             : from_zone + array.zone_offset + slot * row_stride(array.row_bytes);
      if constexpr (std::is_void_v<T>) {
        expand_rows(array, team, stream, top_k, row, from);
      } else {
        weigh_rows<T>(p, team, partials, row, from);
      }
    }
    count.add(row);
  }
}

// Receives in the order of rows. The own chunks are a quarter of the list ahead of the peers' chunks, so that there is
// something to write while rows travel. Rows without a token come after this quarter.
template <typename T>
__device__ void receive_in_order(const RangedDispatchParams& params, const RangeState& state,
                                 const Team& team, Stream& stream, const char* zeros,
                                 float* partials, uint64_t epoch, int num_chunks) {
  const DispatchParams& p = params.exchange;
  const RankView& view = p.view;
  const int zero_count = rows_per_zero_item(p.routing.capacity, num_blocks());
  const int zero_items = ceil_div(p.routing.capacity, zero_count);
  const int ranks = view.num_ranks, peers = ranks - 1;
  const int lead = ceil_div(num_chunks, 4);
  const int together = (num_chunks - lead) * ranks;  // items of peers and, further on, own ones
  RowCount count(params, state);
  delay_for_test(view, Phase::kReceiveChunk);
  while (true) {
    int item = take_item(control(view).next_receive, team);
    if (item >= num_chunks * ranks + zero_items) break;
    if (item >= lead && item - lead < zero_items) {
      const int first = (item - lead) * zero_count;
      const int64_t row = int64_t{first} + lane_index();
      zero_rows<T>(p, team, zeros, first, zero_count);
      const bool is_mine =
          lane_index() < zero_count && row < p.routing.capacity && is_zeroed(p, row);
      count.add(is_mine ? static_cast<int>(row) : -1);
    } else {
      int source = view.rank, place = item;
      if (item >= lead) {
        item -= lead + zero_items;
        const int of_place = item < together ? ranks : peers;
        place = item < together ? item / ranks : num_chunks - lead + (item - together) / peers;
        const int peer = (item < together ? item : item - together) % of_place;
        if (peer == peers) {
          place += lead;
        } else {
          source = (view.rank + ranks - 1 - peer) % ranks;
        }
      }
      const int chunk = checked_chunk(view, epoch, source, num_chunks,
                                      params.plan.receive_order[source * num_chunks + place]);
      expand_and_count<T>(p, team, stream, partials, count, epoch, source, chunk);
      mark(view, Mark::kReceived);
    }
    count.end_item(team);
  }
  count.count(team);
}

// `T`: the element type of a weighted dispatch; void if rows are only moved.
template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    ranged_dispatch_kernel(const __grid_constant__ RangedDispatchParams params) {
  const DispatchParams& p = params.exchange;
  MOE_A2A_DYNAMIC_SHARED(128, char, dynamic_shared);
  __shared__ __align__(128) char zeros[kSegmentBytes];
  __shared__ BlockState block;
  __shared__ RangeState state;
  __shared__ float partials[std::is_void_v<T> ? 1 : kWarpsPerBlock];
  Stream stream(dynamic_shared);
  for (int i = threadIdx.x; i < kSegmentBytes; i += kThreads) zeros[i] = 0;
  fence_shared_for_bulk();
  if (threadIdx.x == kThreads - 1) state.call = params.counters->call;
  if (static_cast<int>(threadIdx.x) <= params.ranges.count) {
    state.first_row[threadIdx.x] = first_row_of(params.groups, params.ranges.first[threadIdx.x]);
  }
  const Team senders(p.roles.send_teams, block.mailboxes);
  const uint32_t asked = ask_before_entering(p.view, p.roles, senders);
  // enter() has a barrier, after which all threads see the initialized mbarriers, zeros and state.
  if (enter(p.view, block)) {
    const int num_chunks = num_chunks_of(p.routing.num_tokens);
    if (threadIdx.x == 0 && block.admission == 0) {
      store_relaxed_sys(&params.counters->epoch, block.epoch);
    }
    send_in_order(params, block, senders, stream, num_chunks, asked);
    change_teams(p.roles);
    const Team receivers(p.roles.receive_teams, block.mailboxes);
    receive_in_order<T>(params, state, receivers, stream, zeros, partials, block.epoch, num_chunks);
  }
  wait_until_stored();  // All stores of this block are complete when it leaves.
  leave(p.view, block, p.fills, p.num_arrays + (std::is_void_v<T> ? 0 : 1));
}

// ---- On the stream of the products

// Waits until all rows of a range are counted. One thread calls it.
__device__ bool wait_for_range(const AwaitRangeParams& p, uint64_t call, int num_rows) {
  const RankView& view = p.view;
  const uint64_t expected = call << kCountBits | static_cast<uint64_t>(num_rows);
  if (breaks_rule(view, kIgnoreRange)) return true;
  Patience patience;
  uint64_t progress = 0;
  while (true) {
    const uint64_t seen = load_acquire_sys(&p.counters->rows[p.range]);
    if (seen == expected) return true;
    if (!patience.is_long()) continue;
    if (is_poisoned(view)) return false;
    const uint64_t epoch = load_relaxed_sys(&p.counters->epoch);
    const uint64_t now = seen + epoch + load_relaxed_sys(&p.counters->waits);
    if (now != progress) patience = Patience();
    progress = now;
    const bool is_more = seen > expected;
    // The bound is twice that of the exchange, which knows the missing peer and so must report first. The record has calls
    // in place of epochs.
    if (!is_more && !patience.is_over(2 * timeout_of(view, epoch, view.rank))) continue;
    fail(view, is_more ? ErrorKind::kViolation : ErrorKind::kTimeout, Phase::kReceiveChunk,
         view.rank, epoch, expected >> (kCountBits - kSignatureBits),
         seen >> (kCountBits - kSignatureBits));
    return false;
  }
}

__global__ void __launch_bounds__(kWarpThreads)
    await_range_kernel(const __grid_constant__ AwaitRangeParams p) {
  if (threadIdx.x > 0) return;
  const uint64_t call = p.counters->call;
  const int num_rows = first_row_of(p.groups, p.ranges.first[p.range + 1]) -
                       first_row_of(p.groups, p.ranges.first[p.range]);
  if (num_rows == 0 || p.counters->stopped == call) return;
  if (!wait_for_range(p, call, num_rows) && !breaks_rule(p.view, kForgetStop)) {
    p.counters->stopped = call;
  }
  fence_global_for_bulk();  // The product reads the rows by bulk copies.
}

// Overwrites the product if the call has failed, and ends the call. One block runs it.
__global__ void __launch_bounds__(kThreads)
    end_ranges_kernel(const __grid_constant__ EndRangesParams p) {
  const bool has_failed = p.counters->stopped == p.counters->call || control(p.view).succeeded == 0;
  __syncthreads();  // All threads have read the number of the call.
  if (has_failed && !breaks_rule(p.view, kKeepFailed)) fill_outputs(&p.fill, 1);
  if (threadIdx.x == 0) ++p.counters->call;
}

struct RangedKernels {
  using Key = DispatchKernels::Key;
  using Kernel = void (*)(RangedDispatchParams);

  template <typename Add>
  static void list(Add&& add) {
    add({false, {}}, ranged_dispatch_kernel<void>, kStreamSharedBytes);
    for_each(Elements{}, [&](auto element) {
      using T = typename decltype(element)::type;
      add({true, Element<T>::kType}, ranged_dispatch_kernel<T>, kStreamSharedBytes);
    });
  }
};

template <typename Params>
cudaError_t LaunchOne(void (*kernel)(Params), const Params& p, int blocks, int threads,
                      cudaStream_t stream) {
  Params params = p;
  void* arguments[] = {&params};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(blocks), dim3(threads),
                          arguments, 0, stream);
}

}  // namespace

cudaError_t LoadRanges() {
  cudaFuncAttributes attributes;  // Asking for them loads the kernel.
  for (const cudaError_t error :
       {cudaFuncGetAttributes(&attributes, plan_ranges_kernel),
        cudaFuncGetAttributes(&attributes, await_range_kernel),
        cudaFuncGetAttributes(&attributes, end_ranges_kernel), LoadListed<RangedKernels>()}) {
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LaunchPlanRanges(const PlanRangesParams& p, cudaStream_t stream) {
  return LaunchOne(plan_ranges_kernel, p, 2 * p.num_ranks, kThreads, stream);
}

cudaError_t LaunchRangedDispatch(const RangedDispatchParams& p, int num_blocks,
                                 cudaStream_t stream) {
  if (p.exchange.routing.capacity >= 1 << kCountBits) return cudaErrorInvalidValue;
  const Weighting& weighting = p.exchange.weighting;
  return LaunchListed<RangedKernels>({is_weighted(weighting), weighting.type}, &p, num_blocks,
                                     kThreads, kStreamSharedBytes, stream);
}

cudaError_t LaunchAwaitRange(const AwaitRangeParams& p, cudaStream_t stream) {
  return LaunchOne(await_range_kernel, p, 1, kWarpThreads, stream);
}

cudaError_t LaunchEndRanges(const EndRangesParams& p, cudaStream_t stream) {
  return LaunchOne(end_ranges_kernel, p, 1, kThreads, stream);
}

}  // namespace moe_a2a
