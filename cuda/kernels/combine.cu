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
#include "device/stream.cuh"
#include "device/sum.cuh"
#include "kernels/launch.h"
#include "kernels/load.h"

namespace moe_a2a {
namespace {

constexpr int kNoChoice = -1;  // in slot_rows; -2 is a choice whose row was dropped

// Lane k's row of a slot's choice k: >= 0, or why there is none.
__device__ int row_of_choice(const CombineParams& p, int source, int slot, uint64_t epoch) {
  const RoutingView& routing = p.routing;
  if (lane_index() >= routing.top_k) return kNoChoice;
  const int64_t slot_index = int64_t{source} * routing.num_tokens + slot;
  const int row = routing.slot_rows[slot_index * routing.top_k + lane_index()];
  if (row < routing.capacity) return row;
  fail(p.view, ErrorKind::kBounds, Phase::kSend, source, epoch, routing.capacity, row);
  return kNoChoice;
}

// Elements that a thread reads at once: 16 bytes of the wider of the two types.
template <typename T, typename Wire>
constexpr int kVector = kVectorBytes / (sizeof(T) > sizeof(Wire) ? sizeof(T) : sizeof(Wire));

// The partial sum of one slot's rows, rounded and stored.
template <typename T, typename Wire, int kCount>
__device__ __forceinline__ void send_sum(const CombineParams& p, const SummedArray& array,
                                         const Team& team, int row, uint32_t choices, Wire* to) {
  for_each_piece<kCount>(team, array.elements, [&](const Piece<kCount>& piece) {
    sum_rows<T>(p, array, row, choices, piece).template rounded<Wire>().store(to, piece);
  });
}

// Lists a token's own rows, choice by choice, behind `before` other sources. Lane k holds the row of
// choice k, or < 0.
__device__ void list_own_rows(const CombineParams& p, const SummedArray& array, Stream& stream,
                              int before, int row, uint32_t choices, int64_t row_bytes) {
  if (row < 0) return;
  const bool weighted = p.num_pairs > 0;
  const char* rows = static_cast<const char*>(weighted ? p.pair_rows[0] : array.rows);
  const int place = before + __popc(choices & ((1u << lane_index()) - 1));
  stream.shared->sources[place] = rows + row * row_bytes;
  stream.shared->factors[place] = weighted ? p.pair_weights[0][row] : 1.f;
}

// Writes the partial sums of one chunk of slots into the zone at their home.
template <typename T, typename Wire>
__device__ __forceinline__ void send_chunk(const CombineParams& p, const Team& team, Stream& stream,
                                           uint64_t epoch, int home, int chunk) {
  const RankView& view = p.view;
  const int64_t per_chunk = slots_per_chunk(p.routing.num_tokens);
  const int end = min((chunk + 1) * per_chunk, int64_t{p.routing.num_tokens});
  char* to_zone = zone(view, home, epoch, view.rank, p.zone_bytes);
  for (int slot = chunk * per_chunk; slot < end; ++slot) {
    const int row = row_of_choice(p, home, slot, epoch);
    if (__ballot_sync(kAllLanes, row != kNoChoice) == 0) continue;
    const uint32_t choices = __ballot_sync(kAllLanes, row >= 0);
    for (int a = 0; a < p.num_summed; ++a) {
      const SummedArray& array = p.summed[a];
      Wire* to = reinterpret_cast<Wire*>(to_zone + array.zone_offset +
                                         slot * row_stride(array.elements * sizeof(Wire)));
      if (std::is_same_v<T, Wire> && array.streamed) {
        const int64_t row_bytes = array.elements * sizeof(T);
        list_own_rows(p, array, stream, 0, row, choices, row_bytes);
        __syncwarp();
        const int rows = __popc(choices);
        stream_sum<T>(stream, team, {0, rows, rows}, row_bytes, reinterpret_cast<char*>(to));
        __syncwarp();  // The list may be written again.
      } else if (array.vectorized) {
        send_sum<T, Wire, kVector<T, Wire>>(p, array, team, row, choices, to);
      } else {
        send_sum<T, Wire, 1>(p, array, team, row, choices, to);
      }
    }
    if (!team.is_first_warp() || lane_index() >= p.routing.top_k) continue;
    for (int a = 0; a < p.num_moved; ++a) {
      const MovedArray& array = p.moved[a];
      copy_choice(to_zone + array.zone_offset + slot * row_stride(array.row_bytes) +
                      lane_index() * array.choice_bytes,
                  row >= 0 ? array.in + row * array.choice_bytes : nullptr, array.choice_bytes,
                  array.width);
    }
  }
}

// Waits until all that other ranks send for this token has landed. Each warp of a team for itself.
__device__ bool wait_for_token(const CombineParams& p, uint64_t epoch, int token) {
  const RankView& view = p.view;
  bool landed = true;
  for (int rank = lane_index(); rank < view.num_ranks; rank += kWarpThreads) {
    const int slot = p.routing.token_slot[int64_t{token} * view.num_ranks + rank];
    if (slot < 0) continue;
    if (slot >= p.routing.num_tokens) {
      fail(view, ErrorKind::kBounds, Phase::kReceiveChunk, rank, epoch, p.routing.num_tokens, slot);
      landed = false;
      continue;
    }
    if (rank == view.rank) continue;
    const int chunk = slot / slots_per_chunk(p.routing.num_tokens);
    landed = landed && wait_for_flag(view, chunk_flag(view, epoch, rank, chunk), epoch,
                                     Phase::kReceiveChunk, rank);
  }
  const bool all = __all_sync(kAllLanes, landed);
  __syncwarp();  // A vote orders no memory: the lanes' loads come after every lane's acquire.
  return all;
}

// A token whose partial sums have landed.
struct Arrived {
  const int32_t* slots;  // [num_ranks]: where its partial sums lie, < 0 where there is none
  uint64_t epoch;
  int own_row;  // lane k: row of choice k on this rank
  uint32_t own_choices;
};

__device__ const char* landed_at(const CombineParams& p, const Arrived& token, int rank,
                                 int64_t zone_offset, int64_t row_bytes) {
  return zone(p.view, p.view.rank, token.epoch, rank, p.zone_bytes) + zone_offset +
         token.slots[rank] * row_stride(row_bytes);
}

// Sums one token's partial sums, in rank order; two are read at a time.
template <typename T, typename Wire, int kCount>
__device__ __forceinline__ void sum_home(const CombineParams& p, const SummedArray& array,
                                         const Team& team, const Arrived& token, T* to) {
  const RankView& view = p.view;
  const auto one = [](int) { return 1.f; };
  for_each_piece<kCount>(team, array.elements, [&](const Piece<kCount>& piece) {
    const Packs<Wire, kCount> own =
        sum_rows<T>(p, array, token.own_row, token.own_choices, piece).template rounded<Wire>();
    Accumulator<kCount> acc;
    acc.clear();
    const auto load = [&](Packs<Wire, kCount>& packs, int rank) {
      if (rank >= view.num_ranks || token.slots[rank] < 0) return false;
      if (rank == view.rank) {
        packs = own;
      } else {
        packs.load(reinterpret_cast<const Wire*>(
                       landed_at(p, token, rank, array.zone_offset, array.elements * sizeof(Wire))),
                   piece);
      }
      return true;
    };
    for (int rank = 0; rank < view.num_ranks; rank += 2) {
      Packs<Wire, kCount> even, odd;
      const bool has_even = load(even, rank);
      const bool has_odd = load(odd, rank + 1);
      if (has_even) acc.add(even, one);
      if (has_odd) acc.add(odd, one);
    }
    acc.template rounded<T>().store(to, piece);
  });
}

// The same, streamed.
template <typename T>
__device__ __forceinline__ void stream_home(const CombineParams& p, const SummedArray& array,
                                            const Team& team, Stream& stream, const Arrived& token,
                                            T* to) {
  const RankView& view = p.view;
  const int64_t row_bytes = array.elements * sizeof(T);
  const int rank = lane_index();
  const bool landed = rank < view.num_ranks && rank != view.rank && token.slots[rank] >= 0;
  const uint32_t before = __ballot_sync(kAllLanes, landed && rank < view.rank);
  const uint32_t after = __ballot_sync(kAllLanes, landed && rank > view.rank);
  const SourceCounts counts = {__popc(before), __popc(token.own_choices),
                               __popc(before) + __popc(token.own_choices) + __popc(after)};
  if (landed) {
    const uint32_t earlier = (1u << rank) - 1;
    const int place = rank < view.rank ? __popc(before & earlier)
                                       : counts.before + counts.own + __popc(after & earlier);
    stream.shared->sources[place] = landed_at(p, token, rank, array.zone_offset, row_bytes);
    stream.shared->factors[place] = 1.f;
  }
  list_own_rows(p, array, stream, counts.before, token.own_row, token.own_choices, row_bytes);
  fence_global_for_bulk();  // The flags of the landed rows have been acquired.
  __syncwarp();
  stream_sum<T>(stream, team, counts, row_bytes, reinterpret_cast<char*>(to));
  __syncwarp();  // The list may be written again.
}

// Writes one token's results.
template <typename T, typename Wire>
__device__ __forceinline__ void bring_home(const CombineParams& p, const Team& team, Stream& stream,
                                           uint64_t epoch, int token_index) {
  const RankView& view = p.view;
  Arrived token = {p.routing.token_slot + int64_t{token_index} * view.num_ranks, epoch, kNoChoice,
                   0};
  const int own_slot = token.slots[view.rank];
  if (own_slot >= 0) token.own_row = row_of_choice(p, view.rank, own_slot, epoch);
  token.own_choices = __ballot_sync(kAllLanes, token.own_row >= 0);
  for (int a = 0; a < p.num_summed; ++a) {
    const SummedArray& array = p.summed[a];
    T* to = static_cast<T*>(array.out) + token_index * array.elements;
    if (std::is_same_v<T, Wire> && array.streamed) {
      stream_home<T>(p, array, team, stream, token, to);
    } else if (array.vectorized) {
      sum_home<T, Wire, kVector<T, Wire>>(p, array, team, token, to);
    } else {
      sum_home<T, Wire, 1>(p, array, team, token, to);
    }
  }
  if (!team.is_first_warp() || lane_index() >= p.routing.top_k) return;
  const int64_t choice = int64_t{token_index} * p.routing.top_k + lane_index();
  for (int a = 0; a < p.num_moved; ++a) {
    const MovedArray& array = p.moved[a];
    const int rank = p.routing.choice_rank[choice];
    const char* from = nullptr;
    if (rank == view.rank) {
      if (token.own_row >= 0) from = array.in + token.own_row * array.choice_bytes;
    } else if (rank >= 0 && rank < view.num_ranks && token.slots[rank] >= 0) {
      from = landed_at(p, token, rank, array.zone_offset, array.row_bytes) +
             lane_index() * array.choice_bytes;
    }
    copy_choice(array.out + choice * array.choice_bytes, from, array.choice_bytes, array.width);
  }
}

template <typename T, typename Wire>
__device__ __forceinline__ void send(const CombineParams& p, const Team& team, Stream& stream,
                                     uint64_t epoch, int num_chunks) {
  const RankView& view = p.view;
  const int peers = view.num_ranks - 1;
  const int num_items = num_chunks * peers;
  Credits credits;
  while (true) {
    const int item = take_item(control(view).next_send, team);
    if (item >= num_items) return;
    const int home = (view.rank + 1 + item % peers) % view.num_ranks;
    const int chunk = item / peers;
    if (!may_write(view, team, epoch, credits, home)) return;
    if (breaks(view, kFlagBeforeRows)) raise_chunk(view, team, epoch, home, chunk);
    send_chunk<T, Wire>(p, team, stream, epoch, home, chunk);
    raise_chunk(view, team, epoch, home, chunk);
  }
}

template <typename T, typename Wire>
__device__ __forceinline__ void receive(const CombineParams& p, const Team& team, Stream& stream,
                                        uint64_t epoch) {
  const RankView& view = p.view;
  if (!wait_for_heads(view, team, epoch)) return;
  delay_for_test(view, Phase::kReceiveChunk);
  while (true) {
    const int token = take_item(control(view).next_receive, team);
    if (token >= p.routing.num_tokens) return;
    if (wait_for_token(p, epoch, token)) bring_home<T, Wire>(p, team, stream, epoch, token);
  }
}

template <typename T, typename Wire>
__global__ void __launch_bounds__(kThreads)
    combine_kernel(const __grid_constant__ CombineParams p) {
  extern __shared__ __align__(128) char dynamic_shared[];
  __shared__ BlockState block;
  Stream stream(dynamic_shared);  // enter() has a barrier behind its mbarriers' first values
  if (enter(p.view, block)) {
    const int num_tokens = p.routing.num_tokens;
    const Team team(teams_per_block(num_tokens), block.mailboxes);
    const int num_chunks = ceil_div(num_tokens, slots_per_chunk(num_tokens));
    const int sender = sender_index(p.view, block, p.send_blocks);
    if (sender >= 0 && sender < p.send_blocks) {
      if (sender == 0 && team.index() == 0) raise_heads(p.view, team, block.epoch);
      delay_for_test(p.view, Phase::kSend);
      send<T, Wire>(p, team, stream, block.epoch, num_chunks);
    }
    receive<T, Wire>(p, team, stream, block.epoch);
  }
  leave(p.view, block, p.fills, p.num_summed + p.num_moved);
}

using Kernel = void (*)(CombineParams);

template <typename T>
Kernel kernel_for(bool float32_wire) {
  return float32_wire ? combine_kernel<T, float> : combine_kernel<T, T>;
}

Kernel kernel_for(ElementType type, bool float32_wire) {
  switch (type) {
    case ElementType::kBFloat16: return kernel_for<__nv_bfloat16>(float32_wire);
    case ElementType::kFloat16: return kernel_for<__half>(float32_wire);
    case ElementType::kFloat32: return kernel_for<float>(float32_wire);
  }
  return nullptr;
}

}  // namespace

cudaError_t LaunchCombine(const CombineParams& params, int num_blocks, cudaStream_t stream) {
  const Kernel kernel = kernel_for(params.type, params.float32_wire);
  return Launch(kernel, num_blocks, kThreads, kStreamSharedBytes, stream, params);
}

cudaError_t LoadCombine() {
  for (ElementType type : {ElementType::kBFloat16, ElementType::kFloat16, ElementType::kFloat32}) {
    for (bool float32_wire : {false, true}) {
      const cudaError_t error =
          cudaFuncSetAttribute(kernel_for(type, float32_wire),
                               cudaFuncAttributeMaxDynamicSharedMemorySize, kStreamSharedBytes);
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

}  // namespace moe_a2a
