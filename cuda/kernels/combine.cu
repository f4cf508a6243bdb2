// combine: sums every token's rows at its source rank. It is the transpose of dispatch.
//
// Holds afterwards: out[token] = sum over ranks, in rank order, of round_to_wire(partial sum), plus
// addend[token] if there are addends. A rank's partial sum is the sum of weight * row over the
// token's rows on this rank, in the order of choices. All sums are in float32. The sum skips ranks
// that have no slot for the token. With a token format, round_to_wire(x) is decode(encode(x))
// (docs/formats.md). Choice arrays are not summed: out[token, k] is the entry of the row of choice
// k, or zero if the choice has no row.
//
// Layout: a zone has an array [num_tokens slots, row_stride] of partial sums for each summed array.
// A slot has numbers of the wire dtype, or values and then scales. For each choice array, a zone
// has [num_tokens slots, top_k]. A rank's partial sum lands in the slot that the token had at this
// rank in dispatch.
//
// Waits: senders wait only for credits of an earlier epoch. For each token, receivers wait for the
// chunks with its partial sums. The block with the highest index waits for the head of every rank.
// A token's partial sum on its source rank needs no zone, but is rounded too. A rank that has
// dropped all rows of a token still sends zeros, because the source rank waits for this slot.
//
// Launch: any number of blocks.
#include "device/exchange.cuh"
#include "device/sum.cuh"
#include "device/wire.cuh"
#include "kernels/launch.h"
#include "kernels/table.h"

namespace moe_a2a {
namespace {

// How rows are summed. kGeneral accepts any rows and weights. kRows and kSegments use a warp's
// SourceList. kRows sums whole rows with at most one weight each. kSegments sums one row segment at
// a time: the elements of one weight, or the whole row.
enum class Sums { kGeneral, kRows, kSegments };

constexpr int kNoChoice = -1;  // in slot_rows: no row on this rank; -2: the row was dropped

// Choices of a few consecutive slots: lane i * top_k + k holds choice k of the i-th slot. All lanes
// load at the same time, so that the choices of all these slots take no longer than those of one.
struct WarpChoices {
  int row;  // negative: the choice has no row on this rank
  float weight;

  // `slot` is the slot of the choice's token in the zone of `source`; negative if it has none.
  __device__ WarpChoices(const CombineParams& p, int source, int slot, int k, uint64_t epoch)
      : row(kNoChoice), weight(1.f) {
    const RoutingView& routing = p.routing;
    // If the slot is too large, wait_for_token() reports it.
    if (slot < 0 || slot >= routing.num_tokens) return;
    row = routing.slot_rows[(int64_t{source} * routing.num_tokens + slot) * routing.top_k + k];
    if (row >= routing.capacity) {
      fail(p.view, ErrorKind::kBounds, Phase::kSend, source, epoch, routing.capacity, row);
      row = kNoChoice;
    }
    if (row >= 0 && p.listed && p.weights_per_row == 1) weight = p.pair_weights[0][row];
  }

  // Returns the choices of the i-th slot: lane k has choice k.
  __device__ WarpChoices of(int i, int top_k) const {
    const int lane = min(i * top_k + lane_index(), kWarpThreads - 1);
    WarpChoices choices = {__shfl_sync(kAllLanes, row, lane), __shfl_sync(kAllLanes, weight, lane)};
    if (lane_index() >= top_k) choices.row = kNoChoice;
    return choices;
  }

 private:
  __device__ WarpChoices(int row, float weight) : row(row), weight(weight) {}
};

// The number of elements that a thread reads at once: 16 bytes of the larger type.
template <typename T, typename Wire>
constexpr int kVector = kVectorBytes / (sizeof(T) > sizeof(Wire) ? sizeof(T) : sizeof(Wire));

template <typename T, typename Wire, int kCount>
__device__ __forceinline__ void send_sum(const CombineParams& p, const SummedArray& array,
                                         const Team& team, int row, uint32_t choices, Wire* to) {
  for_each_packs<kCount>(team, array.elements, [&](const PackOffsets<kCount>& offsets) {
    sum_rows<T>(p, array, row, choices, offsets).template rounded<Wire>().store(to, offsets);
  });
}

// A row segment, or a whole row, that a warp sums through its list in one pass.
struct ListedSegment {
  int index;
  int64_t row_bytes, first, bytes;
};

template <Sums kSums, typename Wire>
__device__ __forceinline__ bool has_one_segment(const CombineParams& p) {
  return kSums == Sums::kRows || (kIsEncoded<Wire> && p.weights_per_row <= 1);
}

template <typename T, typename Wire, Sums kSums, typename Body>
__device__ __forceinline__ void for_each_listed_segment(const CombineParams& p,
                                                        const SummedArray& array, Body&& body) {
  const int64_t row_bytes = array.elements * sizeof(T);
  const bool is_whole = has_one_segment<kSums, Wire>(p);
  const int64_t bytes = is_whole ? row_bytes : p.elements_per_weight * sizeof(T);
  const int segments = is_whole ? 1 : p.weights_per_row;
  for (int i = 0; i < segments; ++i) body(ListedSegment{i, row_bytes, i * bytes, bytes});
}

// Returns the bytes that a row of `elements` partial sums has in a slot.
template <typename Wire>
__device__ int64_t wire_bytes(int64_t elements) {
  if constexpr (kIsEncoded<Wire>) {
    return encoded_stride(Wire::kFormat, elements);
  } else {
    return elements * sizeof(Wire);
  }
}

// The wire form of a row segment of type T, and the segment's first byte in a slot.
template <typename T, typename Wire>
struct SegmentOnWire {
  RoundedWire<T> wire;
  int64_t first;

  __device__ SegmentOnWire(const CombineParams&, const ListedSegment& segment)
      : first(segment.first) {}
};
template <typename T, TokenFormat F>
struct SegmentOnWire<T, Encoded<F>> {
  int64_t first;
  EncodedWire<F, T> wire;

  __device__ SegmentOnWire(const CombineParams& p, const ListedSegment& segment)
      : first(value_bytes(F, segment.first / sizeof(T))),
        wire(p.wire_global_scale, scales_offset(F, segment.row_bytes / sizeof(T)) +
                                      scale_bytes(F, segment.first / sizeof(T)) - first) {}
};

// Lists a token's rows on this rank in the order of choices, and returns their number.
template <typename Wire, Sums kSums>
__device__ __forceinline__ int list_own_rows(const CombineParams& p, const SummedArray& array,
                                             SourceList& list, const WarpChoices& choices,
                                             const ListedSegment& segment) {
  const bool has_row = choices.row >= 0;
  const uint32_t all = __ballot_sync(kAllLanes, has_row);
  if (has_row) {
    const char* rows = static_cast<const char*>(p.num_pairs > 0 ? p.pair_rows[0] : array.rows);
    const int place = __popc(all & ((1u << lane_index()) - 1));
    list.rows[place] = rows + choices.row * segment.row_bytes + segment.first;
    list.factors[place] =
        has_one_segment<kSums, Wire>(p)
            ? choices.weight
            : p.pair_weights[0][int64_t{choices.row} * p.weights_per_row + segment.index];
  }
  return __popc(all);
}

template <typename T, typename Wire, Sums kSums>
__device__ __forceinline__ void send_slot(const CombineParams& p, const Team& team,
                                          SourceList& list, const WarpChoices& choices, int slot,
                                          char* to_zone) {
  for (int a = 0; a < p.num_summed; ++a) {
    const SummedArray& array = p.summed[a];
    char* to_row =
        to_zone + array.zone_offset + slot * row_stride(wire_bytes<Wire>(array.elements));
    if constexpr (kSums != Sums::kGeneral) {
      for_each_listed_segment<T, Wire, kSums>(p, array, [&](const ListedSegment& segment) {
        const int rows = list_own_rows<Wire, kSums>(p, array, list, choices, segment);
        SegmentOnWire<T, Wire> on_wire(p, segment);
        sum_listed<T, Sum::kPartial>(team, list, {rows, 0, 0}, segment.bytes,
                                     to_row + on_wire.first, on_wire.wire);
      });
    } else {
      Wire* to = reinterpret_cast<Wire*>(to_row);
      const uint32_t has_row = __ballot_sync(kAllLanes, choices.row >= 0);
      if (array.vectorized) {
        send_sum<T, Wire, kVector<T, Wire>>(p, array, team, choices.row, has_row, to);
      } else {
        send_sum<T, Wire, 1>(p, array, team, choices.row, has_row, to);
      }
    }
  }
  if (!team.is_first_warp() || lane_index() >= p.routing.top_k) return;
  for (int a = 0; a < p.num_moved; ++a) {  // lane k writes choice k
    const MovedArray& array = p.moved[a];
    copy_choice(to_zone + array.zone_offset + slot * row_stride(array.row_bytes) +
                    lane_index() * array.choice_bytes,
                choices.row >= 0 ? array.in + choices.row * array.choice_bytes : nullptr,
                array.choice_bytes, array.width);
  }
}

template <typename T, typename Wire, Sums kSums>
__device__ __forceinline__ void send_chunk(const CombineParams& p, const Team& team,
                                           SourceList& list, uint64_t epoch, int source_rank,
                                           int chunk) {
  const RankView& view = p.view;
  const int top_k = p.routing.top_k;
  const int64_t per_chunk = slots_per_chunk(p.routing.num_tokens);
  const int end = min((chunk + 1) * per_chunk, int64_t{p.routing.num_tokens});
  char* to_zone = zone(view, source_rank, epoch, view.rank, p.zone_bytes);
  for (int first = chunk * per_chunk; first < end; first += slots_per_look(top_k)) {
    const int count = min(end - first, slots_per_look(top_k));
    const int my_slot = lane_index() / top_k;
    const WarpChoices all(p, source_rank, my_slot < count ? first + my_slot : -1,
                          lane_index() % top_k, epoch);
    for (int i = 0; i < count; ++i) {
      const WarpChoices choices = all.of(i, top_k);
      if (__ballot_sync(kAllLanes, choices.row != kNoChoice) == 0) continue;
      send_slot<T, Wire, kSums>(p, team, list, choices, first + i, to_zone);
    }
  }
}

// The slots of a token at all ranks, in shared memory of the warp that sums the token.
struct TokenSlots {
  int of_rank[kMaxRanks];  // negative: the token has no slot at that rank
  int ranks[kMaxTopK];     // the ranks at which the token has a slot, in ascending order
};

struct SourceToken {
  const TokenSlots& slots;
  int num_ranks;  // number of ranks at which the token has a slot
  uint64_t epoch;
  WarpChoices own;  // the choices on this rank
};

// Fills `slots`. Returns the number of ranks at which the token has a slot. All lanes call it.
__device__ int read_slots(const CombineParams& p, int token_index, TokenSlots& slots) {
  const int num_ranks = p.view.num_ranks, top_k = p.routing.top_k;
  int count = 0;
  for (int first = 0; first < num_ranks; first += kWarpThreads) {
    const int rank = first + lane_index();
    int slot = -1;
    if (rank < num_ranks) {
      slot = p.routing.token_slot[int64_t{token_index} * num_ranks + rank];
      slots.of_rank[rank] = slot;
    }
    const uint32_t has_slot = __ballot_sync(kAllLanes, slot >= 0);
    const int place = count + __popc(has_slot & ((1u << lane_index()) - 1));
    if (slot >= 0 && place < top_k) slots.ranks[place] = rank;
    count += __popc(has_slot);
  }
  __syncwarp();
  return count;
}

// Returns true if the lists have room for a token: if its slots at other ranks and its rows on this
// rank are at most top_k together. All lanes call it.
__device__ bool fits_lists(const CombineParams& p, const SourceToken& token) {
  const int own_rows = __popc(__ballot_sync(kAllLanes, token.own.row >= 0));
  // In the sum, the token's rows on this rank replace the slot of this rank.
  const int count = token.num_ranks + max(0, own_rows - 1);
  const bool fits = count <= p.routing.top_k;
  if (!fits && lane_index() == 0) {
    fail(p.view, ErrorKind::kBounds, Phase::kReceiveChunk, p.view.rank, token.epoch,
         p.routing.top_k + 1, count);
  }
  return fits;
}

// Waits for the partial sums of a token. Lane i waits for ranks[i]. Each warp calls it.
__device__ bool wait_for_token(const CombineParams& p, const SourceToken& token) {
  const RankView& view = p.view;
  bool landed = true;
  if (lane_index() < token.num_ranks) {
    const int rank = token.slots.ranks[lane_index()], slot = token.slots.of_rank[rank];
    if (slot >= p.routing.num_tokens) {
      fail(view, ErrorKind::kBounds, Phase::kReceiveChunk, rank, token.epoch, p.routing.num_tokens,
           slot);
      landed = false;
    } else if (rank != view.rank) {
      const int chunk = slot / slots_per_chunk(p.routing.num_tokens);
      landed = wait_for_flag(view, chunk_flag(view, token.epoch, rank, chunk), token.epoch,
                             Phase::kReceiveChunk, rank);
    }
  }
  const bool all = __all_sync(kAllLanes, landed);
  __syncwarp();  // Orders later loads after the acquires of all lanes, which the vote does not.
  return all;
}

__device__ const char* landed_at(const CombineParams& p, const SourceToken& token, int rank,
                                 int64_t zone_offset, int64_t row_bytes) {
  return zone(p.view, p.view.rank, token.epoch, rank, p.zone_bytes) + zone_offset +
         token.slots.of_rank[rank] * row_stride(row_bytes);
}

// Adds a token's partial sums in rank order, and then the addend. Loads two partial sums at a time.
template <typename T, typename Wire, bool kAdds, int kCount>
__device__ __forceinline__ void sum_token(const CombineParams& p, const SummedArray& array,
                                          const Team& team, const SourceToken& token,
                                          const T* addend, T* to) {
  const RankView& view = p.view;
  const auto one = [](int) { return 1.f; };
  const uint32_t own_choices = __ballot_sync(kAllLanes, token.own.row >= 0);
  for_each_packs<kCount>(team, array.elements, [&](const PackOffsets<kCount>& offsets) {
    const Packs<Wire, kCount> own =
        sum_rows<T>(p, array, token.own.row, own_choices, offsets).template rounded<Wire>();
    Accumulator<kCount> acc;
    const auto load = [&](Packs<Wire, kCount>& packs, int i) {
      if (i >= token.num_ranks) return false;
      const int rank = token.slots.ranks[i];
      if (rank == view.rank) {
        packs = own;
      } else {
        packs.load(reinterpret_cast<const Wire*>(
                       landed_at(p, token, rank, array.zone_offset, array.elements * sizeof(Wire))),
                   offsets);
      }
      return true;
    };
    for (int i = 0; i < token.num_ranks; i += 2) {
      Packs<Wire, kCount> even, odd;
      load(even, i);
      const bool has_odd = load(odd, i + 1);
      acc.add(even, one);
      if (has_odd) acc.add(odd, one);
    }
    if constexpr (kAdds) {
      Packs<T, kCount> packs;
      packs.load(addend, offsets);
      acc.add(packs, one);
    }
    acc.template rounded<T>().store(to, offsets);
  });
}

// Replaces sum_token() if rows are summed through lists. Lane i lists the partial sum of ranks[i].
template <typename T, typename Wire, Sums kSums, bool kAdds>
__device__ __forceinline__ void sum_listed_token(const CombineParams& p, const SummedArray& array,
                                                 const Team& team, SourceList& list,
                                                 const SourceToken& token, const T* addend, T* to) {
  const int own_rank = p.view.rank, lane = lane_index();
  const int rank = lane < token.num_ranks ? token.slots.ranks[lane] : own_rank;
  const uint32_t before = __ballot_sync(kAllLanes, rank < own_rank);
  const uint32_t after = __ballot_sync(kAllLanes, rank > own_rank);
  for_each_listed_segment<T, Wire, kSums>(p, array, [&](const ListedSegment& segment) {
    const SourceCounts counts = {list_own_rows<Wire, kSums>(p, array, list, token.own, segment),
                                 __popc(before), __popc(after)};
    SegmentOnWire<T, Wire> on_wire(p, segment);
    if (rank != own_rank) {
      const uint32_t earlier = (1u << lane) - 1;
      const int place = counts.own + __popc((before | after) & earlier);
      list.rows[place] =
          landed_at(p, token, rank, array.zone_offset, wire_bytes<Wire>(array.elements)) +
          on_wire.first;
    }
    if (kAdds && lane == 0) {
      list.rows[counts.own + __popc(before | after)] =
          reinterpret_cast<const char*>(addend) + segment.first;
    }
    constexpr Sum kSum = kAdds ? Sum::kOutputPlusAddend : Sum::kOutput;
    sum_listed<T, kSum>(team, list, counts, segment.bytes,
                        reinterpret_cast<char*>(to) + segment.first, on_wire.wire);
  });
}

template <typename T, typename Wire, Sums kSums, bool kAdds>
__device__ __forceinline__ void write_token(const CombineParams& p, const Team& team,
                                            SourceList& list, const SourceToken& token,
                                            int token_index) {
  for (int a = 0; a < p.num_summed; ++a) {
    const SummedArray& array = p.summed[a];
    T* to = static_cast<T*>(array.out) + token_index * array.elements;
    const T* addend =
        kAdds ? static_cast<const T*>(array.addend) + token_index * array.elements : nullptr;
    if constexpr (kSums != Sums::kGeneral) {
      sum_listed_token<T, Wire, kSums, kAdds>(p, array, team, list, token, addend, to);
    } else if (array.vectorized) {
      sum_token<T, Wire, kAdds, kVector<T, Wire>>(p, array, team, token, addend, to);
    } else {
      sum_token<T, Wire, kAdds, 1>(p, array, team, token, addend, to);
    }
  }
  if (!team.is_first_warp() || lane_index() >= p.routing.top_k) return;
  const int64_t choice = int64_t{token_index} * p.routing.top_k + lane_index();
  for (int a = 0; a < p.num_moved; ++a) {  // lane k writes choice k
    const MovedArray& array = p.moved[a];
    const int rank = p.routing.choice_rank[choice];
    const char* from = nullptr;
    if (rank == p.view.rank) {
      if (token.own.row >= 0) from = array.in + token.own.row * array.choice_bytes;
    } else if (rank >= 0 && rank < p.view.num_ranks && token.slots.of_rank[rank] >= 0) {
      from = landed_at(p, token, rank, array.zone_offset, array.row_bytes) +
             lane_index() * array.choice_bytes;
    }
    copy_choice(array.out + choice * array.choice_bytes, from, array.choice_bytes, array.width);
  }
}

template <typename T, typename Wire, Sums kSums, bool kAdds>
__device__ __forceinline__ void receive(const CombineParams& p, const Team& team, SourceList& list,
                                        TokenSlots& slots, uint64_t epoch) {
  const RankView& view = p.view;
  const RoutingView& routing = p.routing;
  delay_for_test(view, Phase::kReceiveChunk);
  while (true) {
    // take_item() is also a barrier, after which no lane reads the slots of the previous token.
    const int token_index = take_item(control(view).next_receive, team);
    if (token_index >= routing.num_tokens) return;
    const int num_ranks = read_slots(p, token_index, slots);
    const int own_slot = lane_index() < routing.top_k ? slots.of_rank[view.rank] : -1;
    const SourceToken token = {slots, num_ranks, epoch,
                               WarpChoices(p, view.rank, own_slot, lane_index(), epoch)};
    if (!fits_lists(p, token) || !wait_for_token(p, token)) continue;
    write_token<T, Wire, kSums, kAdds>(p, team, list, token, token_index);
  }
}

template <typename T, typename Wire, Sums kSums, bool kAdds>
__global__ void __launch_bounds__(kThreads, 1)
    combine_kernel(const __grid_constant__ Launched<CombineParams> launched) {
  MOE_A2A_OWN_PARAMS(CombineParams, p, launched);
  __shared__ BlockState block;
  __shared__ SourceList lists[kMaxTeams];  // by warp
  __shared__ TokenSlots slots[kMaxTeams];  // by warp
  const int warp = threadIdx.x / kWarpThreads;
  const Team senders(p.roles.send_teams, block.mailboxes);
  const uint32_t asked = ask_before_entering(p.view, p.roles, senders);
  if (enter(p.view, block)) {
    send_chunks(p.view, block, p.roles, senders, num_chunks_of(p.routing.num_tokens), asked,
                [&](int source_rank, int chunk) {
                  send_chunk<T, Wire, kSums>(p, senders, lists[warp], block.epoch, source_rank,
                                             chunk);
                });
    change_teams(p.roles);
    const Team receivers(p.roles.receive_teams, block.mailboxes);
    receive<T, Wire, kSums, kAdds>(p, receivers, lists[warp], slots[warp], block.epoch);
  }
  leave(p.view, block, p.fills, p.num_summed + p.num_moved);
}

struct CombineKernels {
  using Key = std::tuple<ElementType, TokenFormat, WireType, Sums, bool /* has addends */>;
  using Kernel = void (*)(Launched<CombineParams>);

  template <typename Add>
  static void list(Add&& add) {
    for_each(Elements{}, [&](auto element) {
      using T = typename decltype(element)::type;
      constexpr ElementType kType = Element<T>::kType;
      // Addends need registers, so sums with and without addends have separate kernels.
      for_each(Constants<false, true>{}, [&](auto adds) {
        for_each(Constants<Sums::kGeneral, Sums::kRows, Sums::kSegments>{}, [&](auto sums) {
          add({kType, kNoFormat, WireType::kOfRows, sums, adds}, combine_kernel<T, T, sums, adds>,
              0);
        });
        add({kType, kNoFormat, WireType::kFloat32, Sums::kGeneral, adds},
            combine_kernel<T, float, Sums::kGeneral, adds>, 0);
        for_each(TokenFormats{}, [&](auto format) {
          add({kType, format, WireType::kOfRows, Sums::kSegments, adds},
              combine_kernel<T, Encoded<format>, Sums::kSegments, adds>, 0);
        });
      });
    });
  }
};

CombineKernels::Key key_of(const CombineParams& p) {
  const bool adds = p.num_summed > 0 && p.summed[0].addend != nullptr;
  if (p.wire_format != kNoFormat) return {p.type, p.wire_format, p.wire, Sums::kSegments, adds};
  const Sums listed = p.weights_per_row > 1 ? Sums::kSegments : Sums::kRows;
  return {p.type, kNoFormat, p.wire, p.listed ? listed : Sums::kGeneral, adds};
}

}  // namespace

cudaError_t MOE_A2A_FORM::LaunchCombine(const CombineParams* ranks, int num_blocks,
                                        cudaStream_t stream) {
  return LaunchListed<CombineKernels>(key_of(*ranks), ranks, num_blocks, 0, stream);
}

cudaError_t MOE_A2A_FORM::LoadCombine() { return LoadListed<CombineKernels>(); }

}  // namespace moe_a2a
