// Rows in a token format: a team encodes a token and stores it to all of its landings, or decodes a landed
// row and stores it to its rows.
//
// A warp makes segments of a row in shared memory, each of a few rounds of 512 numbers. How a segment leaves
// is for whoever gives the memory to say: by bulk copies, while the warp makes the next one, or by ordinary
// stores of all its lanes, which are done sooner.
#ifndef MOE_A2A_DEVICE_ENCODE_CUH_
#define MOE_A2A_DEVICE_ENCODE_CUH_

#include "device/format.cuh"
#include "device/stream.cuh"

namespace moe_a2a {

// A round: a piece for each lane.
constexpr int kRoundElements = kWarpThreads * kPieceElements;

// A segment of a row that is encoded: values, then their scales. Of one that is decoded: numbers. Large
// ones, for every bulk copy has its price.
constexpr int kEncodedValueBytes = Tuning::kEncodedValueBytes;
constexpr int kMadeBytes = Tuning::kMadeBytes;
static_assert(kEncodedValueBytes % kVectorBytes == 0);  // Scales begin there.

// A list of a warp: where what it makes goes. Zones, and the slot in each; or rows, which have none.
struct Landings {
  char* const* to;
  const int* slots;
  int count;

  // For the compiler, which does not see it across a call.
  __device__ void assume_shared() const { __builtin_assume(__isShared(to)); }
};

// A part of a segment: whole vectors, and where they begin in a zone, a slot taking `stride`.
struct SegmentPart {
  const char* made;
  uint32_t bytes;
  int64_t offset, stride;

  __device__ char* at(const Landings& zones, int i) const {
    return zones.to[i] + offset + int64_t{zones.slots[i]} * stride;
  }
};

// Segments that a warp makes in its part of shared memory, in turn, to be stored by its first lane. They
// take the stages of its stream, which is at rest meanwhile.
class BulkSegments {
 public:
  __device__ explicit BulkSegments(StreamShared* shared) : memory_(shared->stages[0]) {}

  // Where the next one is to be written. All lanes call it.
  __device__ char* next() {
    if (lane_index() == 0) wait_until_read<kCount - 1>();
    __syncwarp();
    char* segment = memory_ + next_ * kMadeBytes;
    next_ = next_ + 1 == kCount ? 0 : next_ + 1;
    return segment;
  }
  // Stores what all lanes have written: two parts to zones.
  __device__ void store(const Landings& zones, const SegmentPart& a, const SegmentPart& b) {
    fence_shared_for_bulk();
    __syncwarp();
    if (lane_index() != 0) return;
    for (int i = 0; i < zones.count; ++i) {
      bulk_store(a.at(zones, i), a.made, a.bytes);
      bulk_store(b.at(zones, i), b.made, b.bytes);
    }
    end_store_group();
  }
  // One part to rows, `offset` behind the beginning of each.
  __device__ void store(const Landings& rows, const char* made, uint32_t bytes, int64_t offset) {
    fence_shared_for_bulk();
    __syncwarp();
    if (lane_index() != 0) return;
    for (int i = 0; i < rows.count; ++i) bulk_store(rows.to[i] + offset, made, bytes);
    end_store_group();
  }

 private:
  static constexpr int kCount = kStages * kSegmentBytes / kMadeBytes;
  static_assert(kCount > 1 && kMadeBytes % kVectorBytes == 0);
  char* memory_;
  int next_ = 0;
};

// Copies whole vectors from shared memory. All lanes of a warp.
__device__ inline void store_by_lanes(char* to, const char* from, uint32_t bytes) {
  constexpr int kUnroll = Tuning::kLoadsOfEncoded;
  constexpr uint32_t kStep = kWarpThreads * kVectorBytes;
  for (uint32_t first = lane_index() * kVectorBytes; first < bytes; first += kUnroll * kStep) {
    uint4 v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const uint32_t at = first + u * kStep;
      if (at < bytes) v[u] = *reinterpret_cast<const uint4*>(from + at);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const uint32_t at = first + u * kStep;
      if (at < bytes) *reinterpret_cast<uint4*>(to + at) = v[u];
    }
  }
}

// The same, a segment at a time in `memory` of its own, stored by all lanes of the warp.
class PlainSegments {
 public:
  __device__ explicit PlainSegments(char* memory) : memory_(memory) {}

  __device__ char* next() {
    __syncwarp();  // The last one has been read.
    return memory_;
  }
  // Read again for each row: by measurement that is faster.
  __device__ void store(const Landings& rows, const char* made, uint32_t bytes, int64_t offset) {
    __syncwarp();
    for (int i = 0; i < rows.count; ++i) store_by_lanes(rows.to[i] + offset, made, bytes);
  }
  // Read once for all zones.
  __device__ void store(const Landings& zones, const SegmentPart& a, const SegmentPart& b) {
    constexpr int kUnroll = Tuning::kLoadsOfEncoded;
    const int of_a = a.bytes / kVectorBytes, all = of_a + b.bytes / kVectorBytes;
    const auto vector = [&](char* in_a, char* in_b, int i) {
      return reinterpret_cast<uint4*>(i < of_a ? in_a : in_b - of_a * kVectorBytes) + i;
    };
    __syncwarp();
    for (int first = lane_index(); first < all; first += kUnroll * kWarpThreads) {
      uint4 v[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int i = first + u * kWarpThreads;
        if (i < all) v[u] = *vector(const_cast<char*>(a.made), const_cast<char*>(b.made), i);
      }
      for (int l = 0; l < zones.count; ++l) {
        char *in_a = a.at(zones, l), *in_b = b.at(zones, l);
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const int i = first + u * kWarpThreads;
          if (i < all) *vector(in_a, in_b, i) = v[u];
        }
      }
    }
  }

 private:
  char* memory_;
};

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
  // The first element of this round, and of its segment.
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

// Encodes the token `in` of one leaf and stores it where it lands.
template <TokenFormat F, typename T, typename Segments>
__device__ __noinline__ void encode_row(const MovedArray& values, const MovedArray& scales,
                                        const Team& team, Landings landings, Segments& segments,
                                        int64_t token, const GlobalScale& global) {
  constexpr int kScaleBytes = sizeof(typename Format<F>::Scale);
  constexpr int kRoundValueBytes = kRoundElements * Format<F>::kValueBits / 8;
  constexpr int kRoundScaleBytes = kRoundElements / Format<F>::kGroup * kScaleBytes;
  constexpr int kMostRounds = kEncodedValueBytes / kRoundValueBytes;
  static_assert(kMostRounds > 0 &&
                kMostRounds * kRoundScaleBytes <= kMadeBytes - kEncodedValueBytes);
  landings.assume_shared();
  const int64_t elements = values.row_bytes * 8 / Format<F>::kValueBits;
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
    encode_round<F, T>(piece, global, segment + rounds.in_segment() * kRoundValueBytes,
                       segment + kEncodedValueBytes + rounds.in_segment() * kRoundScaleBytes);
    piece = load_next();
    if (rounds.ends_segment()) {
      const int64_t first = rounds.first_of_segment();
      const int64_t here = min(elements, rounds.first() + kRoundElements) - first;
      const SegmentPart of_values = {segment, whole_vectors(here * Format<F>::kValueBits / 8),
                                     values.zone_offset + first * Format<F>::kValueBits / 8,
                                     row_stride(values.row_bytes)};
      const SegmentPart of_scales = {segment + kEncodedValueBytes,
                                     whole_vectors(here / Format<F>::kGroup * kScaleBytes),
                                     scales.zone_offset + first / Format<F>::kGroup * kScaleBytes,
                                     row_stride(scales.row_bytes)};
      segments.store(landings, of_values, of_scales);
    }
    rounds.advance();
    return rounds.has_more();
  };
  if (!rounds.has_more()) return;
  NumberPiece<T> a = load_next(), b = load_next();  // no array: they must stay in registers
  while (encode_next(a) && encode_next(b)) {
  }
}

// Encodes all leaves of a token and stores them where it lands.
template <TokenFormat F, typename T, typename Segments>
__device__ __forceinline__ void encode_leaves(const DispatchParams& exchange,
                                              const Encoding& encoding, const Team& team,
                                              const Landings& landings, Segments& segments,
                                              int64_t token) {
  const GlobalScale global(encoding.token_scales == nullptr ? encoding.global_scale
                                                            : encoding.token_scales[token]);
  for (int a = 0; a < 2 * encoding.num_leaves; a += 2) {
    encode_row<F, T>(exchange.arrays[a], exchange.arrays[a + 1], team, landings, segments, token,
                     global);
  }
}

// Decodes a landed row of one leaf to its rows here.
template <TokenFormat F, typename T, typename Segments>
__device__ __noinline__ void decode_row(const MovedArray& values, const Team& team, Landings rows,
                                        Segments& segments, const char* from_values,
                                        const char* from_scales, const GlobalScale& global) {
  using Scale = typename Format<F>::Scale;
  using Vector = typename Word<kPieceBytes<F>>::Type;
  constexpr int kRoundBytes = kRoundElements * sizeof(T);
  static_assert(kRoundBytes <= kMadeBytes);
  rows.assume_shared();
  const int64_t elements = values.row_bytes * 8 / Format<F>::kValueBits;
  Rounds rounds(team, elements, kMadeBytes / kRoundBytes), ahead = rounds;
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
      const int64_t first = rounds.first_of_segment();
      const int64_t here = min(elements, rounds.first() + kRoundElements) - first;
      const int64_t offset = first * sizeof(T), bytes = here * sizeof(T);
      segments.store(rows, segment, static_cast<uint32_t>(bytes), offset);
    }
    rounds.advance();
    return rounds.has_more();
  };
  if (!rounds.has_more()) return;
  Landed a = load_next(), b = load_next(), c = load_next(), d = load_next();
  while (decode_next(a) && decode_next(b) && decode_next(c) && decode_next(d)) {
  }
}

// Decodes one leaf of a slot that has landed in a zone at `from_zone`. Lanes of `choices` hold the rows that
// are the slot's; `list`, the warp's own, has room for them.
template <TokenFormat F, typename T, typename Segments>
__device__ __forceinline__ void decode_leaf(const DispatchParams& exchange,
                                            const Encoding& encoding, int leaf, const Team& team,
                                            char** list, Segments& segments, int row,
                                            uint32_t choices, const char* from_zone, int64_t slot) {
  const MovedArray& values = exchange.arrays[2 * leaf];
  const MovedArray& scales = exchange.arrays[2 * leaf + 1];
  if (choices >> lane_index() & 1) {
    list[__popc(choices & ((1u << lane_index()) - 1))] =
        values.out + row * decoded_bytes(encoding, values.row_bytes);
  }
  __syncwarp();
  const auto landed = [&](const MovedArray& array) {
    return from_zone + array.zone_offset + slot * row_stride(array.row_bytes);
  };
  const float global = encoding.token_scales == nullptr
                           ? encoding.global_scale
                           : load_landed(reinterpret_cast<const float*>(
                                 landed(exchange.arrays[exchange.num_arrays - 1])));
  decode_row<F, T>(values, team, {list, nullptr, __popc(choices)}, segments, landed(values),
                   landed(scales), GlobalScale(global));
  __syncwarp();  // The list has been read.
}

}  // namespace moe_a2a

#endif  // MOE_A2A_DEVICE_ENCODE_CUH_
