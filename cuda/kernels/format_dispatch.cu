// format_dispatch: a dispatch that quantizes tokens where it sends them, and decodes them where they
// arrive if that is wanted.
//
// Holds afterwards: of every leaf, the values and the scales of out rows are those of the rows' tokens, as
// docs/formats.md defines them; or the rows are what these decode to. All else is as in dispatch.cu.
//
// Layout: a zone as in dispatch. Values and scales of a leaf are two of its arrays, but lie side by side in
// each slot (encoded_stride() in params.h): a copy can carry both.
//
// Who sends what: a team reads a token once, encodes it in shared memory, and stores what it has made to
// every rank that wants it: this one too, into a zone of its own, so that own tokens are encoded once as
// well. With more tokens than flags, where neighbouring slots share one, a team takes slots instead, and
// encodes a token once for each rank.
//
// Who waits for whom: as in dispatch, but that a receiver does not wait for slots that have no row here,
// for such a flag may never rise; and that it waits for its own rank's senders. They wait for credits only,
// and a block of them has started before any that does not send, so one resident block is still enough.
//
// Why bulk stores: a warp has its next numbers in hand while what it made before is on the wire.
#include "device/exchange.cuh"
#include "device/expand.cuh"
#include "device/format.cuh"
#include "device/stream.cuh"
#include "kernels/launch.h"
#include "kernels/load.h"

namespace moe_a2a {
namespace {

// A round: a piece for each lane.
constexpr int kRoundElements = kWarpThreads * kPieceElements;

// Segments that a warp makes in its part of shared memory, in turn, to be stored by its first lane. They
// take the stages of its stream, which is at rest meanwhile.
template <int kBytes>
class Segments {
  static constexpr int kCount = kStages * kSegmentBytes / kBytes;
  static_assert(kCount > 1 && kBytes % kVectorBytes == 0);

 public:
  static constexpr int kSpareBytes = kStages * kSegmentBytes - kCount * kBytes;

  __device__ explicit Segments(StreamShared* shared) : memory_(shared->stages[0]) {}

  // Where the next one is to be written. All lanes call it.
  __device__ char* next() {
    if (lane_index() == 0) wait_until_read<kCount - 1>();
    __syncwarp();
    char* segment = memory_ + next_ * kBytes;
    next_ = next_ + 1 == kCount ? 0 : next_ + 1;
    return segment;
  }
  // `issue` makes the bulk stores of what all lanes have written.
  template <typename Issue>
  __device__ void store(Issue&& issue) {
    fence_shared_for_bulk();
    __syncwarp();
    if (lane_index() != 0) return;
    issue();
    end_store_group();
  }
  // kSpareBytes that no segment takes.
  __device__ char* spare() const { return memory_ + kCount * kBytes; }

 private:
  char* memory_;
  int next_ = 0;
};

// A segment of a row that is encoded: values, then scales: its own, or all of the row's behind the row's last
// values, as they land. Of one that is decoded: numbers. Large ones, for every bulk copy has its price.
constexpr int kEncodedValueBytes = 3584;
constexpr int kEncodedBytes = 4096;
constexpr int kEncodedScaleBytes = kEncodedBytes - kEncodedValueBytes;
constexpr int kDecodedBytes = 4096;
using EncodedSegments = Segments<kEncodedBytes>;
static_assert(kEncodedScaleBytes <= EncodedSegments::kSpareBytes);
using DecodedSegments = Segments<kDecodedBytes>;

// The rounds of a row that a warp of a team looks after, one after the other: a segment of at most `most`
// neighbouring ones, and then the next that no other warp of the team takes. Fewer, so that all have some.
class Rounds {
 public:
  __device__ Rounds(const Team& team, int64_t elements, int most)
      : total_(static_cast<int>(ceil_div(elements, kRoundElements))) {
    const int warps = team.threads() / kWarpThreads;
    per_segment_ = min(most, (total_ + warps - 1) / warps);
    skipped_ = (warps - 1) * per_segment_;
    round_ = team.thread() / kWarpThreads * per_segment_;
  }
  __device__ bool has_more() const { return round_ < total_; }
  __device__ int in_segment() const { return in_segment_; }
  __device__ bool ends_segment() const {
    return in_segment_ + 1 == per_segment_ || round_ + 1 == total_;
  }
  __device__ bool ends_row() const { return round_ + 1 == total_; }
  // This round, the first element of it, and of its segment.
  __device__ int round() const { return round_; }
  __device__ int64_t first() const { return int64_t{round_} * kRoundElements; }
  __device__ int64_t first_of_segment() const {
    return int64_t{round_ - in_segment_} * kRoundElements;
  }
  __device__ void advance() {
    ++round_;
    if (++in_segment_ < per_segment_) return;
    in_segment_ = 0;
    round_ += skipped_;
  }

 private:
  int total_, per_segment_, skipped_, round_, in_segment_ = 0;
};

__device__ __forceinline__ uint32_t whole_vectors(int64_t bytes) {
  return static_cast<uint32_t>(round_up(bytes, kVectorBytes));
}

template <typename T>
__device__ __forceinline__ NumberPiece<T> load_piece(const T* row, int64_t element,
                                                     int64_t elements) {
  NumberPiece<T> piece = {};
  if (element >= elements) return piece;
  const auto* vectors = reinterpret_cast<const uint4*>(row + element);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(piece) / sizeof(uint4)); ++i) {
    piece.vectors[i] = vectors[i];
  }
  return piece;
}

// Writes this lane's values and, of the first lane of a group, the scale of one round of a segment.
template <TokenFormat F, typename T>
__device__ __forceinline__ void encode_round(const NumberPiece<T>& piece, const GlobalScale& global,
                                             char* values, char* scales) {
  const uint32_t largest = largest_of_lanes<kGroupLanes<F>>(largest_magnitude(piece));
  const GroupEncoding<F> group(largest, global);
  const Values<F> encoded = encode_piece<F, T>(piece, group, global);
  using Vector = typename Word<kPieceBytes<F>>::Type;
  reinterpret_cast<Vector*>(values)[lane_index()] = reinterpret_cast<const Vector&>(encoded);
  if (lane_index() % kGroupLanes<F> == 0) {
    reinterpret_cast<typename Format<F>::Scale*>(scales)[lane_index() / kGroupLanes<F>] =
        group.scale;
  }
}

// Where a token lands: the first `count` of the warp's `destinations` are zones, and the others of its
// lists the slots there.
__device__ int list_landings(StreamShared& shared, char* zone, int slot) {
  const uint32_t all = __ballot_sync(kAllLanes, zone != nullptr);
  if (zone != nullptr) {
    const int place = __popc(all & ((1u << lane_index()) - 1));
    shared.destinations[place] = zone;
    shared.destinations_end[place] = slot;
  }
  __syncwarp();
  return __popc(all);
}

// Encodes the token `in` of one leaf and stores it where it lands.
template <TokenFormat F, typename T>
__device__ __noinline__ void encode_row(const MovedArray& values, const MovedArray& scales,
                                        const Team& team, const StreamShared& shared,
                                        EncodedSegments& segments, int count, int64_t token,
                                        const GlobalScale& global) {
  constexpr int kRoundValueBytes = value_bytes(F, kRoundElements);
  constexpr int kRoundScaleBytes = scale_bytes(F, kRoundElements);
  constexpr int kMostRounds = kEncodedValueBytes / kRoundValueBytes;
  static_assert(kMostRounds * kRoundScaleBytes <= kEncodedScaleBytes);
  const int64_t elements = values.row_bytes * 8 / Format<F>::kValueBits;
  const int64_t stride = encoded_stride(F, elements);
  // A warp that has the whole row gathers its scales, and one copy takes them with the last values.
  const bool gathers = team.threads() == kWarpThreads && scales.row_bytes <= kEncodedScaleBytes;
  const T* row = reinterpret_cast<const T*>(values.in) + token * elements;
  Rounds rounds(team, elements, kMostRounds), ahead = rounds;
  const auto load_next = [&] {
    const int64_t element = ahead.first() + lane_index() * kPieceElements;
    const NumberPiece<T> piece = load_piece(row, ahead.has_more() ? element : elements, elements);
    ahead.advance();
    return piece;
  };
  char* segment = nullptr;
  // Encodes one round, and loads the one that takes its place. False: that was the last.
  const auto encode_next = [&](NumberPiece<T>& piece) {
    if (rounds.in_segment() == 0) segment = segments.next();
    char* round_scales =
        gathers ? segments.spare() + rounds.round() * kRoundScaleBytes
                : segment + kEncodedValueBytes + rounds.in_segment() * kRoundScaleBytes;
    encode_round<F, T>(piece, global, segment + rounds.in_segment() * kRoundValueBytes,
                       round_scales);
    piece = load_next();
    if (rounds.ends_segment()) {
      const int64_t first = rounds.first_of_segment();
      const int64_t here = min(elements, rounds.first() + kRoundElements) - first;
      uint32_t segment_bytes = whole_vectors(value_bytes(F, here));
      if (gathers && rounds.ends_row()) {
        __syncwarp();  // The scales have been written.
        const auto* gathered = reinterpret_cast<const uint4*>(segments.spare());
        const uint32_t gathered_bytes = whole_vectors(scales.row_bytes);
        if (lane_index() * kVectorBytes < gathered_bytes) {
          reinterpret_cast<uint4*>(segment + segment_bytes)[lane_index()] = gathered[lane_index()];
        }
        segment_bytes += gathered_bytes;
      }
      segments.store([&] {
        for (int i = 0; i < count; ++i) {
          char* slot = shared.destinations[i] + shared.destinations_end[i] * stride;
          bulk_store(slot + values.zone_offset + value_bytes(F, first), segment, segment_bytes);
          if (gathers) continue;
          bulk_store(slot + scales.zone_offset + scale_bytes(F, first),
                     segment + kEncodedValueBytes, whole_vectors(scale_bytes(F, here)));
        }
      });
    }
    rounds.advance();
    return rounds.has_more();
  };
  if (!rounds.has_more()) return;
  NumberPiece<T> a = load_next(), b = load_next();  // no array: they must stay in registers
  while (encode_next(a) && encode_next(b)) {
  }
}

__device__ GlobalScale global_scale(const Encoding& encoding, int64_t token) {
  return GlobalScale(encoding.token_scales == nullptr ? encoding.global_scale
                                                      : encoding.token_scales[token]);
}

// Sends one token to `destination` of each lane, if that is a rank, into `slot` of the zone there.
template <TokenFormat F, typename T>
__device__ void send_token(const FormatDispatchParams& p, const Team& team, Stream& stream,
                           EncodedSegments& segments, uint64_t epoch, int token, int destination,
                           int slot) {
  const DispatchParams& exchange = p.exchange;
  const RankView& view = exchange.view;
  if (destination >= view.num_ranks ||
      (destination >= 0 && (slot < 0 || slot >= exchange.routing.num_tokens))) {
    fail(view, ErrorKind::kBounds, Phase::kSend, destination, epoch, exchange.routing.num_tokens,
         slot);
    destination = -1;
  }
  char* to_zone =
      destination < 0 ? nullptr : zone(view, destination, epoch, view.rank, exchange.zone_bytes);
  const int count = list_landings(*stream.shared, to_zone, slot);
  if (count == 0) return;
  const GlobalScale global = global_scale(p.encoding, token);
  const int num_encoded = 2 * p.encoding.num_leaves;
  for (int a = 0; a < num_encoded; a += 2) {
    encode_row<F, T>(exchange.arrays[a], exchange.arrays[a + 1], team, *stream.shared, segments,
                     count, token, global);
  }
  for (int a = num_encoded; a < exchange.num_arrays; ++a) {
    const MovedArray& array = exchange.arrays[a];
    for (int i = 0; i < count; ++i) {
      const int64_t at = stream.shared->destinations_end[i] * row_stride(array.row_bytes);
      copy_row(team, stream.shared->destinations[i] + array.zone_offset + at,
               array.in + token * array.row_bytes, array.row_bytes, array.width);
    }
  }
  __syncwarp();  // The list has been read.
}

// Sends a token to all ranks of its choices, and raises the flags of its slots there.
template <TokenFormat F, typename T>
__device__ void send_everywhere(const FormatDispatchParams& p, const Team& team, Stream& stream,
                                EncodedSegments& segments, uint64_t epoch, int token) {
  const RankView& view = p.exchange.view;
  const RoutingView& routing = p.exchange.routing;
  int destination = -1;
  if (lane_index() < routing.top_k) {
    destination = routing.choice_rank[int64_t{token} * routing.top_k + lane_index()];
  }
  // Of choices on one rank the first speaks.
  const uint32_t same = __match_any_sync(kAllLanes, destination);
  if (lane_index() != __ffs(same) - 1) destination = -1;
  const bool is_sent = destination >= 0 && destination < view.num_ranks;
  const int slot = is_sent ? routing.token_slot[int64_t{token} * view.num_ranks + destination] : 0;
  const auto raise_flags = [&] {
    team.sync();
    if (team.is_first_warp() && is_sent && slot >= 0 && slot < routing.num_tokens) {
      store_chunk_flag(view, epoch, destination, slot);
    }
  };
  if (breaks(view, kFlagBeforeRows)) raise_flags();
  fence_global_for_bulk();  // The credits of the zones have been acquired.
  send_token<F, T>(p, team, stream, segments, epoch, token, destination, slot);
  wait_until_stored();
  raise_flags();
}

// Sends the tokens of one chunk of slots of one rank.
template <TokenFormat F, typename T>
__device__ void send_chunk(const FormatDispatchParams& p, const Team& team, Stream& stream,
                           EncodedSegments& segments, uint64_t epoch, int destination, int chunk) {
  const RankView& view = p.exchange.view;
  const RoutingView& routing = p.exchange.routing;
  const int64_t per_chunk = slots_per_chunk(routing.num_tokens);
  const int end = min((chunk + 1) * per_chunk, int64_t{routing.num_tokens});
  if (breaks(view, kFlagBeforeRows)) raise_chunk(view, team, epoch, destination, chunk);
  fence_global_for_bulk();  // The credit of the zone has been acquired.
  for (int slot = chunk * per_chunk; slot < end; ++slot) {
    const int token = routing.slot_token[int64_t{destination} * routing.num_tokens + slot];
    if (token < 0) break;  // Slots are taken in order.
    if (token >= routing.num_tokens) {
      fail(view, ErrorKind::kBounds, Phase::kSend, destination, epoch, routing.num_tokens, token);
      break;
    }
    send_token<F, T>(p, team, stream, segments, epoch, token, lane_index() == 0 ? destination : -1,
                     slot);
  }
  wait_until_stored();
  raise_chunk(view, team, epoch, destination, chunk);
}

// Decodes a landed row of one leaf to the first `count` of the warp's `destinations`.
template <TokenFormat F, typename T>
__device__ __noinline__ void decode_row(const MovedArray& values, const Team& team,
                                        const StreamShared& shared, DecodedSegments& segments,
                                        int count, const char* from_values, const char* from_scales,
                                        const GlobalScale& global) {
  using Scale = typename Format<F>::Scale;
  using Vector = typename Word<kPieceBytes<F>>::Type;
  constexpr int kRoundBytes = kRoundElements * sizeof(T);
  const int64_t elements = values.row_bytes * 8 / Format<F>::kValueBits;
  Rounds rounds(team, elements, kDecodedBytes / kRoundBytes), ahead = rounds;
  struct Landed {
    Vector values;
    Scale scale;
  };
  const auto load_next = [&] {
    Landed landed = {};
    const int64_t element = ahead.first() + lane_index() * kPieceElements;
    if (ahead.has_more() && element < elements) {
      landed.values =
          load_landed(reinterpret_cast<const Vector*>(from_values) + element / kPieceElements);
      landed.scale =
          load_landed(reinterpret_cast<const Scale*>(from_scales) + element / Format<F>::kGroup);
    }
    ahead.advance();
    return landed;
  };
  char* segment = nullptr;
  // Decodes one round, and loads the one that takes its place. False: that was the last.
  const auto decode_next = [&](Landed& landed) {
    const NumberPiece<T> piece =
        decode_piece<F, T>(reinterpret_cast<const Values<F>&>(landed.values), landed.scale, global);
    landed = load_next();
    if (rounds.in_segment() == 0) segment = segments.next();
    auto* round = reinterpret_cast<NumberPiece<T>*>(segment + rounds.in_segment() * kRoundBytes);
    round[lane_index()] = piece;
    if (rounds.ends_segment()) {
      segments.store([&] {
        const int64_t first = rounds.first_of_segment();
        const int64_t here = min(elements, rounds.first() + kRoundElements) - first;
        for (int i = 0; i < count; ++i) {
          bulk_store(shared.destinations[i] + first * sizeof(T), segment,
                     static_cast<uint32_t>(here * sizeof(T)));
        }
      });
    }
    rounds.advance();
    return rounds.has_more();
  };
  if (!rounds.has_more()) return;
  Landed a = load_next(), b = load_next(), c = load_next(), d = load_next();
  while (decode_next(a) && decode_next(b) && decode_next(c) && decode_next(d)) {
  }
}

// Distance between the slots of an array in a zone.
template <TokenFormat F>
__device__ int64_t slot_stride(const FormatDispatchParams& p, int array) {
  const DispatchParams& exchange = p.exchange;
  if (array >= 2 * p.encoding.num_leaves) return row_stride(exchange.arrays[array].row_bytes);
  const int64_t values_row = exchange.arrays[array & ~1].row_bytes;
  return encoded_stride(F, values_row * 8 / Format<F>::kValueBits);
}

template <TokenFormat F, typename T>
__device__ int64_t decoded_row_bytes(const MovedArray& values) {
  return values.row_bytes * 8 / Format<F>::kValueBits * sizeof(T);
}

// Decodes the landed rows of one leaf. Lanes are as in expand_rows(); `from` is where the slot's arrays
// begin, `slot` its number.
template <TokenFormat F, typename T>
__device__ void decode_rows(const FormatDispatchParams& p, int leaf, const Team& team,
                            Stream& stream, DecodedSegments& segments, int row, int slot,
                            const char* from_zone) {
  const DispatchParams& exchange = p.exchange;
  const MovedArray& values = exchange.arrays[2 * leaf];
  const int64_t out_bytes = decoded_row_bytes<F, T>(values);
  const int top_k = exchange.routing.top_k;
  for (uint32_t left = __ballot_sync(kAllLanes, row >= 0); left != 0;) {
    const int first = __ffs(left) - 1;
    const uint32_t of_slot = left & (kAllLanes >> (kWarpThreads - top_k)) << first / top_k * top_k;
    left &= ~of_slot;
    if (of_slot >> lane_index() & 1) {
      const int place = __popc(of_slot & ((1u << lane_index()) - 1));
      stream.shared->destinations[place] = values.out + row * out_bytes;
    }
    __syncwarp();
    const int64_t this_slot = __shfl_sync(kAllLanes, slot, first);
    const auto landed = [&](int array) {
      return from_zone + exchange.arrays[array].zone_offset + this_slot * slot_stride<F>(p, array);
    };
    const float global =
        p.encoding.token_scales == nullptr
            ? p.encoding.global_scale
            : load_landed(reinterpret_cast<const float*>(landed(exchange.num_arrays - 1)));
    decode_row<F, T>(values, team, *stream.shared, segments, __popc(of_slot), landed(2 * leaf),
                     landed(2 * leaf + 1), GlobalScale(global));
    __syncwarp();  // The list has been read.
  }
}

// Brings in one chunk of slots of `source`, when it has landed.
template <TokenFormat F, typename T>
__device__ void expand_chunk(const FormatDispatchParams& p, const Team& team, Stream& stream,
                             DecodedSegments& segments, uint64_t epoch, int source, int chunk) {
  const DispatchParams& exchange = p.exchange;
  const RankView& view = exchange.view;
  const RoutingView& routing = exchange.routing;
  const int top_k = routing.top_k, slots_per_look = kWarpThreads / top_k;
  const int64_t per_chunk = slots_per_chunk(routing.num_tokens);
  const int end = min((chunk + 1) * per_chunk, int64_t{routing.num_tokens});
  const char* from_zone = zone(view, view.rank, epoch, source, exchange.zone_bytes);
  bool landed = false;
  for (int first = chunk * per_chunk; first < end; first += slots_per_look) {
    const int slot = first + lane_index() / top_k;
    int row = -1;
    if (slot < min(end, first + slots_per_look)) {
      row = routing.slot_rows[(int64_t{source} * routing.num_tokens + slot) * top_k +
                              lane_index() % top_k];
    }
    if (row >= routing.capacity) {
      fail(view, ErrorKind::kBounds, Phase::kReceiveChunk, source, epoch, routing.capacity, row);
      row = -1;
    }
    if (__ballot_sync(kAllLanes, row >= 0) == 0) continue;
    if (!landed) {
      if (!wait_for_chunk(view, team, epoch, source, chunk)) return;
      fence_global_for_bulk();  // The chunk's flag has been acquired.
      landed = true;
    }
    int a = 0;
    if (p.encoding.decode) {
      for (int leaf = 0; leaf < p.encoding.num_leaves; ++leaf) {
        decode_rows<F, T>(p, leaf, team, stream, segments, row, slot, from_zone);
      }
      a = 2 * p.encoding.num_leaves;
    }
    for (; a < exchange.num_arrays; ++a) {
      const MovedArray& array = exchange.arrays[a];
      if (array.out == nullptr) continue;
      const char* from = from_zone + array.zone_offset + slot * slot_stride<F>(p, a);
      expand_rows(array, team, stream, top_k, row, from);
    }
  }
}

// Zeroes those of `count` rows that carry no token.
template <TokenFormat F, typename T>
__device__ void zero_rows(const FormatDispatchParams& p, const Team& team, const char* zeros,
                          int first, int count) {
  const DispatchParams& exchange = p.exchange;
  const int64_t mine = first + lane_index();
  const bool is_empty = lane_index() < count && mine < exchange.routing.capacity &&
                        exchange.routing.row_rank[mine] < 0;
  const uint32_t empty = __ballot_sync(kAllLanes, is_empty);
  for (int a = 0; a < exchange.num_arrays; ++a) {
    MovedArray array = exchange.arrays[a];
    if (array.out == nullptr) continue;
    if (p.encoding.decode && a < 2 * p.encoding.num_leaves) {
      array.row_bytes = decoded_row_bytes<F, T>(array);
    }
    zero_rows_of(array, team, zeros, first, is_empty, empty);
  }
}

template <TokenFormat F, typename T>
__device__ void receive(const FormatDispatchParams& p, const Team& team, Stream& stream,
                        const char* zeros, uint64_t epoch) {
  const RankView& view = p.exchange.view;
  const int num_ranks = view.num_ranks;
  const int zero_count = rows_per_zero_item(p.exchange.routing.capacity, gridDim.x);
  const int zero_items = ceil_div(p.exchange.routing.capacity, zero_count);
  const int num_chunks = num_chunks_of(p.exchange.routing.num_tokens);
  DecodedSegments segments(stream.shared);
  delay_for_test(view, Phase::kReceiveChunk);
  while (true) {
    const int item = take_item(control(view).next_receive, team);
    if (item >= zero_items + num_chunks * num_ranks) return;
    if (item < zero_items) {
      zero_rows<F, T>(p, team, zeros, item * zero_count, zero_count);
      continue;
    }
    const int landing = item - zero_items;
    const int source = (view.rank + num_ranks - 1 - landing % num_ranks) % num_ranks;
    expand_chunk<F, T>(p, team, stream, segments, epoch, source, landing / num_ranks);
    mark(view, Mark::kReceived);
  }
}

template <TokenFormat F, typename T>
__device__ void send(const FormatDispatchParams& p, const Team& team, Stream& stream,
                     const BlockState& block, uint32_t asked) {
  const RankView& view = p.exchange.view;
  if (!begin_sending(view, block, p.exchange.roles, team, asked)) return;
  const uint64_t epoch = block.epoch;
  const int num_ranks = view.num_ranks;
  const int num_items = num_format_items(p.exchange.routing.num_tokens, num_ranks);
  const bool by_token = slots_per_chunk(p.exchange.routing.num_tokens) == 1;
  EncodedSegments segments(stream.shared);
  send_items(view, team, epoch, num_items, asked, [&](int item) {
    if (by_token) {
      send_everywhere<F, T>(p, team, stream, segments, epoch, item);
    } else {
      const int destination = (view.rank + 1 + item % num_ranks) % num_ranks;
      send_chunk<F, T>(p, team, stream, segments, epoch, destination, item / num_ranks);
    }
  });
}

template <TokenFormat F, typename T>
__global__ void __launch_bounds__(kThreads, 1)
    format_dispatch_kernel(const __grid_constant__ FormatDispatchParams p) {
  extern __shared__ __align__(128) char dynamic_shared[];
  __shared__ __align__(128) char zeros[kSegmentBytes];
  __shared__ BlockState block;
  const DispatchParams& exchange = p.exchange;
  Stream stream(dynamic_shared);
  for (int i = threadIdx.x; i < kSegmentBytes; i += kThreads) zeros[i] = 0;
  fence_shared_for_bulk();
  const Team senders(exchange.roles.send_teams, block.mailboxes);
  const uint32_t asked = ask_before_entering(exchange.view, exchange.roles, senders);
  // enter() has a barrier behind the first values of the mbarriers and zeros.
  if (enter(exchange.view, block)) {
    send<F, T>(p, senders, stream, block, asked);
    change_teams(exchange.roles);
    const Team receivers(exchange.roles.receive_teams, block.mailboxes);
    receive<F, T>(p, receivers, stream, zeros, block.epoch);
  }
  wait_until_stored();  // Nothing of this block is under way when it leaves.
  leave(exchange.view, block, exchange.fills, p.num_results);
}

using Kernel = void (*)(FormatDispatchParams);
constexpr int kNumTypes = 3;

template <TokenFormat F>
constexpr Kernel kKernels[kNumTypes] = {format_dispatch_kernel<F, __nv_bfloat16>,
                                        format_dispatch_kernel<F, __half>,
                                        format_dispatch_kernel<F, float>};

Kernel kernel_of(TokenFormat format, ElementType type) {
  const int t = static_cast<int>(type);
  switch (format) {
    case TokenFormat::kBlockwiseFp8: return kKernels<TokenFormat::kBlockwiseFp8>[t];
    case TokenFormat::kMxFp8: return kKernels<TokenFormat::kMxFp8>[t];
    case TokenFormat::kNvFp4: return kKernels<TokenFormat::kNvFp4>[t];
  }
  return nullptr;
}

}  // namespace

cudaError_t LaunchFormatDispatch(const FormatDispatchParams& params, int num_blocks,
                                 cudaStream_t stream) {
  return Launch(kernel_of(params.encoding.format, params.encoding.type), num_blocks, kThreads,
                kStreamSharedBytes, stream, params);
}

cudaError_t LoadFormatDispatch() {
  for (int format = 1; format <= kNumFormats; ++format) {
    for (int type = 0; type < kNumTypes; ++type) {
      const Kernel kernel =
          kernel_of(static_cast<TokenFormat>(format), static_cast<ElementType>(type));
      const cudaError_t error = cudaFuncSetAttribute(
          kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kStreamSharedBytes);
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

}  // namespace moe_a2a
