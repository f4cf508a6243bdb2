// Encodes and decodes rows in a token format. A warp computes one segment of a row at a time in
// shared memory, in rounds of 512 numbers. With BulkSegments, bulk copies store a segment while the
// warp computes the next segment. With PlainSegments, all lanes store a segment, which is faster
// for few rows.
#pragma once

#include "device/format.cuh"
#include "device/stream.cuh"

namespace moe_a2a {

constexpr int kRoundElements = kWarpThreads * kLaneElements;

// A segment has at most kMadeBytes. A decoded segment has only numbers. An encoded segment has
// values, and then scales from byte kEncodedValueBytes on.
constexpr int kEncodedValueBytes = Tuning::kEncodedValueBytes;
constexpr int kMadeBytes = Tuning::kMadeBytes;
static_assert(kEncodedValueBytes % kVectorBytes == 0, "scales begin at this offset");

// Where a warp stores a segment: in slot slots[i] of the zone at to[i], or in the row at to[i].
struct Destinations {
  char* const* to;
  const int* slots;
  int count;

  // Tells the compiler that `to` is in shared memory, for functions that are not inlined.
  __device__ void assume_shared() const { __builtin_assume(__isShared(to)); }
};

// Values or scales of a segment. They go to byte `offset` + s * `stride` of a zone for slot s.
struct SegmentPart {
  const char* made;
  uint32_t bytes;
  int64_t offset, stride;

  __device__ char* at(const Destinations& zones, int i) const {
    return zones.to[i] + offset + int64_t{zones.slots[i]} * stride;
  }
};

// Segments that a warp's first lane stores by bulk copies. Segments are in the stages of the warp's
// Stream, so no load of this Stream may be in flight.
class BulkSegments {
 public:
  __device__ explicit BulkSegments(StreamShared* shared) : memory_(shared->stages[0]) {}

  // Returns the memory for the next segment. All lanes call it.
  __device__ char* next() {
    if (lane_index() == 0) wait_until_read<kCount - 1>();
    __syncwarp();
    char* segment = memory_ + next_ * kMadeBytes;
    next_ = next_ + 1 == kCount ? 0 : next_ + 1;
    return segment;
  }
  // Stores `a` (values) and `b` (their scales) in all zones.
  __device__ void store(const Destinations& zones, const SegmentPart& a, const SegmentPart& b) {
    fence_shared_for_bulk();
    __syncwarp();
    if (lane_index() != 0) return;
    for (int i = 0; i < zones.count; ++i) {
      bulk_store(a.at(zones, i), a.made, a.bytes);
      bulk_store(b.at(zones, i), b.made, b.bytes);
    }
    end_store_group();
  }
  // Stores the `bytes` bytes of numbers at `made` to all rows, at byte `offset` of each row.
  __device__ void store(const Destinations& rows, const char* made, uint32_t bytes,
                        int64_t offset) {
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

// Copies whole vectors from shared memory. All lanes of a warp call it.
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

// Segments that all lanes of a warp store. There is memory for one segment.
class PlainSegments {
 public:
  __device__ explicit PlainSegments(char* memory) : memory_(memory) {}

  __device__ char* next() {
    __syncwarp();  // All lanes have read the previous segment.
    return memory_;
  }
  // Loads the segment again for each destination row, because this was faster in measurements.
  __device__ void store(const Destinations& rows, const char* made, uint32_t bytes,
                        int64_t offset) {
    __syncwarp();
    for (int i = 0; i < rows.count; ++i) store_by_lanes(rows.to[i] + offset, made, bytes);
  }
  __device__ void store(const Destinations& zones, const SegmentPart& a, const SegmentPart& b) {
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

// The rounds of a row that one warp of a team computes. The warps compute segments of `most` rounds
// in turn. Segments are shorter if the team would otherwise have more warps than segments.
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
  __device__ int64_t first() const { return int64_t{round_} * kRoundElements; }  // element
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

// Writes this lane's values. If the lane is the first of a group, also writes the group's scale.
template <TokenFormat F, typename T>
__device__ __forceinline__ void encode_round(const LaneNumbers<T>& lane, const GlobalScale& global,
                                             char* values, char* scales) {
  const uint32_t largest = largest_of_lanes<kGroupLanes<F>>(largest_magnitude(lane));
  const GroupEncoding<F> group(largest, global);
  const Values<F> encoded = encode_lane<F, T>(lane, group, global);
  using Vector = typename Word<kLaneBytes<F>>::type;
  reinterpret_cast<Vector*>(values)[lane_index()] = reinterpret_cast<const Vector&>(encoded);
  if (lane_index() % kGroupLanes<F> == 0) {
    reinterpret_cast<typename Format<F>::Scale*>(scales)[lane_index() / kGroupLanes<F>] =
        group.scale;
  }
}

template <TokenFormat F, typename T, typename Segments>
__device__ __noinline__ void encode_row(const MovedArray& values, const MovedArray& scales,
                                        const Team& team, Destinations destinations,
                                        Segments& segments, int64_t token,
                                        const GlobalScale& global) {
  constexpr int kScaleBytes = sizeof(typename Format<F>::Scale);
  constexpr int kRoundValueBytes = kRoundElements * Format<F>::kValueBits / 8;
  constexpr int kRoundScaleBytes = kRoundElements / Format<F>::kGroup * kScaleBytes;
  constexpr int kMostRounds = kEncodedValueBytes / kRoundValueBytes;
  static_assert(kMostRounds > 0 &&
                kMostRounds * kRoundScaleBytes <= kMadeBytes - kEncodedValueBytes);
  destinations.assume_shared();
  const int64_t elements = values.row_bytes * 8 / Format<F>::kValueBits;
  const T* row = reinterpret_cast<const T*>(values.in) + token * elements;
  Rounds rounds(team, elements, kMostRounds), ahead = rounds;
  const auto load_next = [&] {
    LaneNumbers<T> lane = {};
    const int64_t element = ahead.first() + lane_index() * kLaneElements;
    if (ahead.has_more() && element < elements) {
#pragma unroll
      for (int i = 0; i < static_cast<int>(sizeof(lane) / sizeof(uint4)); ++i) {
        lane.vectors[i] = reinterpret_cast<const uint4*>(row + element)[i];
      }
    }
    ahead.advance();
    return lane;
  };
  char* segment = nullptr;
  // Encodes the round in `lane`, then loads a later one. Returns false after the last round.
  const auto encode_next = [&](LaneNumbers<T>& lane) {
    if (rounds.in_segment() == 0) segment = segments.next();
    encode_round<F, T>(lane, global, segment + rounds.in_segment() * kRoundValueBytes,
                       segment + kEncodedValueBytes + rounds.in_segment() * kRoundScaleBytes);
    lane = load_next();
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
      segments.store(destinations, of_values, of_scales);
    }
    rounds.advance();
    return rounds.has_more();
  };
  if (!rounds.has_more()) return;
  LaneNumbers<T> a = load_next(), b = load_next();  // not an array: they must stay in registers
  while (encode_next(a) && encode_next(b)) {
  }
}

template <TokenFormat F, typename T, typename Segments>
__device__ __forceinline__ void encode_leaves(const DispatchParams& exchange,
                                              const Encoding& encoding, const Team& team,
                                              const Destinations& destinations, Segments& segments,
                                              int64_t token) {
  const GlobalScale global(encoding.token_scales == nullptr ? encoding.global_scale
                                                            : encoding.token_scales[token]);
  for (int a = 0; a < 2 * encoding.num_leaves; a += 2) {
    encode_row<F, T>(exchange.arrays[a], exchange.arrays[a + 1], team, destinations, segments,
                     token, global);
  }
}

__device__ inline MovedArray decoded_rows(const DispatchParams& exchange, const Encoding& encoding,
                                          int leaf) {
  MovedArray rows = exchange.arrays[2 * leaf];
  rows.out = encoding.decoded[leaf];
  rows.row_bytes = decoded_bytes(encoding, rows.row_bytes);
  rows.width = kVectorBytes;
  return rows;
}

// Decodes a landed row of one leaf to all `rows`. If `values` and `scales` have outputs, also
// copies the encoded row to row `row` of these outputs, for each lane in the mask `choices`.
template <TokenFormat F, typename T, typename Segments>
__device__ __noinline__ void decode_row(const MovedArray& values, const MovedArray& scales,
                                        const Team& team, Destinations rows, int row,
                                        uint32_t choices, Segments& segments,
                                        const char* from_values, const char* from_scales,
                                        const GlobalScale& global) {
  using Scale = typename Format<F>::Scale;
  using Vector = typename Word<kLaneBytes<F>>::type;
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
    const int64_t element = ahead.first() + lane_index() * kLaneElements;
    if (ahead.has_more() && element < elements) {
      landed.values =
          load_landed(reinterpret_cast<const Vector*>(from_values) + element / kLaneElements);
      landed.scale =
          load_landed(reinterpret_cast<const Scale*>(from_scales) + element / Format<F>::kGroup);
    }
    ahead.advance();
    return landed;
  };
  // Stores an encoded round directly from registers, because its 512 numbers are contiguous.
  const auto keep_encoded = [&](const Landed& landed) {
    const int64_t element = rounds.first() + lane_index() * kLaneElements;
    for (uint32_t left = choices; left != 0; left &= left - 1) {
      const int64_t to = __shfl_sync(kAllLanes, row, __ffs(left) - 1);
      if (element >= elements) continue;
      reinterpret_cast<Vector*>(values.out + to * values.row_bytes)[element / kLaneElements] =
          landed.values;
      if (lane_index() % kGroupLanes<F> != 0) continue;
      reinterpret_cast<Scale*>(scales.out + to * scales.row_bytes)[element / Format<F>::kGroup] =
          landed.scale;
    }
  };
  char* segment = nullptr;
  // Decodes the round in `landed`, then loads a later one. Returns false after the last round.
  const auto decode_next = [&](Landed& landed) {
    if (values.out != nullptr) keep_encoded(landed);
    const LaneNumbers<T> lane =
        decode_lane<F, T>(reinterpret_cast<const Values<F>&>(landed.values), landed.scale, global);
    landed = load_next();
    if (rounds.in_segment() == 0) segment = segments.next();
    auto* round = reinterpret_cast<LaneNumbers<T>*>(segment + rounds.in_segment() * kRoundBytes);
    round[lane_index()] = lane;
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

// Decodes one leaf of a landed slot to the output row `row` of each lane in the mask `choices`. The
// warp writes the addresses of these rows to `list`, which is in its shared memory.
template <TokenFormat F, typename T, typename Segments>
__device__ __forceinline__ void decode_leaf(const DispatchParams& exchange,
                                            const Encoding& encoding, int leaf, const Team& team,
                                            char** list, Segments& segments, int row,
                                            uint32_t choices, const char* from_zone, int64_t slot) {
  const MovedArray& values = exchange.arrays[2 * leaf];
  const MovedArray& scales = exchange.arrays[2 * leaf + 1];
  if (choices >> lane_index() & 1) {
    list[__popc(choices & ((1u << lane_index()) - 1))] =
        encoding.decoded[leaf] + row * decoded_bytes(encoding, values.row_bytes);
  }
  __syncwarp();
  const auto landed = [&](const MovedArray& array) {
    return from_zone + array.zone_offset + slot * row_stride(array.row_bytes);
  };
  const float global = encoding.token_scales == nullptr
                           ? encoding.global_scale
                           : load_landed(reinterpret_cast<const float*>(
                                 landed(exchange.arrays[exchange.num_arrays - 1])));
  decode_row<F, T>(values, scales, team, {list, nullptr, __popc(choices)}, row, choices, segments,
                   landed(values), landed(scales), GlobalScale(global));
  __syncwarp();  // All lanes have read the list.
}

}  // namespace moe_a2a
