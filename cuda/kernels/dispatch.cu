// dispatch: write every row of this rank's experts, whichever rank its token comes from.
//
// Holds afterwards: out[row] is the row's token if row_slot[row] >= 0, and zero otherwise. In
// choice arrays, it is the entry of the row's own choice. The order of rows follows from the
// routing, not from the order of arrival. With `leaves_tail`, rows after the last group are not
// written.
//
// Layout: a zone holds, for each payload array, [num_tokens slots, row_stride]. Slot s of a
// source's zone at a destination holds the token slot_token[destination][s] of the source. A token
// has one slot at a rank, even if the rank has several of its experts.
//
// Waits: senders wait only for credits of an earlier epoch. Receivers wait for the flag of a chunk
// of slots before they read the chunk. The highest block waits for the head of every
// source before the launch ends. Tokens of the own rank never enter a zone. Rows without a token
// are zeroed while the first chunks travel.
//
// Why push: stores to peers reach the link limit with few blocks, loads from peers do not.
//
// Launch: any number of blocks; the first `send_blocks` to start send first.
#include <type_traits>

#include "device/copy.cuh"
#include "device/exchange.cuh"
#include "device/expand.cuh"
#include "device/scan.cuh"
#include "device/stream.cuh"
#include "device/sum.cuh"
#include "kernels/launch.h"
#include "kernels/table.h"

namespace moe_a2a {
namespace {

// The number of slots that a warp looks up at a time, with one lane for each choice.
__device__ int slots_per_look(const DispatchParams& p) { return kWarpThreads / p.routing.top_k; }

// Returns how many slots share a flag.
template <bool kLands>
__device__ int64_t slots_of_chunk(const DispatchParams& p) {
  return kLands ? p.landing.slots_per_chunk : slots_per_chunk(p.routing.num_tokens);
}

// Returns the slot of a token of this rank at `rank`.
__device__ int slot_at(const DispatchParams& p, int token, int rank) {
  return p.routing.token_slot[int64_t{token} * p.view.num_ranks + rank];
}

// Copies rows of one array. Each lane with `has_row` has a row's `source` and `destination`.
__device__ void copy_rows(const MovedArray& array, const Team& team, Stream& stream, bool has_row,
                          const char* source, char* destination) {
  const uint32_t all = __ballot_sync(kAllLanes, has_row);
  if (!is_streamed(array)) {
    for (uint32_t left = all; left != 0; left &= left - 1) {
      const int lane = __ffs(left) - 1;
      const auto of_lane = [&](auto* pointer) {
        return reinterpret_cast<decltype(pointer)>(
            __shfl_sync(kAllLanes, reinterpret_cast<uint64_t>(pointer), lane));
      };
      char* to = of_lane(destination);
      copy_row(team, to, of_lane(source), array.row_bytes, array.width);
    }
    return;
  }
  if (has_row) {
    const int place = __popc(all & ((1u << lane_index()) - 1));
    stream.shared->sources[place] = source;
    stream.shared->destinations[place] = destination;
    stream.shared->destinations_end[place] = place + 1;
  }
  stream_copy(stream, team, __popc(all), array.row_bytes);
}

// Writes the tokens of one chunk of slots into the zone at `destination`. With `kLands`, a zone has tokens in the order of
// sending, and their slots besides.
template <bool kLands>
__device__ void send_chunk(const DispatchParams& p, const Team& team, Stream& stream,
                           uint64_t epoch, int destination, int chunk) {
  const RankView& view = p.view;
  const int64_t per_chunk = slots_of_chunk<kLands>(p);
  const int end = min((chunk + 1) * per_chunk, int64_t{p.routing.num_tokens});
  char* to_zone = zone(view, destination, epoch, view.rank, p.zone_bytes);
  fence_global_for_bulk();  // The credit of the zone has been acquired.
  for (int first = chunk * per_chunk; first < end; first += kWarpThreads) {
    const int slot = first + lane_index();
    const int64_t slot_index = int64_t{destination} * p.routing.num_tokens + slot;
    const int32_t* tokens = kLands ? p.landing.order : p.routing.slot_token;
    int token = slot < end ? tokens[slot_index] : -1;
    if (token >= p.routing.num_tokens) {
      fail(view, ErrorKind::kBounds, Phase::kSend, destination, epoch, p.routing.num_tokens, token);
      token = -1;
    }
    for (int a = 0; a < p.num_arrays; ++a) {
      const MovedArray& array = p.arrays[a];
      copy_rows(array, team, stream, token >= 0, array.in + token * array.row_bytes,
                to_zone + array.zone_offset + slot * row_stride(array.row_bytes));
    }
    if (kLands && slot < end && team.is_first_warp()) {
      reinterpret_cast<int32_t*>(to_zone + p.landing.zone_offset)[slot] =
          token < 0 ? -1 : slot_at(p, token, destination);
    }
  }
  // A group of stores belongs to the thread that issued it. Each thread waits for its groups before
  // the flag.
  if (breaks(view, kFlagBeforeStored)) {
    wait_until_read<0>();
  } else {
    wait_until_stored();
  }
}

// Calls add(offset in the zone, bytes) for each array of a chunk that crosses to another node: see
// put_chunk().
template <typename Add>
__device__ void each_range(const DispatchParams& p, int destination, int chunk, Add&& add) {
  const int num_slots = p.routing.num_tokens;
  const int32_t* tokens = p.routing.slot_token + int64_t{destination} * num_slots;
  const Slots slots = taken_slots(num_slots, chunk, [&](int slot) { return tokens[slot] >= 0; });
  for (int a = 0; a < p.num_arrays; ++a) {
    const int64_t stride = row_stride(p.arrays[a].row_bytes);
    add(p.arrays[a].zone_offset + slots.first * stride, slots.count * stride);
  }
}

// Does for a weighted dispatch what expand_rows() does for others: stores the scaled row, or its
// inner product with the row of `w.rows`, or both. `partials`: a word of shared memory for each
// warp of the block.
template <typename T>
__device__ void weigh_rows(const DispatchParams& p, const Team& team, float* partials, int row,
                           const char* from) {
  const MovedArray& array = p.arrays[0];
  const Weighting& w = p.weighting;
  const float weight = row >= 0 && w.weights != nullptr ? w.weights[row] : 0.f;
  for (uint32_t left = __ballot_sync(kAllLanes, row >= 0); left != 0; left &= left - 1) {
    const int lane = __ffs(left) - 1;
    const int64_t this_row = __shfl_sync(kAllLanes, row, lane);
    const float this_weight = __shfl_sync(kAllLanes, weight, lane);
    const char* landed = reinterpret_cast<const char*>(
        __shfl_sync(kAllLanes, reinterpret_cast<uint64_t>(from), lane));
    float dot = scale_row<T>(
        team, landed, w.rows == nullptr ? nullptr : w.rows + this_row * array.row_bytes,
        array.row_bytes, this_weight,
        w.weights == nullptr ? nullptr : array.out + this_row * array.row_bytes);
    if (w.rows == nullptr) continue;
    for (int d = kWarpThreads / 2; d > 0; d /= 2) dot += __shfl_xor_sync(kAllLanes, dot, d);
    if (team.threads() > kWarpThreads) {  // Add the warps' partial sums in the order of warps.
      const int warp = threadIdx.x / kWarpThreads;
      if (lane_index() == 0) partials[warp] = dot;
      team.sync();
      if (team.is_first_warp()) {
        for (int i = 1; i < team.threads() / kWarpThreads; ++i) dot += partials[warp + i];
      }
      team.sync();  // The partial sums have been read.
    }
    if (team.thread() == 0) w.dotted[this_row] = dot;
  }
}

// Counts complete rows. All threads of the team call it. `each_row(count)` calls count(row) for the rows of this lane.
template <typename EachRow>
__device__ void count_landed(const DispatchParams& p, const Team& team, EachRow&& each_row) {
  wait_until_stored();
  team.sync();
  if (!team.is_first_warp()) return;
  each_row([&](int row) { add_release_gpu(p.landing.landed + row / kLandingRows, 1); });
}

// Writes the rows of one chunk of slots of `source` when the chunk has landed. Tokens of the own
// rank come directly from the operand. `T` is the element type of a weighted dispatch, otherwise
// void. With `kLands`, the chunk is one in the order of sending, and its rows are counted.
template <typename T, bool kLands>
__device__ void expand_chunk(const DispatchParams& p, const Team& team, Stream& stream,
                             float* partials, uint64_t epoch, int source, int chunk) {
  const RankView& view = p.view;
  const RoutingView& routing = p.routing;
  const int top_k = routing.top_k;
  const int64_t per_chunk = slots_of_chunk<kLands>(p);
  const int end = min((chunk + 1) * per_chunk, int64_t{routing.num_tokens});
  const char* from_zone = zone(view, view.rank, epoch, source, p.zone_bytes);
  bool landed = source == view.rank;
  // The rows of a lane's choice of a slot, and the token if it is of this rank.
  const auto look = [&](int at, bool is_used, int* token) {
    if (!is_used) return -1;
    int64_t slot_index = int64_t{source} * routing.num_tokens + at;
    if constexpr (kLands) {
      int slot = -1;
      if (source == view.rank) {
        *token = p.landing.order[slot_index];
        if (*token >= 0) slot = slot_at(p, *token, source);
      } else {
        slot = reinterpret_cast<const volatile int32_t*>(from_zone + p.landing.zone_offset)[at];
      }
      if (slot < 0) return -1;
      if (slot >= routing.num_tokens) return routing.capacity;  // an error, see below
      slot_index = int64_t{source} * routing.num_tokens + slot;
    } else if (source == view.rank) {
      *token = routing.slot_token[slot_index];
    }
    return routing.slot_rows[slot_index * top_k + lane_index() % top_k];
  };
  const auto wait = [&] {
    if (!landed) {
      if (!wait_for_chunk(view, team, epoch, source, chunk)) return false;
      fence_global_for_bulk();  // The chunk's flag has been acquired.
      landed = true;
    }
    return true;
  };
  if (kLands && !wait()) return;
  for (int first = chunk * per_chunk; first < end; first += slots_per_look(p)) {
    const int slot = first + lane_index() / top_k;
    int token = 0;
    int row = look(slot, slot < min(end, first + slots_per_look(p)), &token);
    if (row >= routing.capacity || (row >= 0 && (token < 0 || token >= routing.num_tokens))) {
      fail(view, ErrorKind::kBounds, Phase::kReceiveChunk, source, epoch, routing.capacity, row);
      row = -1;
    }
    // The first rows are looked up before the wait, while the chunk travels.
    if (!wait()) return;
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
  }
  if constexpr (kLands) {
    count_landed(p, team, [&](auto&& count) {
      for (int first = chunk * per_chunk; first < end; first += slots_per_look(p)) {
        const int slot = first + lane_index() / top_k;
        int token;
        const int row = look(slot, slot < min(end, first + slots_per_look(p)), &token);
        if (row >= 0 && row < routing.capacity) count(row);
      }
    });
  }
}

// Zeroes the rows without a token among `count` rows from `first`; with `leaves_tail` only padding. With `kLands`, counts
// all rows without a token.
template <typename T, bool kLands>
__device__ void zero_rows(const DispatchParams& p, const Team& team, const char* zeros, int first,
                          int count) {
  const int64_t my_row = first + lane_index();
  const bool is_empty = lane_index() < count && my_row < p.routing.capacity && is_zeroed(p, my_row);
  if (!std::is_void_v<T> && is_empty && team.is_first_warp() && p.weighting.rows != nullptr) {
    p.weighting.dotted[my_row] = 0.f;
  }
  if (!std::is_void_v<T> && p.weighting.weights == nullptr) return;
  const uint32_t empty = __ballot_sync(kAllLanes, is_empty);
  for (int a = 0; a < p.num_arrays; ++a) {
    zero_rows_of(p.arrays[a], team, zeros, first, is_empty, empty);
  }
  if constexpr (kLands) {
    count_landed(p, team, [&](auto&& count_row) {
      const bool is_row = lane_index() < count && my_row < p.routing.capacity;
      if (is_row && p.routing.row_slot[my_row] < 0) count_row(my_row);
    });
  }
}

template <typename T, bool kLands>
__device__ void receive(const DispatchParams& p, const Team& team, Stream& stream,
                        const char* zeros, float* partials, uint64_t epoch, int num_chunks) {
  const RankView& view = p.view;
  const int zero_count = rows_per_zero_item(p.routing.capacity, num_blocks());
  const int zero_items = ceil_div(p.routing.capacity, zero_count);
  const int peers = view.num_ranks - 1;
  // If rows are counted, own tokens take turns with those of peers, because tiles need both.
  const int first_items = kLands ? 0 : num_chunks;
  const int local_items = first_items + zero_items;
  const int sources = kLands ? view.num_ranks : peers;
  delay_for_test(view, Phase::kReceiveChunk);
  while (true) {
    const int item = take_item(control(view).next_receive, team);
    if (item >= local_items + num_chunks * sources) return;
    if (item < first_items) {
      expand_chunk<T, kLands>(p, team, stream, partials, epoch, view.rank, item);
    } else if (item < local_items) {
      zero_rows<T, kLands>(p, team, zeros, (item - first_items) * zero_count, zero_count);
    } else {
      // Each source sends to its next rank first. So read chunks in the order in which they arrive.
      const int remote = item - local_items;
      const int source = (view.rank + view.num_ranks - !kLands - remote % sources) % view.num_ranks;
      expand_chunk<T, kLands>(p, team, stream, partials, epoch, source, remote / sources);
      mark(view, Mark::kReceived);
    }
  }
}

// Writes the order in which tokens are sent to one rank, which is that of their first experts there, and zeroes the counts
// of landed rows. One block for each rank. The order of tokens with the same first expert changes nothing but times.
constexpr int kOrderThreads = 2 * kThreads;
constexpr int kOrderTokens = 4 * kOrderThreads;  // at a time
__global__ void __launch_bounds__(kOrderThreads)
    order_kernel(const __grid_constant__ Launched<DispatchParams> launched) {
  MOE_A2A_OWN_PARAMS(DispatchParams, p, launched);
  __shared__ int first_experts[kOrderTokens];  // of tokens; kOrderThreads: no expert at the rank
  __shared__ int next[kOrderThreads];          // by first expert; larger numbers count as the last
  __shared__ int warp_sums[kWarpThreads];
  const RoutingView& routing = p.routing;
  const int rank = block_index(), num_tokens = routing.num_tokens, top_k = routing.top_k;
  const int me = threadIdx.x;
  const auto find_first_experts = [&](int first, int count) {
    const int64_t first_choice = int64_t{first} * top_k;
    // Only this thread has read these entries.
    for (int i = me; i < kOrderTokens; i += kOrderThreads) first_experts[i] = kOrderThreads;
    __syncthreads();
    constexpr int kLoads = 8;  // at a time
    for (int base = me; base < count * top_k; base += kLoads * kOrderThreads) {
      int expert[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int choice = base + i * kOrderThreads;
        const bool is_choice = choice < count * top_k;
        const int at = is_choice ? routing.choice_rank[first_choice + choice] : -1;
        const int of_rank = is_choice ? routing.choice_expert[first_choice + choice] : 0;
        expert[i] = at == rank ? min(kOrderThreads - 1, max(0, of_rank)) : kOrderThreads;
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (expert[i] == kOrderThreads) continue;
        atomicMin(&first_experts[(base + i * kOrderThreads) / top_k], expert[i]);
      }
    }
  };
  int found = -1;  // the first of the tokens whose experts have been found
  // Adds all tokens to `next`, and calls take(token, its number).
  const auto count_tokens = [&](auto&& take) {
    for (int first = 0; first < num_tokens; first += kOrderTokens) {
      const int count = min(kOrderTokens, num_tokens - first);
      if (found != first) find_first_experts(first, count);
      found = first;
      __syncthreads();
      for (int i = me; i - lane_index() < count; i += kOrderThreads) {
        const int expert = first_experts[i];
        // Lanes with the same expert add together, because many tokens have the same.
        const uint32_t same = __match_any_sync(kAllLanes, expert);
        const int before = __popc(same & ((1u << lane_index()) - 1));
        int number = 0;
        if (before == 0 && expert < kOrderThreads) number = atomicAdd(&next[expert], __popc(same));
        number = __shfl_sync(kAllLanes, number, __ffs(same) - 1) + before;
        if (expert < kOrderThreads) take(first + i, number);
      }
    }
  };
  next[me] = 0;
  const int num_counts = num_landing_counts(routing.capacity) + 1;
  for (int i = rank * kOrderThreads + me; i < num_counts; i += num_blocks() * kOrderThreads) {
    p.landing.landed[i] = 0;
  }
  count_tokens([](int, int) {});
  __syncthreads();
  const int of_last = next[kOrderThreads - 1];
  prefix_sum<kOrderThreads>(next, kOrderThreads, warp_sums);
  const int sent = next[kOrderThreads - 1] + of_last;
  int32_t* order = p.landing.order + int64_t{rank} * num_tokens;
  for (int i = sent + me; i < num_tokens; i += kOrderThreads) order[i] = -1;
  count_tokens([&](int token, int number) { order[number] = token; });
}

// `T`: the element type of a weighted dispatch; void if rows are only moved.
template <typename T, bool kLands>
__global__ void __launch_bounds__(kThreads, 1)
    dispatch_kernel(const __grid_constant__ Launched<DispatchParams> launched) {
  MOE_A2A_OWN_PARAMS(DispatchParams, p, launched);
  MOE_A2A_DYNAMIC_SHARED(128, char, dynamic_shared);
  __shared__ __align__(128) char zeros[kSegmentBytes];
  __shared__ BlockState block;
  __shared__ float partials[std::is_void_v<T> ? 1 : kWarpsPerBlock];
  if constexpr (kLands) start_next();
  Stream stream(dynamic_shared);
  for (int i = threadIdx.x; i < kSegmentBytes; i += kThreads) zeros[i] = 0;
  fence_shared_for_bulk();
  const Team senders(p.roles.send_teams, block.mailboxes);
  const uint32_t asked = ask_before_entering(p.view, p.roles, senders);
  // enter() has a barrier, after which all threads see the initialized mbarriers and zeros.
  if (enter(p.view, block)) {
    const int num_chunks = ceil_div(p.routing.num_tokens, slots_of_chunk<kLands>(p));
    send_chunks(
        p.view, block, p.roles, senders, num_chunks, p.zone_bytes, asked,
        [&](int destination, int chunk) {
          send_chunk<kLands>(p, senders, stream, block.epoch, destination, chunk);
        },
        [&](int destination, int chunk, auto&& add) { each_range(p, destination, chunk, add); });
    change_teams(p.roles);
    const Team receivers(p.roles.receive_teams, block.mailboxes);
    receive<T, kLands>(p, receivers, stream, zeros, partials, block.epoch, num_chunks);
  }
  wait_until_stored();  // All stores of this block are complete when it leaves.
  const bool ends = leave(p.view, block, p.fills, p.num_arrays + (std::is_void_v<T> ? 0 : 1));
  if constexpr (kLands) {
    if (!ends) return;
    // The product waits no longer: not for rows of a failed launch, and not for rows that routing arrays which contradict
    // each other leave out. Outputs of a failed launch have been overwritten.
    __syncthreads();
    for (int i = threadIdx.x; i < num_landing_counts(p.routing.capacity); i += kThreads) {
      uint32_t* count = p.landing.landed + i;
      const uint32_t rows = min(kLandingRows, p.routing.capacity - i * kLandingRows);
      if (peek(count) < rows) add_release_gpu(count, kLandingRows);
    }
  }
}

struct DispatchKernels {
  struct Key {
    bool is_weighted;
    ElementType type;  // of a weighted dispatch
    bool lands = false;

    bool operator==(const Key& other) const {
      return is_weighted == other.is_weighted && (!is_weighted || type == other.type) &&
             lands == other.lands;
    }
  };
  using Kernel = void (*)(Launched<DispatchParams>);

  template <typename Add>
  static void list(Add&& add) {
    add({false, {}}, dispatch_kernel<void, false>, kStreamSharedBytes);
    add({false, {}, true}, dispatch_kernel<void, true>, kStreamSharedBytes);
    for_each(Elements{}, [&](auto element) {
      using T = typename decltype(element)::type;
      add({true, Element<T>::kType}, dispatch_kernel<T, false>, kStreamSharedBytes);
    });
  }
};

struct OrderKernels {
  using Key = OnlyKernel;
  using Kernel = void (*)(Launched<DispatchParams>);

  template <typename Add>
  static void list(Add&& add) {
    add({}, order_kernel, 0);
  }
};

}  // namespace

inline namespace MOE_A2A_FORM {

cudaError_t LaunchDispatch(const DispatchParams* ranks, int num_blocks, cudaStream_t stream) {
  const Weighting& weighting = ranks->weighting;
  const bool lands = ranks->landing.slots_per_chunk > 0;
  if (lands) {
    const cudaError_t error =
        LaunchListed<OrderKernels>({}, ranks, ranks->view.num_ranks, kOrderThreads, 0, stream);
    if (error != cudaSuccess) return error;
  }
  const DispatchKernels::Key key = {is_weighted(weighting), weighting.type, lands};
  const auto launch = [&](auto in_pairs) {
    return LaunchListed<DispatchKernels, decltype(in_pairs)::value>(
        key, ranks, num_blocks, kThreads, kStreamSharedBytes, stream);
  };
  // Single blocks would strand multiprocessors that the clusters of a product need.
  return lands ? launch(std::true_type{}) : launch(std::false_type{});
}

cudaError_t LoadDispatch() {
  const cudaError_t error = LoadListed<OrderKernels>();
  return error == cudaSuccess ? LoadListed<DispatchKernels>() : error;
}

}  // namespace MOE_A2A_FORM

}  // namespace moe_a2a
