// combine: every token's rows come home and are summed; the transpose of dispatch.
//
// Holds afterwards: out[token] = sum over ranks, in rank order, of round_to_wire(sum over the token's
// rows on that rank, in order of choice, of weight * row), all sums in float32. A rank without a slot
// for the token is skipped. Choice scalars come home unsummed: out[token, k] is the scalar of its row,
// zero where the choice has none.
//
// Layout: a zone holds, per summed array, [num_tokens slots, row_stride] of partial sums in the wire
// dtype, and per choice array [num_tokens slots, top_k]. Slot s of source r's zone at r's home is what
// dispatch's slot s was: the expert's rank answers into the slot that the token came in.
//
// Who waits for whom: expert-side blocks wait for credits of an earlier epoch only. Home blocks wait for
// the head of every rank, then per token for the chunks that hold its partial sums. The own rank's
// partial sum never enters a zone, but is rounded like the others.
//
// A token whose rows were all dropped for capacity still gets a row of zeros: its home sums that slot.
//
// Launch: any number of blocks; the first `send_blocks` to start send first.
#include <type_traits>

#include "device/exchange.cuh"
#include "device/sum.cuh"
#include "kernels/launch.h"
#include "kernels/load.h"

namespace moe_a2a {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarpThreads;
constexpr int kTokensPerItem = kWarps;
constexpr int kNoChoice = -1;  // in slot_rows; -2 is a choice whose row was dropped

// One choice's bytes, or zeros; one lane.
__device__ void copy_choice(char* to, const char* from, const MovedArray& array) {
  with_width(array.width, [&](auto word, auto bytes) {
    using W = typename decltype(word)::Type;
    for (int64_t i = 0; i < array.choice_bytes / bytes.value; ++i) {
      reinterpret_cast<W*>(to)[i] =
          from == nullptr ? W{} : load_landed(reinterpret_cast<const W*>(from) + i);
    }
  });
}

// Lane k's row of a slot's choice k: >= 0, or why there is none.
__device__ int row_of_choice(const CombineParams& p, int source, int slot, uint64_t epoch) {
  const RoutingView& routing = p.routing;
  const int lane = threadIdx.x % kWarpThreads;
  if (lane >= routing.top_k) return kNoChoice;
  const int64_t slot_index = static_cast<int64_t>(source) * routing.num_tokens + slot;
  const int row = routing.slot_rows[slot_index * routing.top_k + lane];
  if (row < routing.capacity) return row;
  fail(p.view, ErrorKind::kBounds, Phase::kSend, source, epoch, routing.capacity, row);
  return kNoChoice;
}

// Writes the partial sums of one chunk of slots into the zone at their home.
__device__ void send_chunk(const CombineParams& p, uint64_t epoch, int home, int chunk) {
  const RankView& view = p.view;
  const int per_chunk = slots_per_chunk(p.routing.num_tokens);
  const int end = min((chunk + 1) * per_chunk, p.routing.num_tokens);
  const int lane = threadIdx.x % kWarpThreads;
  char* to_zone = zone(view, home, epoch, view.rank, p.zone_bytes);
  for (int slot = chunk * per_chunk + threadIdx.x / kWarpThreads; slot < end; slot += kWarps) {
    const int row = row_of_choice(p, home, slot, epoch);
    if (__ballot_sync(kAllLanes, row != kNoChoice) == 0) continue;
    const uint32_t choices = __ballot_sync(kAllLanes, row >= 0);
    for (int a = 0; a < p.num_summed; ++a) {
      const SummedArray& array = p.summed[a];
      with_types(array, [&](auto element, auto wire, auto count) {
        using T = decltype(element);
        using Wire = decltype(wire);
        constexpr int kCount = count.value;
        Wire* to = reinterpret_cast<Wire*>(to_zone + array.zone_offset +
                                           slot * row_stride(array.elements * sizeof(Wire)));
        constexpr int64_t kStep = kSumUnroll * kWarpThreads;
        for (int64_t base = 0; base * kCount < array.elements; base += kStep) {
          Accumulator<kCount> acc;
          sum_rows<T, kCount>(p, array, row, choices, base, acc);
          store_rounded(to, acc, base, array.elements);
        }
      });
    }
    for (int a = 0; a < p.num_moved; ++a) {
      const MovedArray& array = p.moved[a];
      if (lane >= p.routing.top_k) continue;
      copy_choice(to_zone + array.zone_offset + slot * row_stride(array.row_bytes) +
                      lane * array.choice_bytes,
                  row >= 0 ? array.in + row * array.choice_bytes : nullptr, array);
    }
    __syncwarp();
  }
}

// Waits until all that other ranks send for this token has landed. One warp.
__device__ bool wait_for_token(const CombineParams& p, uint64_t epoch, int token) {
  const RankView& view = p.view;
  bool landed = true;
  for (int rank = threadIdx.x % kWarpThreads; rank < view.num_ranks; rank += kWarpThreads) {
    const int slot = p.routing.token_slot[static_cast<int64_t>(token) * view.num_ranks + rank];
    if (rank == view.rank || slot < 0) continue;
    if (slot >= p.routing.num_tokens) {
      fail(view, ErrorKind::kBounds, Phase::kReceiveChunk, rank, epoch, p.routing.num_tokens, slot);
      landed = false;
      continue;
    }
    const int chunk = slot / slots_per_chunk(p.routing.num_tokens);
    landed = landed && wait_for_flag(view, chunk_flag(view, epoch, rank, chunk), epoch,
                                     Phase::kReceiveChunk, rank);
  }
  return __all_sync(kAllLanes, landed);
}

// Sums one token's partial sums, in rank order. One warp.
__device__ void bring_home(const CombineParams& p, uint64_t epoch, int token) {
  const RankView& view = p.view;
  const int32_t* slots = p.routing.token_slot + static_cast<int64_t>(token) * view.num_ranks;
  const int own_slot = slots[view.rank];
  const int own_row = own_slot < 0 ? kNoChoice : row_of_choice(p, view.rank, own_slot, epoch);
  const uint32_t own_choices = __ballot_sync(kAllLanes, own_row >= 0);
  for (int a = 0; a < p.num_summed; ++a) {
    const SummedArray& array = p.summed[a];
    with_types(array, [&](auto element, auto wire, auto count) {
      using T = decltype(element);
      using Wire = decltype(wire);
      constexpr int kCount = count.value;
      T* to = static_cast<T*>(array.out) + token * array.elements;
      constexpr int64_t kStep = kSumUnroll * kWarpThreads;
      for (int64_t base = 0; base * kCount < array.elements; base += kStep) {
        Accumulator<kCount> acc;
        acc.clear();
        for (int rank = 0; rank < view.num_ranks; ++rank) {
          const int slot = slots[rank];
          if (slot < 0) continue;
          if (rank == view.rank) {
            Accumulator<kCount> own;
            sum_rows<T, kCount>(p, array, own_row, own_choices, base, own);
            add_rounded<Wire>(acc, own);
          } else {
            const char* from = zone(view, view.rank, epoch, rank, p.zone_bytes) +
                               array.zone_offset +
                               slot * row_stride(array.elements * sizeof(Wire));
            add_row<Wire, kCount>(acc, reinterpret_cast<const Wire*>(from), base, array.elements,
                                  [](int64_t) { return 1.f; });
          }
        }
        store_rounded(to, acc, base, array.elements);
      }
    });
  }
  const int lane = threadIdx.x % kWarpThreads;
  if (p.num_moved == 0 || lane >= p.routing.top_k) return;
  const int64_t choice = static_cast<int64_t>(token) * p.routing.top_k + lane;
  const int rank = p.routing.choice_rank[choice];
  for (int a = 0; a < p.num_moved; ++a) {
    const MovedArray& array = p.moved[a];
    const char* from = nullptr;
    if (rank == view.rank) {
      if (own_row >= 0) from = array.in + own_row * array.choice_bytes;
    } else if (rank >= 0) {
      from = zone(view, view.rank, epoch, rank, p.zone_bytes) + array.zone_offset +
             slots[rank] * row_stride(array.row_bytes) + lane * array.choice_bytes;
    }
    copy_choice(array.out + choice * array.choice_bytes, from, array);
  }
}

__device__ void send(const CombineParams& p, BlockState& block, int num_chunks) {
  const RankView& view = p.view;
  if (block.admission == 0) raise_heads(view, block.epoch);
  delay_for_test(view, Phase::kSend);
  const int peers = view.num_ranks - 1;
  const int num_items = num_chunks * peers;
  Credits credits;
  while (true) {
    const int item = take_item(control(view).next_send, block);
    if (item >= num_items) return;
    const int home = (view.rank + 1 + item % peers) % view.num_ranks;
    const int chunk = item / peers;
    if (!may_write(view, block, credits, home)) return;
    if (breaks(view, kFlagBeforeRows)) raise_chunk(view, block.epoch, home, chunk);
    send_chunk(p, block.epoch, home, chunk);
    raise_chunk(view, block.epoch, home, chunk);
  }
}

__device__ void receive(const CombineParams& p, BlockState& block) {
  const RankView& view = p.view;
  const int num_items = ceil_div(p.routing.num_tokens, kTokensPerItem);
  if (!wait_for_heads(view, block)) return;
  delay_for_test(view, Phase::kReceiveChunk);
  while (true) {
    const int item = take_item(control(view).next_receive, block);
    if (item >= num_items) return;
    const int token = item * kTokensPerItem + threadIdx.x / kWarpThreads;
    if (token < p.routing.num_tokens && wait_for_token(p, block.epoch, token)) {
      bring_home(p, block.epoch, token);
    }
  }
}

__global__ void __launch_bounds__(kThreads) combine_kernel(const __grid_constant__ CombineParams p) {
  __shared__ BlockState block;
  if (enter(p.view, block)) {
    const int num_chunks =
        ceil_div(p.routing.num_tokens, slots_per_chunk(p.routing.num_tokens));
    if (static_cast<int>(block.admission) < p.send_blocks) send(p, block, num_chunks);
    receive(p, block);
  }
  leave(p.view, block, p.fills, p.num_summed + p.num_moved);
}

}  // namespace

cudaError_t LaunchCombine(const CombineParams& params, int num_blocks, cudaStream_t stream) {
  combine_kernel<<<num_blocks, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t LoadCombine() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, combine_kernel);
}

}  // namespace moe_a2a
