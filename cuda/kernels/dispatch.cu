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

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarpThreads;
constexpr int kRowsPerZeroItem = 64;

// Writes the tokens of one chunk of slots into the zone at `destination`.
__device__ void send_chunk(const DispatchParams& p, uint64_t epoch, int destination, int chunk) {
  const RankView& view = p.view;
  const int per_chunk = slots_per_chunk(p.routing.num_tokens);
  const int end = min((chunk + 1) * per_chunk, p.routing.num_tokens);
  char* to_zone = zone(view, destination, epoch, view.rank, p.zone_bytes);
  for (int slot = chunk * per_chunk + threadIdx.x / kWarpThreads; slot < end; slot += kWarps) {
    const int token =
        p.routing.slot_token[static_cast<int64_t>(destination) * p.routing.num_tokens + slot];
    if (token < 0) continue;
    if (token >= p.routing.num_tokens) {
      fail(view, ErrorKind::kBounds, Phase::kSend, destination, epoch, p.routing.num_tokens, token);
      return;
    }
    for (int a = 0; a < p.num_arrays; ++a) {
      const MovedArray& array = p.arrays[a];
      copy_row(to_zone + array.zone_offset + slot * row_stride(array.row_bytes),
               array.in + token * array.row_bytes, array.row_bytes, array.width);
    }
  }
}

// Writes one landed token to each of its rows. One warp; lane k holds the row of choice k, or < 0.
__device__ void expand_row(const DispatchParams& p, const MovedArray& array, const char* landed,
                           int row) {
  if (array.choice_bytes > 0) {
    if (row < 0) return;
    const int lane = threadIdx.x % kWarpThreads;
    const char* from = landed + lane * array.choice_bytes;
    char* to = array.out + row * array.choice_bytes;
    with_width(array.width, [&](auto word, auto bytes) {
      using W = typename decltype(word)::Type;
      for (int64_t i = 0; i < array.choice_bytes / bytes.value; ++i) {
        reinterpret_cast<W*>(to)[i] = load_landed(reinterpret_cast<const W*>(from) + i);
      }
    });
    return;
  }
  const uint32_t choices = __ballot_sync(kAllLanes, row >= 0);
  with_width(array.width, [&](auto word, auto bytes) {
    using W = typename decltype(word)::Type;
    const int lane = threadIdx.x % kWarpThreads;
    const W* from = reinterpret_cast<const W*>(landed);
    const int64_t num_words = array.row_bytes / bytes.value;
    constexpr int kUnroll = 8;
    for (int64_t base = 0; base < num_words; base += kUnroll * kWarpThreads) {
      W v[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t i = base + u * kWarpThreads + lane;
        if (i < num_words) v[u] = load_landed(from + i);
      }
      for (uint32_t left = choices; left != 0; left &= left - 1) {
        const int64_t to_row = __shfl_sync(kAllLanes, row, __ffs(left) - 1);
        W* to = reinterpret_cast<W*>(array.out + to_row * array.row_bytes);
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const int64_t i = base + u * kWarpThreads + lane;
          if (i < num_words) to[i] = v[u];
        }
      }
    }
  });
}

// Expands one chunk of slots of `source`; the own rank's tokens come straight from the operand.
__device__ void expand_chunk(const DispatchParams& p, uint64_t epoch, int source, int chunk) {
  const RankView& view = p.view;
  const RoutingView& routing = p.routing;
  const int per_chunk = slots_per_chunk(routing.num_tokens);
  const int end = min((chunk + 1) * per_chunk, routing.num_tokens);
  const int lane = threadIdx.x % kWarpThreads;
  const char* from_zone = zone(view, view.rank, epoch, source, p.zone_bytes);
  for (int slot = chunk * per_chunk + threadIdx.x / kWarpThreads; slot < end; slot += kWarps) {
    const int64_t slot_index = static_cast<int64_t>(source) * routing.num_tokens + slot;
    int row = lane < routing.top_k ? routing.slot_rows[slot_index * routing.top_k + lane] : -1;
    if (row >= routing.capacity) {
      fail(view, ErrorKind::kBounds, Phase::kReceiveChunk, source, epoch, routing.capacity, row);
      row = -1;
    }
    if (__ballot_sync(kAllLanes, row >= 0) == 0) continue;
    const int token = source == view.rank ? routing.slot_token[slot_index] : 0;
    for (int a = 0; a < p.num_arrays; ++a) {
      const MovedArray& array = p.arrays[a];
      const char* landed = source == view.rank
                               ? array.in + token * array.row_bytes
                               : from_zone + array.zone_offset + slot * row_stride(array.row_bytes);
      expand_row(p, array, landed, row);
    }
  }
}

// Zeroes those of a range of rows that carry no token.
__device__ void zero_rows(const DispatchParams& p, int first) {
  const int end = min(first + kRowsPerZeroItem, p.routing.capacity);
  for (int row = first + threadIdx.x / kWarpThreads; row < end; row += kWarps) {
    if (p.routing.row_rank[row] >= 0) continue;
    for (int a = 0; a < p.num_arrays; ++a) {
      const MovedArray& array = p.arrays[a];
      const int64_t bytes = array.choice_bytes > 0 ? array.choice_bytes : array.row_bytes;
      zero_row(array.out + row * bytes, bytes, array.width);
    }
  }
}

__device__ void send(const DispatchParams& p, BlockState& block, int num_chunks) {
  const RankView& view = p.view;
  if (block.admission == 0) raise_heads(view, block.epoch);
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
    send_chunk(p, block.epoch, destination, chunk);
    raise_chunk(view, block.epoch, destination, chunk);
  }
}

__device__ void receive(const DispatchParams& p, BlockState& block, int num_chunks) {
  const RankView& view = p.view;
  const int zero_items = ceil_div(p.routing.capacity, kRowsPerZeroItem);
  const int local_items = num_chunks + zero_items;
  const int peers = view.num_ranks - 1;
  bool heads_seen = false;
  while (true) {
    const int item = take_item(control(view).next_receive, block);
    if (item >= local_items + num_chunks * peers) break;
    if (item < num_chunks) {
      expand_chunk(p, block.epoch, view.rank, item);
    } else if (item < local_items) {
      zero_rows(p, (item - num_chunks) * kRowsPerZeroItem);
    } else {
      if (!heads_seen && !wait_for_heads(view, block)) return;
      if (!heads_seen) delay_for_test(view, Phase::kReceiveChunk);
      heads_seen = true;
      // Sources write to their next neighbour first: read in the order in which chunks arrive.
      const int remote = item - local_items;
      const int source = (view.rank + view.num_ranks - 1 - remote % peers) % view.num_ranks;
      const int chunk = remote / peers;
      const bool landed = threadIdx.x != 0 ||
                          wait_for_flag(view, chunk_flag(view, block.epoch, source, chunk),
                                        block.epoch, Phase::kReceiveChunk, source);
      if (!agree(block, landed)) return;
      expand_chunk(p, block.epoch, source, chunk);
    }
  }
  // With no chunk to wait for, a call must still not run ahead of a peer that makes another one.
  if (!heads_seen) wait_for_heads(view, block);
}

__global__ void __launch_bounds__(kThreads) dispatch_kernel(
    const __grid_constant__ DispatchParams p) {
  __shared__ BlockState block;
  if (enter(p.view, block)) {
    const int num_chunks =
        ceil_div(p.routing.num_tokens, slots_per_chunk(p.routing.num_tokens));
    if (static_cast<int>(block.admission) < p.send_blocks) send(p, block, num_chunks);
    receive(p, block, num_chunks);
  }
  leave(p.view, block, p.fills, p.num_arrays);
}

}  // namespace

cudaError_t LaunchDispatch(const DispatchParams& params, int num_blocks, cudaStream_t stream) {
  dispatch_kernel<<<num_blocks, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t LoadDispatch() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, dispatch_kernel);
}

}  // namespace moe_a2a
