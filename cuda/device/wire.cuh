// Writes and reads partial sums that travel in a token format, for sum_parts() in device/sum.cuh. A
// slot has the values of a row and then its scales. A lane encodes its own 16-byte words of sums. A
// group, which shares a scale, is the words of a few neighbouring lanes.
#pragma once

#include "device/format.cuh"
#include "device/sum.cuh"

namespace moe_a2a {

// In templates, this type replaces the wire dtype if partial sums travel in a format.
template <TokenFormat F>
struct Encoded {
  static constexpr TokenFormat kFormat = F;
};

template <typename Wire>
constexpr bool kIsEncoded = false;
template <TokenFormat F>
constexpr bool kIsEncoded<Encoded<F>> = true;

// Encodes and decodes a row of partial sums of type T, or a segment of a row.
template <TokenFormat F, typename T>
class EncodedWire {
 public:
  // `scales` is the distance in bytes from the first value to the first scale.
  __device__ EncodedWire(float global_scale, int64_t scales)
      : global_(global_scale), scales_(scales) {}

  // Encodes a part: returns the values and the scale of each word. All lanes call it.
  __device__ __forceinline__ RowPart narrow(const Float32Part<T>& sum) const {
    RowPart part;
#pragma unroll
    for (int u = 0; u < kPartWords; ++u) {
      const GroupEncoding<F> group(largest_of_lanes<kLanes>(largest_magnitude(sum.v[u])), global_);
      const Values<F, kNumbers> values = encode_numbers(sum.v[u], group, global_);
      part.words[u] = {values.words[0], values.words[kWords - 1], group.scale, 0};
    }
    return part;
  }

  // Loads one part, which begins at byte `offset` of the row of sums, from the landed `row`.
  __device__ __forceinline__ void load(RowPart& part, const RowParts& range, const char* row,
                                       int64_t offset) const {
    range.each_word(offset, [&](int u, int64_t at) {
      const int64_t word = at / kVectorBytes;
      const auto* scales = reinterpret_cast<const Scale*>(row + scales_);
      const Vector values = load_landed(reinterpret_cast<const Vector*>(row) + word);
      part.words[u] = {static_cast<uint32_t>(values),
                       static_cast<uint32_t>(static_cast<uint64_t>(values) >> 32),
                       load_landed(scales + word / kLanes), 0};
    });
  }

  __device__ __forceinline__ void add(Float32Part<T>& sum, const RowPart& part) const {
#pragma unroll
    for (int u = 0; u < kPartWords; ++u) {
      Values<F, kNumbers> values;
      values.words[0] = part.words[u].x;
      if (kWords > 1) values.words[kWords - 1] = part.words[u].y;
      float x[kNumbers];
      const bool is_finite =
          decode_numbers<float>(values, static_cast<Scale>(part.words[u].z), global_, x);
#pragma unroll
      for (int i = 0; i < kNumbers; ++i) {
        sum.v[u][i] += is_finite ? x[i] : __uint_as_float(Element<float>::kNanWord);
      }
    }
  }

  // Stores an encoded part. To make fewer stores to a peer, keeps scales until each lane has one,
  // or until the next scales are not adjacent. All lanes call it for all parts in order.
  __device__ __forceinline__ void store(const RowPart& part, const RowParts& range, char* row,
                                        int64_t offset) {
    range.each_word(offset, [&](int u, int64_t at) {
      reinterpret_cast<Vector*>(row)[at / kVectorBytes] = static_cast<Vector>(
          part.words[u].x | static_cast<uint64_t>(sizeof(Vector) > 4 ? part.words[u].y : 0) << 32);
    });
#pragma unroll
    for (int u = 0; u < kPartWords; ++u) {
      const int64_t first = offset + u * range.word_step;  // the warp's first byte
      if (first >= range.row_bytes) return;
      const uint32_t scale =
          __shfl_sync(kAllLanes, part.words[u].z, lane_index() % kGroups * kLanes);
      if (lane_index() / kGroups == num_kept_) kept_ = scale;
      ++num_kept_;
      constexpr int64_t kWarpBytes = kWarpThreads * kVectorBytes;
      const int64_t next = first + range.word_step;
      if (num_kept_ < kLanes && next == first + kWarpBytes && next < range.row_bytes) continue;
      const int64_t word = (first - (num_kept_ - 1) * kWarpBytes) / kVectorBytes;
      const int64_t group = word / kLanes + lane_index();
      if (lane_index() < num_kept_ * kGroups && group * kLanes * kVectorBytes < range.row_bytes) {
        reinterpret_cast<Scale*>(row + scales_)[group] = static_cast<Scale>(kept_);
      }
      num_kept_ = 0;
    }
  }

 private:
  using Scale = typename Format<F>::Scale;
  static constexpr int kNumbers = Float32Part<T>::kNumbers;    // of a word
  static constexpr int kLanes = Format<F>::kGroup / kNumbers;  // that share a group
  static constexpr int kGroups = kWarpThreads / kLanes;        // of a warp's words
  using Vector = typename Word<kNumbers * Format<F>::kValueBits / 8>::type;
  static constexpr int kWords = sizeof(Values<F, kNumbers>) / sizeof(uint32_t);
  static_assert(kLanes * kGroups == kWarpThreads && kWords <= 2);

  GlobalScale global_;
  int64_t scales_;
  uint32_t kept_ = 0;  // a scale that this lane has not stored yet
  int num_kept_ = 0;   // number of steps whose scales are kept, at most one scale in each lane
};

}  // namespace moe_a2a
