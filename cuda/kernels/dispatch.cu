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
#include "kernels/launch.h"
#include "kernels/load.h"

namespace moe_a2a {
namespace {

constexpr int kRowsPerZeroItem = 64;

// Writes the tokens of one chunk of slots into the zone at `destination`.
__device__ void send_chunk(const DispatchParams& p, const Team& team, uint64_t epoch,
                           int destination, int chunk) {
  const RankView& view = p.view;
  const int64_t per_chunk = slots_per_chunk(p.routing.num_tokens);
  const int end = min((chunk + 1) * per_chunk, int64_t{p.routing.num_tokens});
  char* to_zone = zone(view, destination, epoch, view.rank, p.zone_bytes);
  for (int slot = chunk * per_chunk + team.row; slot < end; slot += team.rows) {
    const int token = p.routing.slot_token[int64_t{destination} * p.routing.num_tokens + slot];
    if (token < 0) continue;
    if (token >= p.routing.num_tokens) {
      fail(view, ErrorKind::kBounds, Phase::kSend, destination, epoch, p.routing.num_tokens, token);
      return;
    }
    for (int a = 0; a < p.num_arrays; ++a) {
      const MovedArray& array = p.arrays[a];
      copy_row(team, to_zone + array.zone_offset + slot * row_stride(array.row_bytes),
               array.in + token * array.row_bytes, array.row_bytes, array.width);
    }
  }
}

// Writes one landed token to each of its rows. Lane k of every warp holds the row of choice k, or < 0.
__device__ void expand_row(const MovedArray& array, const Team& team, const char* landed, int row) {
  if (array.choice_bytes > 0) {
    if (row < 0 || !team.is_first_warp()) return;
    copy_choice(array.out + row * array.choice_bytes, landed + lane_index() * array.choice_bytes,
                array.choice_bytes, array.width);
    return;
  }
  const uint32_t choices = __ballot_sync(kAllLanes, row >= 0);
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
__device__ void expand_chunk(const DispatchParams& p, const Team& team, uint64_t epoch, int source,
                             int chunk) {
  const RankView& view = p.view;
  const RoutingView& routing = p.routing;
  const int64_t per_chunk = slots_per_chunk(routing.num_tokens);
  const int end = min((chunk + 1) * per_chunk, int64_t{routing.num_tokens});
  const int lane = lane_index();
  const char* from_zone = zone(view, view.rank, epoch, source, p.zone_bytes);
  for (int slot = chunk * per_chunk + team.row; slot < end; slot += team.rows) {
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
      expand_row(array, team, landed, row);
    }
  }
}

// Zeroes those of a range of rows that carry no token.
__device__ void zero_rows(const DispatchParams& p, const Team& team, int first) {
  const int end = min(first + kRowsPerZeroItem, p.routing.capacity);
  for (int row = first + team.row; row < end; row += team.rows) {
    if (p.routing.row_rank[row] >= 0) continue;
    for (int a = 0; a < p.num_arrays; ++a) {
      const MovedArray& array = p.arrays[a];
      const int64_t bytes = array.choice_bytes > 0 ? array.choice_bytes : array.row_bytes;
      zero_row(team, array.out + row * bytes, bytes, array.width);
    }
  }
}

__device__ void send(const DispatchParams& p, const Team& team, BlockState& block, int num_chunks) {
  const RankView& view = p.view;
  if (sender_index(view, block, p.send_blocks) == 0) raise_heads(view, block.epoch);
  delay_for_test(view, Phase::kSend);
  const int peers = view.num_ranks - 1;
  const int num_items = num_chunks * peers;
  Credits credits;
  while (true) {
    const int item = take_item(control(view).next_send, block);
    if (item >= num_items) return;
    const int destination = (view.rank + 1 + item % peers) % view.num_ranks;
    const int chunk = item / peers;
    if (!may_write(view, block, credits, destination)) return;
    if (breaks(view, kFlagBeforeRows)) raise_chunk(view, block.epoch, destination, chunk);
    send_chunk(p, team, block.epoch, destination, chunk);
    raise_chunk(view, block.epoch, destination, chunk);
  }
}

__device__ void receive(const DispatchParams& p, const Team& team, BlockState& block,
                        int num_chunks) {
  const RankView& view = p.view;
  const int zero_items = ceil_div(p.routing.capacity, kRowsPerZeroItem);
  const int local_items = num_chunks + zero_items;
  const int peers = view.num_ranks - 1;
  bool heads_seen = false;
  while (true) {
    const int item = take_item(control(view).next_receive, block);
    if (item >= local_items + num_chunks * peers) break;
    if (item < num_chunks) {
      expand_chunk(p, team, block.epoch, view.rank, item);
    } else if (item < local_items) {
      zero_rows(p, team, (item - num_chunks) * kRowsPerZeroItem);
    } else {
      if (!heads_seen && !wait_for_heads(view, block)) return;
      if (!heads_seen) delay_for_test(view, Phase::kReceiveChunk);
      heads_seen = true;
      // Sources write to their next neighbour first: read in the order in which chunks arrive.
      const int remote = item - local_items;
      const int source = (view.rank + view.num_ranks - 1 - remote % peers) % view.num_ranks;
      const int chunk = remote / peers;
      const bool landed =
          threadIdx.x != 0 || wait_for_flag(view, chunk_flag(view, block.epoch, source, chunk),
                                            block.epoch, Phase::kReceiveChunk, source);
      if (!agree(block, landed)) return;
      expand_chunk(p, team, block.epoch, source, chunk);
    }
  }
  // With no chunk to wait for, a call must still not run ahead of a peer that makes another one.
  if (!heads_seen) wait_for_heads(view, block);
}

__global__ void __launch_bounds__(kThreads)
    dispatch_kernel(const __grid_constant__ DispatchParams p) {
  __shared__ BlockState block;
  if (enter(p.view, block)) {
    const Team team(rows_per_pass(p.routing.num_tokens));
    const int num_chunks = ceil_div(p.routing.num_tokens, slots_per_chunk(p.routing.num_tokens));
    const int sender = sender_index(p.view, block, p.send_blocks);
    if (sender >= 0 && sender < p.send_blocks) send(p, team, block, num_chunks);
    receive(p, team, block, num_chunks);
  }
  leave(p.view, block, p.fills, p.num_arrays);
}

}  // namespace

cudaError_t LaunchDispatch(const DispatchParams& params, int num_blocks, cudaStream_t stream) {
  return Launch(dispatch_kernel, num_blocks, kThreads, 0, stream, params);
}

cudaError_t LoadDispatch() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, dispatch_kernel);
}

}  // namespace moe_a2a
