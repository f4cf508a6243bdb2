// dispatch: every row of this rank's experts, from whichever rank its token lives on.
//
// Holds afterwards: out[row] is the token's row for every row with row_rank[row] >= 0, and zero for the
// others; choice arrays likewise hold the row's own choice. The order is the routing's, not arrival's.
//
// Layout: a zone holds, per payload array, [num_tokens slots, row_stride]. A source writes slot s of its
// zone at a destination for the token slot_token[destination][s]: once per (token, rank).
//
// Who waits for whom: senders wait for credits of an earlier epoch only. Receivers wait for the head of
// every source, then for the flag of each chunk of slots before they read it. Tokens of the own rank
// never enter a zone. Rows that carry no token are zeroed while the first chunks are under way.
//
// Why push: peer stores reach the link's limit with few blocks, peer loads do not.
//
// Launch: any number of blocks; the first `send_blocks` to start send first.
#include <type_traits>

#include "device/copy.cuh"
#include "device/exchange.cuh"
#include "device/stream.cuh"
#include "kernels/launch.h"
#include "kernels/load.h"

namespace moe_a2a {
namespace {

constexpr int kRowsPerZeroItem = kWarpThreads;

// Whole rows of 16-byte words go through shared memory.
__device__ inline bool is_streamed(const MovedArray& array) {
  return array.choice_bytes == 0 && array.width == kVectorBytes;
}

// Writes the tokens of one chunk of slots into the zone at `destination`.
__device__ void send_chunk(const DispatchParams& p, const Team& team, Stream& stream,
                           uint64_t epoch, int destination, int chunk) {
  const RankView& view = p.view;
  const int64_t per_chunk = slots_per_chunk(p.routing.num_tokens);
  const int end = min((chunk + 1) * per_chunk, int64_t{p.routing.num_tokens});
  char* to_zone = zone(view, destination, epoch, view.rank, p.zone_bytes);
  fence_global_for_bulk();  // The credit of the zone has been acquired.
  for (int slot = chunk * per_chunk; slot < end; ++slot) {
    const int token = p.routing.slot_token[int64_t{destination} * p.routing.num_tokens + slot];
    if (token < 0) continue;
    if (token >= p.routing.num_tokens) {
      fail(view, ErrorKind::kBounds, Phase::kSend, destination, epoch, p.routing.num_tokens, token);
      return;
    }
    for (int a = 0; a < p.num_arrays; ++a) {
      const MovedArray& array = p.arrays[a];
      char* to = to_zone + array.zone_offset + slot * row_stride(array.row_bytes);
      const char* from = array.in + token * array.row_bytes;
      if (is_streamed(array)) {
        if (lane_index() == 0) stream.shared->destinations[0] = to;
        stream_copy(stream, team, from, array.row_bytes, 1);
        __syncwarp();
      } else {
        copy_row(team, to, from, array.row_bytes, array.width);
      }
    }
  }
  // Groups of stores belong to the thread that issued them: each waits for its own before the flag.
  if (breaks(view, kFlagBeforeStored)) {
    wait_until_read<0>();
  } else {
    wait_until_stored();
  }
}

// Writes one landed token to each of its rows. Lane k of every warp holds the row of choice k, or < 0.
__device__ void expand_row(const MovedArray& array, const Team& team, Stream& stream,
                           const char* landed, int row) {
  if (array.choice_bytes > 0) {
    if (row < 0 || !team.is_first_warp()) return;
    copy_choice(array.out + row * array.choice_bytes, landed + lane_index() * array.choice_bytes,
                array.choice_bytes, array.width);
    return;
  }
  const uint32_t choices = __ballot_sync(kAllLanes, row >= 0);
  if (is_streamed(array)) {
    if (row >= 0) {
      stream.shared->destinations[__popc(choices & ((1u << lane_index()) - 1))] =
          array.out + row * array.row_bytes;
    }
    __syncwarp();
    stream_copy(stream, team, landed, array.row_bytes, __popc(choices));
    __syncwarp();  // The list may be written again.
    return;
  }
  with_width(array.width, [&](auto word) {
    using W = typename decltype(word)::Type;
    read_row<W>(team, landed, array.row_bytes, [&](auto&& write) {
      for (uint32_t left = choices; left != 0; left &= left - 1) {
        const int64_t to_row = __shfl_sync(kAllLanes, row, __ffs(left) - 1);
        write(reinterpret_cast<W*>(array.out + to_row * array.row_bytes));
      }
    });
  });
}

// Expands one chunk of slots of `source`; the own rank's tokens come straight from the operand.
__device__ void expand_chunk(const DispatchParams& p, const Team& team, Stream& stream,
                             uint64_t epoch, int source, int chunk) {
  const RankView& view = p.view;
  const RoutingView& routing = p.routing;
  const int64_t per_chunk = slots_per_chunk(routing.num_tokens);
  const int end = min((chunk + 1) * per_chunk, int64_t{routing.num_tokens});
  const int lane = lane_index();
  const char* from_zone = zone(view, view.rank, epoch, source, p.zone_bytes);
  fence_global_for_bulk();  // The chunk's flag has been acquired.
  for (int slot = chunk * per_chunk; slot < end; ++slot) {
    const int64_t slot_index = int64_t{source} * routing.num_tokens + slot;
    int row = lane < routing.top_k ? routing.slot_rows[slot_index * routing.top_k + lane] : -1;
    if (row >= routing.capacity) {
      fail(view, ErrorKind::kBounds, Phase::kReceiveChunk, source, epoch, routing.capacity, row);
      row = -1;
    }
    if (__ballot_sync(kAllLanes, row >= 0) == 0) continue;
    const int token = source == view.rank ? routing.slot_token[slot_index] : 0;
    if (token < 0 || token >= routing.num_tokens) {
      fail(view, ErrorKind::kBounds, Phase::kReceiveChunk, source, epoch, routing.num_tokens,
           token);
      continue;
    }
    for (int a = 0; a < p.num_arrays; ++a) {
      const MovedArray& array = p.arrays[a];
      const char* landed = source == view.rank
                               ? array.in + token * array.row_bytes
                               : from_zone + array.zone_offset + slot * row_stride(array.row_bytes);
      expand_row(array, team, stream, landed, row);
    }
  }
}

// Zeroes those of kRowsPerZeroItem rows that carry no token.
__device__ void zero_rows(const DispatchParams& p, const Team& team, const char* zeros, int first) {
  const int mine = first + lane_index();
  const bool is_empty = mine < p.routing.capacity && p.routing.row_rank[mine] < 0;
  for (uint32_t left = __ballot_sync(kAllLanes, is_empty); left != 0; left &= left - 1) {
    const int64_t row = first + __ffs(left) - 1;
    for (int a = 0; a < p.num_arrays; ++a) {
      const MovedArray& array = p.arrays[a];
      const int64_t bytes = array.choice_bytes > 0 ? array.choice_bytes : array.row_bytes;
      if (is_streamed(array)) {
        stream_zeros(team, zeros, array.out + row * bytes, bytes);
      } else {
        zero_row(team, array.out + row * bytes, bytes, array.width);
      }
    }
  }
}

__device__ void send(const DispatchParams& p, const Team& team, Stream& stream, uint64_t epoch,
                     int num_chunks) {
  const RankView& view = p.view;
  const int peers = view.num_ranks - 1;
  const int num_items = num_chunks * peers;
  Credits credits;
  while (true) {
    const int item = take_item(control(view).next_send, team);
    if (item >= num_items) return;
    const int destination = (view.rank + 1 + item % peers) % view.num_ranks;
    const int chunk = item / peers;
    if (!may_write(view, team, epoch, credits, destination)) return;
    if (breaks(view, kFlagBeforeRows)) raise_chunk(view, team, epoch, destination, chunk);
    send_chunk(p, team, stream, epoch, destination, chunk);
    raise_chunk(view, team, epoch, destination, chunk);
  }
}

__device__ void receive(const DispatchParams& p, const Team& team, Stream& stream,
                        const char* zeros, uint64_t epoch, int num_chunks) {
  const RankView& view = p.view;
  const int zero_items = ceil_div(p.routing.capacity, kRowsPerZeroItem);
  const int local_items = num_chunks + zero_items;
  const int peers = view.num_ranks - 1;
  bool heads_seen = false;
  while (true) {
    const int item = take_item(control(view).next_receive, team);
    if (item >= local_items + num_chunks * peers) break;
    if (item < num_chunks) {
      expand_chunk(p, team, stream, epoch, view.rank, item);
    } else if (item < local_items) {
      zero_rows(p, team, zeros, (item - num_chunks) * kRowsPerZeroItem);
    } else {
      if (!heads_seen && !wait_for_heads(view, team, epoch)) return;
      if (!heads_seen) delay_for_test(view, Phase::kReceiveChunk);
      heads_seen = true;
      // Sources write to their next neighbour first: read in the order in which chunks arrive.
      const int remote = item - local_items;
      const int source = (view.rank + view.num_ranks - 1 - remote % peers) % view.num_ranks;
      const int chunk = remote / peers;
      const bool landed =
          team.thread() != 0 || wait_for_flag(view, chunk_flag(view, epoch, source, chunk), epoch,
                                              Phase::kReceiveChunk, source);
      if (!team.broadcast(landed)) return;
      expand_chunk(p, team, stream, epoch, source, chunk);
    }
  }
  // With no chunk to wait for, a call must still not run ahead of a peer that makes another one.
  if (!heads_seen) wait_for_heads(view, team, epoch);
}

__global__ void __launch_bounds__(kThreads)
    dispatch_kernel(const __grid_constant__ DispatchParams p) {
  extern __shared__ __align__(128) char dynamic_shared[];
  __shared__ __align__(128) char zeros[kSegmentBytes];
  __shared__ BlockState block;
  Stream stream(dynamic_shared);
  for (int i = threadIdx.x; i < kSegmentBytes; i += kThreads) zeros[i] = 0;
  fence_shared_for_bulk();
  if (enter(p.view,
            block)) {  // which has a barrier behind the mbarriers' and the zeros' first values
    const int num_tokens = p.routing.num_tokens;
    const Team team(teams_per_block(num_tokens), block.mailboxes);
    const int num_chunks = ceil_div(num_tokens, slots_per_chunk(num_tokens));
    const int sender = sender_index(p.view, block, p.send_blocks);
    if (sender >= 0 && sender < p.send_blocks) {
      if (sender == 0 && team.index() == 0) raise_heads(p.view, team, block.epoch);
      delay_for_test(p.view, Phase::kSend);
      send(p, team, stream, block.epoch, num_chunks);
    }
    receive(p, team, stream, zeros, block.epoch, num_chunks);
  }
  wait_until_stored();  // Nothing of this block is under way when it leaves.
  leave(p.view, block, p.fills, p.num_arrays);
}

}  // namespace

cudaError_t LaunchDispatch(const DispatchParams& params, int num_blocks, cudaStream_t stream) {
  return Launch(dispatch_kernel, num_blocks, kThreads, kStreamSharedBytes, stream, params);
}

cudaError_t LoadDispatch() {
  return cudaFuncSetAttribute(dispatch_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              kStreamSharedBytes);
}

}  // namespace moe_a2a
