// dispatch: sends each token to its experts' ranks, and writes the rows of this rank's experts.
//
// Holds afterwards: out[row] is the row's token if row_slot[row] >= 0, and zero otherwise. For
// choice arrays, out[row] is the entry of the row's choice. With `leaves_tail`, rows after the last
// group are not written.
//
// Layout: a zone has an array [num_tokens slots, row_stride] for each payload array. Slot s of a
// source's zone at a destination holds the token slot_token[destination][s] of the source. A token
// has one slot at a rank, even if the rank has several of its experts.
//
// Waits: senders wait only for credits of an earlier epoch. Receivers wait for the flag of a chunk
// of slots before they read the chunk. The block with the highest index waits for all heads. Tokens
// that stay on this rank need no zone.
//
// Why push: with few blocks, stores to peers reach the link limit, but loads from peers do not.
//
// Launch: any number of blocks.
#include <type_traits>

#include "device/copy.cuh"
#include "device/exchange.cuh"
#include "device/expand.cuh"
#include "device/stream.cuh"
#include "device/sum.cuh"
#include "kernels/launch.h"
#include "kernels/table.h"

namespace moe_a2a {
namespace {

// Copies rows of one array: for each lane whose `has_row` is set, from `source` to `destination`.
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

__device__ void send_chunk(const DispatchParams& p, const Team& team, Stream& stream,
                           uint64_t epoch, int destination, int chunk) {
  const RankView& view = p.view;
  const int64_t per_chunk = slots_per_chunk(p.routing.num_tokens);
  const int end = min((chunk + 1) * per_chunk, int64_t{p.routing.num_tokens});
  char* to_zone = zone(view, destination, epoch, view.rank, p.zone_bytes);
  fence_global_for_bulk();  // This thread has acquired the credit of the zone.
  for (int first = chunk * per_chunk; first < end; first += kWarpThreads) {
    const int slot = first + lane_index();
    const int64_t slot_index = int64_t{destination} * p.routing.num_tokens + slot;
    int token = slot < end ? p.routing.slot_token[slot_index] : -1;
    if (token >= p.routing.num_tokens) {
      fail(view, ErrorKind::kBounds, Phase::kSend, destination, epoch, p.routing.num_tokens, token);
      token = -1;
    }
    for (int a = 0; a < p.num_arrays; ++a) {
      const MovedArray& array = p.arrays[a];
      copy_rows(array, team, stream, token >= 0, array.in + token * array.row_bytes,
                to_zone + array.zone_offset + slot * row_stride(array.row_bytes));
    }
  }
  if (breaks(view, kFlagBeforeStored)) {
    wait_until_read<0>();
  } else {
    wait_until_stored();
  }
}

// Replaces expand_rows() in a weighted dispatch: writes scaled rows, inner products, or both.
// `partials` has a word of shared memory per warp.
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
      team.sync();  // All threads have read the partial sums.
    }
    if (team.thread() == 0) w.dotted[this_row] = dot;
  }
}

// Waits for a chunk and writes its rows. Reads this rank's tokens from the operand, without a wait.
template <typename T>
__device__ void expand_chunk(const DispatchParams& p, const Team& team, Stream& stream,
                             float* partials, uint64_t epoch, int source, int chunk) {
  const RankView& view = p.view;
  const RoutingView& routing = p.routing;
  const int top_k = routing.top_k;
  const int64_t per_chunk = slots_per_chunk(routing.num_tokens);
  const int end = min((chunk + 1) * per_chunk, int64_t{routing.num_tokens});
  const char* from_zone = zone(view, view.rank, epoch, source, p.zone_bytes);
  bool landed = source == view.rank;
  for (int first = chunk * per_chunk; first < end; first += slots_per_look(top_k)) {
    const int slot = first + lane_index() / top_k;
    const int64_t slot_index = int64_t{source} * routing.num_tokens + slot;
    int row = -1, token = 0;
    if (slot < min(end, first + slots_per_look(top_k))) {
      row = routing.slot_rows[slot_index * top_k + lane_index() % top_k];
      if (source == view.rank) token = routing.slot_token[slot_index];
    }
    if (row >= routing.capacity || (row >= 0 && (token < 0 || token >= routing.num_tokens))) {
      fail(view, ErrorKind::kBounds, Phase::kReceiveChunk, source, epoch, routing.capacity, row);
      row = -1;
    }
    // Wait only after the lookup of the first rows, because the chunk travels meanwhile.
    if (!landed) {
      if (!wait_for_chunk(view, team, epoch, source, chunk)) return;
      fence_global_for_bulk();  // This thread has acquired the chunk's flag.
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
  }
}

// Zeroes the rows without a token among `count` rows from `first`.
template <typename T>
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
}

template <typename T>
__device__ void receive(const DispatchParams& p, const Team& team, Stream& stream,
                        const char* zeros, float* partials, uint64_t epoch, int num_chunks) {
  const RankView& view = p.view;
  const int zero_count = rows_per_zero_item(p.routing.capacity, num_blocks());
  const int zero_items = ceil_div(p.routing.capacity, zero_count);
  const int local_items = num_chunks + zero_items;
  const int peers = view.num_ranks - 1;
  delay_for_test(view, Phase::kReceiveChunk);
  while (true) {
    const int item = take_item(control(view).next_receive, team);
    if (item >= local_items + num_chunks * peers) return;
    if (item < num_chunks) {
      expand_chunk<T>(p, team, stream, partials, epoch, view.rank, item);
    } else if (item < local_items) {
      zero_rows<T>(p, team, zeros, (item - num_chunks) * zero_count, zero_count);
    } else {
      // Each source sends to its next rank first, so chunks of the previous rank arrive first.
      const int remote = item - local_items;
      const int source = (view.rank + view.num_ranks - 1 - remote % peers) % view.num_ranks;
      expand_chunk<T>(p, team, stream, partials, epoch, source, remote / peers);
    }
  }
}

// `T` is the element type of a weighted dispatch, or void if the dispatch only moves rows.
template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    dispatch_kernel(const __grid_constant__ Launched<DispatchParams> launched) {
  MOE_A2A_OWN_PARAMS(DispatchParams, p, launched);
  MOE_A2A_DYNAMIC_SHARED(128, char, dynamic_shared);
  __shared__ __align__(128) char zeros[kSegmentBytes];
  __shared__ BlockState block;
  __shared__ float partials[std::is_void_v<T> ? 1 : kMaxTeams];  // by warp
  Stream stream(dynamic_shared);
  for (int i = threadIdx.x; i < kSegmentBytes; i += kThreads) zeros[i] = 0;
  fence_shared_for_bulk();
  const Team senders(p.roles.send_teams, block.mailboxes);
  const uint32_t asked = ask_before_entering(p.view, p.roles, senders);
  // enter() has a barrier, after which all threads see the initialized mbarriers and zeros.
  if (enter(p.view, block)) {
    const int num_chunks = num_chunks_of(p.routing.num_tokens);
    send_chunks(p.view, block, p.roles, senders, num_chunks, asked,
                [&](int destination, int chunk) {
                  send_chunk(p, senders, stream, block.epoch, destination, chunk);
                });
    change_teams(p.roles);
    const Team receivers(p.roles.receive_teams, block.mailboxes);
    receive<T>(p, receivers, stream, zeros, partials, block.epoch, num_chunks);
  }
  wait_until_stored();  // The block leaves after its bulk stores are complete.
  leave(p.view, block, p.fills, p.num_arrays + (std::is_void_v<T> ? 0 : 1));
}

struct DispatchKernels {
  using Key = std::tuple<bool /* is weighted */, ElementType>;
  using Kernel = void (*)(Launched<DispatchParams>);

  template <typename Add>
  static void list(Add&& add) {
    add({false, {}}, dispatch_kernel<void>, kStreamSharedBytes);
    for_each(Elements{}, [&](auto element) {
      using T = typename decltype(element)::type;
      add({true, Element<T>::kType}, dispatch_kernel<T>, kStreamSharedBytes);
    });
  }
};

}  // namespace

cudaError_t MOE_A2A_FORM::LaunchDispatch(const DispatchParams* ranks, int num_blocks,
                                         cudaStream_t stream) {
  const Weighting& weighting = ranks->weighting;
  const bool weighs = weighting.is_used();
  return LaunchListed<DispatchKernels>({weighs, weighs ? weighting.type : ElementType{}}, ranks,
                                       num_blocks, kStreamSharedBytes, stream);
}

cudaError_t MOE_A2A_FORM::LoadDispatch() { return LoadListed<DispatchKernels>(); }

}  // namespace moe_a2a
