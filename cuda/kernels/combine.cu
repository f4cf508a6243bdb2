// combine: every token's rows come home and are summed; the transpose of dispatch.
//
// Holds afterwards: out[token] = sum over ranks, in rank order, of round_to_wire(sum over the token's
// rows on that rank, in order of choice, of weight * row), all sums in float32. A rank without a slot
// for the token is skipped. Choice scalars come home unsummed: out[token, k] is the scalar of its row,
// zero where the choice has none. Where sums cross in a token format, round_to_wire(x) is decode(encode(x)),
// as docs/formats.md defines it for float32.
//
// Layout: a zone holds, per summed array, [num_tokens slots, row_stride] of partial sums in the wire
// dtype, or of values with their scales behind them; and per choice array [num_tokens slots, top_k].
// Slot s of source r's zone at r's home is what dispatch's slot s was: the expert's rank answers into the
// slot that the token came in.
//
// Who waits for whom: expert-side blocks wait for credits of an earlier epoch only. Home blocks wait per
// token for the chunks that hold its partial sums; the last block, before the launch ends, for the head of
// every rank. The own rank's partial sum never enters a zone, but is rounded like the others.
//
// A token whose rows were all dropped for capacity still gets a row of zeros: its home sums that slot.
//
// Launch: any number of blocks; the first `send_blocks` to start send first.
#include <type_traits>

#include "device/exchange.cuh"
#include "device/sum.cuh"
#include "device/wire.cuh"
#include "kernels/launch.h"
#include "kernels/table.h"

namespace moe_a2a {
namespace {

// How rows are summed: anything; or through a warp's list (device/sum.cuh), which holds whole rows with at
// most one weight each, or one after the other the parts of rows that share a weight. What crosses in a token
// format goes through the list; whole rows are then a single part.
enum class Sums { kGeneral, kRows, kParts };

constexpr int kNoChoice = -1;  // in slot_rows; -2 is a choice whose row was dropped

// What a warp's lanes know of the choices of a few neighbouring slots or tokens: lane i * top_k + k that
// of the i-th one's choice k. They are loaded together, for each load costs a latency.
struct Choices {
  int row;  // >= 0, or why there is none
  float weight;

  // `slot` is the slot of the choice's token in the zone of `source`, or < 0.
  __device__ Choices(const CombineParams& p, int source, int slot, int k, uint64_t epoch)
      : row(kNoChoice), weight(1.f) {
    const RoutingView& routing = p.routing;
    if (slot < 0 || slot >= routing.num_tokens) return;  // wait_for_token() reports the latter
    row = routing.slot_rows[(int64_t{source} * routing.num_tokens + slot) * routing.top_k + k];
    if (row >= routing.capacity) {
      fail(p.view, ErrorKind::kBounds, Phase::kSend, source, epoch, routing.capacity, row);
      row = kNoChoice;
    }
    if (row >= 0 && p.listed && p.weights_per_row == 1) weight = p.pair_weights[0][row];
  }

  // Of the i-th slot alone: lane k has choice k.
  __device__ Choices of(int i, int top_k) const {
    const int lane = min(i * top_k + lane_index(), kWarpThreads - 1);
    Choices choices = {__shfl_sync(kAllLanes, row, lane), __shfl_sync(kAllLanes, weight, lane)};
    if (lane_index() >= top_k) choices.row = kNoChoice;
    return choices;
  }

 private:
  __device__ Choices(int row, float weight) : row(row), weight(weight) {}
};

// Elements that a thread reads at once: 16 bytes of the wider of the two types.
template <typename T, typename Wire>
constexpr int kVector = kVectorBytes / (sizeof(T) > sizeof(Wire) ? sizeof(T) : sizeof(Wire));

// The partial sum of one slot's rows, rounded and stored.
template <typename T, typename Wire, int kCount>
__device__ __forceinline__ void send_sum(const CombineParams& p, const SummedArray& array,
                                         const Team& team, int row, uint32_t choices, Wire* to) {
  for_each_packs<kCount>(team, array.elements, [&](const PackOffsets<kCount>& offsets) {
    sum_rows<T>(p, array, row, choices, offsets).template rounded<Wire>().store(to, offsets);
  });
}

// What is summed through the list at a time: a row, or a part of it.
struct ListedPart {
  int index;
  int64_t row_bytes, first, bytes;
};

// Whether a row is summed as a whole.
template <Sums kSums, typename Wire>
__device__ __forceinline__ bool has_one_part(const CombineParams& p) {
  return kSums == Sums::kRows || (kIsEncoded<Wire> && p.weights_per_row <= 1);
}

// Calls body(ListedPart) for an array.
template <typename T, typename Wire, Sums kSums, typename Body>
__device__ __forceinline__ void for_each_part(const CombineParams& p, const SummedArray& array,
                                              Body&& body) {
  const int64_t row_bytes = array.elements * sizeof(T);
  if constexpr (kSums == Sums::kRows) {
    body(ListedPart{0, row_bytes, 0, row_bytes});
  } else {
    const bool is_whole = has_one_part<kSums, Wire>(p);
    const int64_t bytes = is_whole ? row_bytes : p.elements_per_weight * sizeof(T);
    const int parts = is_whole ? 1 : p.weights_per_row;
    for (int i = 0; i < parts; ++i) body(ListedPart{i, row_bytes, i * bytes, bytes});
  }
}

// Bytes that cross of a row of so many sums.
template <typename Wire>
struct WireRow {
  static __device__ int64_t bytes(int64_t elements) { return elements * sizeof(Wire); }
};
template <TokenFormat F>
struct WireRow<Encoded<F>> {
  static __device__ int64_t bytes(int64_t elements) { return encoded_stride(F, elements); }
};

// How a part of a row of T crosses, and from which byte of it.
template <typename T, typename Wire>
struct PartOnWire {
  RoundedWire<T> wire;
  int64_t first;

  __device__ PartOnWire(const CombineParams&, const ListedPart& part) : first(part.first) {}
};
template <typename T, TokenFormat F>
struct PartOnWire<T, Encoded<F>> {
  EncodedWire<F, T> wire;
  int64_t first;

  __device__ PartOnWire(const CombineParams& p, const ListedPart& part)
      : PartOnWire(p, part.row_bytes / sizeof(T), part.first / sizeof(T)) {}

 private:
  __device__ PartOnWire(const CombineParams& p, int64_t elements, int64_t first_element)
      : wire(p.wire_global_scale, scales_offset(F, elements) + scale_bytes(F, first_element) -
                                      value_bytes(F, first_element)),
        first(value_bytes(F, first_element)) {}
};

// Lists a token's rows on this rank, choice by choice. Returns their number.
template <typename Wire, Sums kSums>
__device__ __forceinline__ int list_own_rows(const CombineParams& p, const SummedArray& array,
                                             SourceList& list, const Choices& choices,
                                             const ListedPart& part) {
  const bool has_row = choices.row >= 0;
  const uint32_t all = __ballot_sync(kAllLanes, has_row);
  if (has_row) {
    const char* rows = static_cast<const char*>(p.num_pairs > 0 ? p.pair_rows[0] : array.rows);
    const int place = __popc(all & ((1u << lane_index()) - 1));
    list.rows[place] = rows + choices.row * part.row_bytes + part.first;
    list.factors[place] =
        has_one_part<kSums, Wire>(p)
            ? choices.weight
            : p.pair_weights[0][int64_t{choices.row} * p.weights_per_row + part.index];
  }
  return __popc(all);
}

// Writes the partial sums of one slot into the zone at its home.
template <typename T, typename Wire, Sums kSums>
__device__ __forceinline__ void send_slot(const CombineParams& p, const Team& team,
                                          SourceList& list, const Choices& choices, int slot,
                                          char* to_zone) {
  for (int a = 0; a < p.num_summed; ++a) {
    const SummedArray& array = p.summed[a];
    char* to_row =
        to_zone + array.zone_offset + slot * row_stride(WireRow<Wire>::bytes(array.elements));
    if constexpr (kSums != Sums::kGeneral) {
      for_each_part<T, Wire, kSums>(p, array, [&](const ListedPart& part) {
        const int rows = list_own_rows<Wire, kSums>(p, array, list, choices, part);
        PartOnWire<T, Wire> on_wire(p, part);
        sum_listed<T, Sum::kPartial>(team, list, {rows, 0, 0}, part.bytes, to_row + on_wire.first,
                                     on_wire.wire);
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
  const int row = choices.row;
  for (int a = 0; a < p.num_moved; ++a) {
    const MovedArray& array = p.moved[a];
    copy_choice(to_zone + array.zone_offset + slot * row_stride(array.row_bytes) +
                    lane_index() * array.choice_bytes,
                row >= 0 ? array.in + row * array.choice_bytes : nullptr, array.choice_bytes,
                array.width);
  }
}

// How many of a warp's neighbouring slots it looks up at a time.
__device__ int slots_per_look(const CombineParams& p) { return kWarpThreads / p.routing.top_k; }

// Writes the partial sums of one chunk of slots.
template <typename T, typename Wire, Sums kSums>
__device__ __forceinline__ void send_chunk(const CombineParams& p, const Team& team,
                                           SourceList& list, uint64_t epoch, int home, int chunk) {
  const RankView& view = p.view;
  const int top_k = p.routing.top_k;
  const int64_t per_chunk = slots_per_chunk(p.routing.num_tokens);
  const int end = min((chunk + 1) * per_chunk, int64_t{p.routing.num_tokens});
  char* to_zone = zone(view, home, epoch, view.rank, p.zone_bytes);
  for (int first = chunk * per_chunk; first < end; first += slots_per_look(p)) {
    const int count = min(end - first, slots_per_look(p));
    const int mine = lane_index() / top_k;
    const Choices all(p, home, mine < count ? first + mine : -1, lane_index() % top_k, epoch);
    for (int i = 0; i < count; ++i) {
      const Choices choices = all.of(i, top_k);
      if (__ballot_sync(kAllLanes, choices.row != kNoChoice) == 0) continue;
      send_slot<T, Wire, kSums>(p, team, list, choices, first + i, to_zone);
    }
  }
}

// What of a chunk crosses to a rank beyond: see put_chunk().
template <typename Wire, typename Add>
__device__ void each_range(const CombineParams& p, int home, int chunk, Add&& add) {
  const int num_slots = p.routing.num_tokens, top_k = p.routing.top_k;
  const int32_t* rows = p.routing.slot_rows + int64_t{home} * num_slots * top_k;
  const Slots slots = taken_slots(num_slots, chunk, [&](int slot) {
    bool is_taken = false;
    for (int k = 0; k < top_k; ++k) is_taken = is_taken || rows[slot * top_k + k] != kNoChoice;
    return is_taken;
  });
  const auto add_array = [&](int64_t zone_offset, int64_t stride) {
    add(zone_offset + slots.first * stride, slots.count * stride);
  };
  for (int a = 0; a < p.num_summed; ++a) {
    add_array(p.summed[a].zone_offset, row_stride(WireRow<Wire>::bytes(p.summed[a].elements)));
  }
  for (int a = 0; a < p.num_moved; ++a) {
    add_array(p.moved[a].zone_offset, row_stride(p.moved[a].row_bytes));
  }
}

// A token that comes home. Its slots lie in shared memory, [num_ranks], < 0 where it has none.
struct Home {
  const int* slots;
  uint64_t epoch;
  Choices own;  // its choices on this rank
};

// Waits until all that other ranks send for this token has landed. Each warp of a team for itself.
__device__ bool wait_for_token(const CombineParams& p, const Home& token) {
  const RankView& view = p.view;
  bool landed = true;
  for (int rank = lane_index(); rank < view.num_ranks; rank += kWarpThreads) {
    const int slot = token.slots[rank];
    if (slot < 0) continue;
    if (slot >= p.routing.num_tokens) {
      fail(view, ErrorKind::kBounds, Phase::kReceiveChunk, rank, token.epoch, p.routing.num_tokens,
           slot);
      landed = false;
      continue;
    }
    if (rank == view.rank) continue;
    const int chunk = slot / slots_per_chunk(p.routing.num_tokens);
    landed = landed && wait_for_flag(view, chunk_flag(view, token.epoch, rank, chunk), token.epoch,
                                     Phase::kReceiveChunk, rank);
  }
  const bool all = __all_sync(kAllLanes, landed);
  __syncwarp();  // A vote orders no memory: the lanes' loads come after every lane's acquire.
  return all;
}

__device__ const char* landed_at(const CombineParams& p, const Home& token, int rank,
                                 int64_t zone_offset, int64_t row_bytes) {
  return zone(p.view, p.view.rank, token.epoch, rank, p.zone_bytes) + zone_offset +
         token.slots[rank] * row_stride(row_bytes);
}

// Sums one token's partial sums, in rank order; two are read at a time.
template <typename T, typename Wire, int kCount>
__device__ __forceinline__ void sum_home(const CombineParams& p, const SummedArray& array,
                                         const Team& team, const Home& token, T* to) {
  const RankView& view = p.view;
  const auto one = [](int) { return 1.f; };
  const uint32_t own_choices = __ballot_sync(kAllLanes, token.own.row >= 0);
  for_each_packs<kCount>(team, array.elements, [&](const PackOffsets<kCount>& offsets) {
    const Packs<Wire, kCount> own =
        sum_rows<T>(p, array, token.own.row, own_choices, offsets).template rounded<Wire>();
    Accumulator<kCount> acc;
    acc.clear();
    const auto load = [&](Packs<Wire, kCount>& packs, int rank) {
      if (rank >= view.num_ranks || token.slots[rank] < 0) return false;
      if (rank == view.rank) {
        packs = own;
      } else {
        packs.load(reinterpret_cast<const Wire*>(
                       landed_at(p, token, rank, array.zone_offset, array.elements * sizeof(Wire))),
                   offsets);
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
    acc.template rounded<T>().store(to, offsets);
  });
}

// The same, through a warp's list. Lane r looks after rank r.
template <typename T, typename Wire, Sums kSums>
__device__ __forceinline__ void sum_listed_home(const CombineParams& p, const SummedArray& array,
                                                const Team& team, SourceList& list,
                                                const Home& token, T* to) {
  const RankView& view = p.view;
  const int rank = lane_index();
  const bool landed = rank < view.num_ranks && rank != view.rank && token.slots[rank] >= 0;
  const uint32_t before = __ballot_sync(kAllLanes, landed && rank < view.rank);
  const uint32_t after = __ballot_sync(kAllLanes, landed && rank > view.rank);
  for_each_part<T, Wire, kSums>(p, array, [&](const ListedPart& part) {
    const SourceCounts counts = {list_own_rows<Wire, kSums>(p, array, list, token.own, part),
                                 __popc(before), __popc(after)};
    PartOnWire<T, Wire> on_wire(p, part);
    if (landed) {
      const uint32_t earlier = (1u << rank) - 1;
      const int place = counts.own + __popc((before | after) & earlier);
      list.rows[place] =
          landed_at(p, token, rank, array.zone_offset, WireRow<Wire>::bytes(array.elements)) +
          on_wire.first;
    }
    sum_listed<T, Sum::kOutput>(team, list, counts, part.bytes,
                                reinterpret_cast<char*>(to) + part.first, on_wire.wire);
  });
}

// Writes one token's results.
template <typename T, typename Wire, Sums kSums>
__device__ __forceinline__ void bring_home(const CombineParams& p, const Team& team,
                                           SourceList& list, const Home& token, int token_index) {
  const RankView& view = p.view;
  for (int a = 0; a < p.num_summed; ++a) {
    const SummedArray& array = p.summed[a];
    T* to = static_cast<T*>(array.out) + token_index * array.elements;
    if constexpr (kSums != Sums::kGeneral) {
      sum_listed_home<T, Wire, kSums>(p, array, team, list, token, to);
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
      if (token.own.row >= 0) from = array.in + token.own.row * array.choice_bytes;
    } else if (rank >= 0 && rank < view.num_ranks && token.slots[rank] >= 0) {
      from = landed_at(p, token, rank, array.zone_offset, array.row_bytes) +
             lane_index() * array.choice_bytes;
    }
    copy_choice(array.out + choice * array.choice_bytes, from, array.choice_bytes, array.width);
  }
}

template <typename T, typename Wire, Sums kSums>
__device__ __forceinline__ void receive(const CombineParams& p, const Team& team, SourceList& list,
                                        int* slots, uint64_t epoch) {
  const RankView& view = p.view;
  const RoutingView& routing = p.routing;
  delay_for_test(view, Phase::kReceiveChunk);
  while (true) {
    // This is a barrier, too: the last token's slots have been read.
    const int token_index = take_item(control(view).next_receive, team);
    if (token_index >= routing.num_tokens) return;
    for (int rank = lane_index(); rank < view.num_ranks; rank += kWarpThreads) {
      slots[rank] = routing.token_slot[int64_t{token_index} * view.num_ranks + rank];
    }
    __syncwarp();
    const int own_slot = lane_index() < routing.top_k ? slots[view.rank] : -1;
    const Home token = {slots, epoch, Choices(p, view.rank, own_slot, lane_index(), epoch)};
    mark(view, Mark::kAwait);
    if (!wait_for_token(p, token)) continue;
    mark(view, Mark::kLanded);
    bring_home<T, Wire, kSums>(p, team, list, token, token_index);
    mark(view, Mark::kReceived);
  }
}

template <typename T, typename Wire, Sums kSums>
__global__ void __launch_bounds__(kThreads, 1)
    combine_kernel(const __grid_constant__ Launched<CombineParams> launched) {
  MOE_A2A_OWN_PARAMS(CombineParams, p, launched);
  __shared__ BlockState block;
  __shared__ SourceList lists[kMaxTeams];      // by warp
  __shared__ int slots[kMaxTeams][kMaxRanks];  // of the token that a warp brings home
  const int warp = threadIdx.x / kWarpThreads;
  const Team senders(p.roles.send_teams, block.mailboxes);
  const uint32_t asked = ask_before_entering(p.view, p.roles, senders);
  if (enter(p.view, block)) {
    const int num_chunks = num_chunks_of(p.routing.num_tokens);
    send_chunks(
        p.view, block, p.roles, senders, num_chunks, p.zone_bytes, asked,
        [&](int home, int chunk) {
          send_chunk<T, Wire, kSums>(p, senders, lists[warp], block.epoch, home, chunk);
        },
        [&](int home, int chunk, auto&& add) { each_range<Wire>(p, home, chunk, add); });
    change_teams(p.roles);
    const Team receivers(p.roles.receive_teams, block.mailboxes);
    receive<T, Wire, kSums>(p, receivers, lists[warp], slots[warp], block.epoch);
  }
  leave(p.view, block, p.fills, p.num_summed + p.num_moved);
}

struct CombineKernels {
  struct Key {
    ElementType type;
    TokenFormat wire_format;
    bool float32_wire;
    Sums sums;

    bool operator==(const Key& other) const {
      return type == other.type && wire_format == other.wire_format &&
             float32_wire == other.float32_wire && sums == other.sums;
    }
  };
  using Kernel = void (*)(Launched<CombineParams>);

  template <typename Add>
  static void list(Add&& add) {
    for_each(Elements{}, [&](auto element) {
      using T = typename decltype(element)::type;
      constexpr ElementType kType = Element<T>::kType;
      add({kType, kNoFormat, false, Sums::kGeneral}, combine_kernel<T, T, Sums::kGeneral>, 0);
      add({kType, kNoFormat, false, Sums::kRows}, combine_kernel<T, T, Sums::kRows>, 0);
      add({kType, kNoFormat, false, Sums::kParts}, combine_kernel<T, T, Sums::kParts>, 0);
      add({kType, kNoFormat, true, Sums::kGeneral}, combine_kernel<T, float, Sums::kGeneral>, 0);
      for_each(TokenFormats{}, [&](auto format) {
        add({kType, format, false, Sums::kParts}, combine_kernel<T, Encoded<format>, Sums::kParts>,
            0);
      });
    });
  }
};

CombineKernels::Key key_of(const CombineParams& p) {
  if (p.wire_format != kNoFormat) return {p.type, p.wire_format, false, Sums::kParts};
  if (p.float32_wire) return {p.type, kNoFormat, true, Sums::kGeneral};
  const Sums listed = p.weights_per_row > 1 ? Sums::kParts : Sums::kRows;
  return {p.type, kNoFormat, false, p.listed ? listed : Sums::kGeneral};
}

}  // namespace

inline namespace MOE_A2A_FORM {

cudaError_t LaunchCombine(const CombineParams* ranks, int num_blocks, cudaStream_t stream) {
  return LaunchListed<CombineKernels>(key_of(*ranks), ranks, num_blocks, kThreads, 0, stream);
}

cudaError_t LoadCombine() { return LoadListed<CombineKernels>(); }

}  // namespace MOE_A2A_FORM

}  // namespace moe_a2a
