// Sums rows in float32 and rounds the sums.
#pragma once

#include <type_traits>

#include "device/copy.cuh"
#include "device/element.cuh"
#include "params.h"

namespace moe_a2a {

// `kCount` neighbouring elements, which one access loads or stores.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  T v[kCount];
};

// The number of packs that a thread has in registers at a time.
constexpr int kSumUnroll = Tuning::kLoadsOfPacks;

// The positions of a thread's packs in a row. Pack u starts at element `first + u * stride`, if the
// row is that long. Packs of the team's other threads are in between.
template <int kCount>
struct PackOffsets {
  int64_t first, stride, elements;

  __device__ PackOffsets(const Team& team, int64_t base, int64_t elements)
      : first((base + team.thread()) * kCount),
        stride(int64_t{team.threads()} * kCount),
        elements(elements) {}
  __device__ int64_t element(int u) const { return first + u * stride; }
  __device__ bool has(int u) const { return element(u) < elements; }
};

// Calls `body(PackOffsets)` until the team has processed the row. All lanes of a warp call `body`
// equally often, because it may use warp shuffles.
template <int kCount, typename Body>
__device__ __forceinline__ void for_each_packs(const Team& team, int64_t elements, Body&& body) {
  for (int64_t base = 0; base * kCount < elements; base += int64_t{kSumUnroll} * team.threads()) {
    body(PackOffsets<kCount>(team, base, elements));
  }
}

template <typename T, int kCount>
struct Packs {
  using W = typename Word<sizeof(T) * kCount>::type;
  Pack<T, kCount> v[kSumUnroll];

  __device__ void load(const T* row, const PackOffsets<kCount>& offsets) {
#pragma unroll
    for (int u = 0; u < kSumUnroll; ++u) {
      const auto* from = reinterpret_cast<const W*>(row + offsets.element(u));
      if (offsets.has(u)) *reinterpret_cast<W*>(&v[u]) = load_landed(from);
    }
  }
  __device__ void store(T* row, const PackOffsets<kCount>& offsets) const {
#pragma unroll
    for (int u = 0; u < kSumUnroll; ++u) {
      auto* to = reinterpret_cast<W*>(row + offsets.element(u));
      if (offsets.has(u)) *to = *reinterpret_cast<const W*>(&v[u]);
    }
  }
};

template <int kCount>
struct Accumulator {
  float v[kSumUnroll][kCount] = {};

  // Adds factor(u) * packs. Elements past the row's end are garbage, which store() does not write.
  template <typename T, typename Factor>
  __device__ void add(const Packs<T, kCount>& packs, Factor&& factor) {
#pragma unroll
    for (int u = 0; u < kSumUnroll; ++u) {
      const float f = factor(u);
#pragma unroll
      for (int i = 0; i < kCount; ++i) v[u][i] += f * to_float(packs.v[u].v[i]);
    }
  }

  template <typename T>
  __device__ Packs<T, kCount> rounded() const {
    Packs<T, kCount> packs;
#pragma unroll
    for (int u = 0; u < kSumUnroll; ++u) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) packs.v[u].v[i] = from_float<T>(v[u][i]);
    }
    return packs;
  }
};

// The weights of a row. Usually all elements have the same weight.
struct RowWeights {
  const float* weights;  // null: 1
  int64_t elements_per_weight;

  template <int kCount>
  __device__ float at(const PackOffsets<kCount>& offsets, int u) const {
    if (weights == nullptr) return 1.f;
    if (offsets.elements == elements_per_weight) return *weights;
    return offsets.has(u) ? weights[offsets.element(u) / elements_per_weight] : 0.f;
  }
};

__device__ __forceinline__ RowWeights row_weights(const CombineParams& p, int64_t elements,
                                                  int pair, int64_t row) {
  if (p.num_pairs == 0) return {nullptr, elements};
  return {p.pair_weights[pair] + row * (elements / p.elements_per_weight), p.elements_per_weight};
}

// Returns the sum of a token's rows on this rank, added in the order of choices. In every warp,
// `row` of lane k is the row of choice k, or negative. `choices` is the mask of lanes with a row.
template <typename T, int kCount>
__device__ __forceinline__ Accumulator<kCount> sum_rows(const CombineParams& p,
                                                        const SummedArray& array, int row,
                                                        uint32_t choices,
                                                        const PackOffsets<kCount>& offsets) {
  Accumulator<kCount> acc;
  while (choices != 0) {
    const int64_t first = __shfl_sync(kAllLanes, row, __ffs(choices) - 1);
    choices &= choices - 1;
    // With several pairs (params.h), load rows of one choice at a time. Otherwise load two rows.
    const bool both = choices != 0 && p.num_pairs <= 1;
    const int64_t second = both ? __shfl_sync(kAllLanes, row, __ffs(choices) - 1) : 0;
    if (both) choices &= choices - 1;
    for (int pair = 0; pair < max(1, p.num_pairs); ++pair) {
      const T* rows = static_cast<const T*>(p.num_pairs == 0 ? array.rows : p.pair_rows[pair]);
      const RowWeights first_weights = row_weights(p, array.elements, pair, first);
      const RowWeights second_weights = row_weights(p, array.elements, pair, second);
      Packs<T, kCount> a, b;
      a.load(rows + first * array.elements, offsets);
      if (both) b.load(rows + second * array.elements, offsets);
      acc.add(a, [&](int u) { return first_weights.at(offsets, u); });
      if (both) acc.add(b, [&](int u) { return second_weights.at(offsets, u); });
    }
  }
  return acc;
}

// ---- The fast path: at most one weight per row or row segment, one dtype, 16-byte words.

// The addresses of the rows that a warp sums: first this rank's rows in the order of choices, then
// landed rows in the order of ranks, then an addend. A token has at most kMaxTopK rows and an
// addend, because each choice has a row on this rank, or adds at most one landed row.
struct SourceList {
  const char* rows[kMaxTopK + 1];
  float factors[kMaxTopK];  // of this rank's rows; landed rows have none
};

struct SourceCounts {
  int own;
  int landed_before;  // number of landed partial sums of lower ranks
  int landed_after;   // number of landed partial sums of higher ranks
};

constexpr int kPartWords = Tuning::kPartWords;  // 16-byte words that a thread holds at a time

// The parts of a row that a warp sums. The first part begins at byte `first`, and another begins
// every `step` bytes. In a part, each lane has kPartWords words, `word_step` bytes apart.
struct RowParts {
  int64_t row_bytes, first, step, word_step;

  __device__ RowParts(const Team& team, int64_t row_bytes)
      : row_bytes(row_bytes),
        first(team.thread() / kWarpThreads * kWarpThreads * kVectorBytes),
        step(kPartWords * team.threads() * kVectorBytes),
        word_step(team.threads() * kVectorBytes) {}

  // Calls body(index of the word, its byte in the row) for this lane's words of a part.
  template <typename Body>
  __device__ __forceinline__ void each_word(int64_t offset, Body&& body) const {
#pragma unroll
    for (int u = 0; u < kPartWords; ++u) {
      const int64_t at = offset + u * word_step + lane_index() * kVectorBytes;
      if (at < row_bytes) body(u, at);
    }
  }
};

// This lane's words of a part. Words past the row's end are garbage, which no result uses.
struct RowPart {
  uint4 words[kPartWords];

  __device__ __forceinline__ void load(const RowParts& range, const char* row, int64_t offset) {
    range.each_word(offset, [&](int u, int64_t at) {
      words[u] = load_landed(reinterpret_cast<const uint4*>(row + at));
    });
  }
  __device__ __forceinline__ void store(const RowParts& range, char* row, int64_t offset) const {
    range.each_word(offset,
                    [&](int u, int64_t at) { *reinterpret_cast<uint4*>(row + at) = words[u]; });
  }
};

// The numbers of this lane's words of a part, in float32.
template <typename T>
struct Float32Part {
  static constexpr int kPerWord = sizeof(uint32_t) / sizeof(T);
  static constexpr int kNumbers = 4 * kPerWord;
  float v[kPartWords][kNumbers] = {};

  Float32Part() = default;
  __device__ __forceinline__ explicit Float32Part(const RowPart& part) { set(1.f, part); }

  __device__ __forceinline__ void add(float factor, const RowPart& part) {
    each(part, [factor](float& mine, float other) { mine += factor * other; });
  }
  // Sets the numbers to factor * part. Keeps the sign of a zero, unlike add().
  __device__ __forceinline__ void set(float factor, const RowPart& part) {
    each(part, [factor](float& mine, float other) { mine = factor * other; });
  }
  template <typename Body>
  __device__ __forceinline__ void each(const RowPart& part, Body&& body) {
#pragma unroll
    for (int u = 0; u < kPartWords; ++u) {
      const uint32_t words[4] = {part.words[u].x, part.words[u].y, part.words[u].z,
                                 part.words[u].w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        float wide[kPerWord];
        unpack<T>(words[w], wide);
#pragma unroll
        for (int i = 0; i < kPerWord; ++i) body(v[u][w * kPerWord + i], wide[i]);
      }
    }
  }
  __device__ __forceinline__ RowPart rounded() const {
    RowPart part;
#pragma unroll
    for (int u = 0; u < kPartWords; ++u) {
      part.words[u] = {pack<T>(v[u]), pack<T>(v[u] + kPerWord), pack<T>(v[u] + 2 * kPerWord),
                       pack<T>(v[u] + 3 * kPerWord)};
    }
    return part;
  }
  // Returns the inner product of word `u` of this part and word `u` of the other part.
  __device__ __forceinline__ float dot(const Float32Part& other, int u) const {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) sum += v[u][i] * other.v[u][i];
    return sum;
  }
};

// Partial sums travel as numbers of type T. In a token format, EncodedWire replaces this struct.
template <typename T>
struct RoundedWire {
  __device__ __forceinline__ RowPart narrow(const Float32Part<T>& sum) const {
    return sum.rounded();
  }
  __device__ __forceinline__ void load(RowPart& part, const RowParts& range, const char* row,
                                       int64_t offset) const {
    part.load(range, row, offset);
  }
  __device__ __forceinline__ void add(Float32Part<T>& sum, const RowPart& part) const {
    sum.add(1.f, part);
  }
};

// What sum_parts() computes: a partial sum to send, or an output row without or with an addend.
enum class Sum { kPartial, kOutput, kOutputPlusAddend };

// Sums the listed rows, part by part. Loads of the next rows are always under way. With
// RoundedWire, a partial sum is computed like an output row: rounding it again changes nothing.
template <typename T, Sum kSum, typename Wire>
__device__ __forceinline__ void sum_parts(const Team& team, const SourceList& list,
                                          const SourceCounts& counts, int64_t row_bytes, char* out,
                                          Wire& wire) {
  constexpr bool kIsRounded = std::is_same_v<Wire, RoundedWire<T>>;
  constexpr bool kAdds = kSum == Sum::kOutputPlusAddend;
  const int landed_first = counts.own + counts.landed_before;
  const int addend = landed_first + counts.landed_after;  // its index in the list
  const int total = addend + kAdds;
  // Returns true if a listed row has numbers of type T, false if it is encoded.
  const auto is_plain = [&](int source) {
    return kIsRounded || kSum == Sum::kPartial || source < counts.own ||
           (kAdds && source == addend);
  };
  const RowParts range(team, row_bytes);
  int64_t load_offset = range.first;
  int load_source = 0;
  const auto load_next = [&](RowPart& part) {
    if (load_offset >= row_bytes) return;
    if (is_plain(load_source)) {
      part.load(range, list.rows[load_source], load_offset);
    } else {
      wire.load(part, range, list.rows[load_source], load_offset);
    }
    if (++load_source < total) return;
    load_source = 0;
    load_offset += range.step;
  };
  RowPart own;
  Float32Part<T> sum;
  int source = 0;
  int64_t offset = range.first;
  // Adds `part`, then loads a later part into it. Returns false after the last part.
  const auto add_next = [&](RowPart& part) {
    if (is_plain(source)) {
      sum.add(source < counts.own ? list.factors[source] : 1.f, part);
    } else {
      wire.add(sum, part);
    }
    load_next(part);
    ++source;
    if (source == counts.own) {
      own = wire.narrow(sum);
      sum = {};
    }
    if constexpr (kIsRounded || kSum != Sum::kPartial) {
      if (source == landed_first && counts.own > 0) wire.add(sum, own);
    }
    if (source < total) return true;
    if constexpr (kIsRounded || kSum != Sum::kPartial) {
      sum.rounded().store(range, out, offset);
    } else {
      wire.store(own, range, out, offset);
    }
    sum = {};
    source = 0;
    offset += range.step;
    return offset < row_bytes;
  };
  RowPart a, b, c, d;  // not an array: they must stay in registers
  load_next(a);
  load_next(b);
  load_next(c);
  load_next(d);
  while (add_next(a) && add_next(b) && add_next(c) && add_next(d)) {
  }
}

// Computes out = landed partial sums of lower ranks + this rank's partial sum + landed partial sums
// of higher ranks + addend, in this order. This rank's partial sum is the sum of factor * row, and
// is rounded or encoded like landed partial sums. For Sum::kPartial, out is only this rank's
// partial sum. All lanes write the list, then call this function, and may then rewrite the list.
template <typename T, Sum kSum, typename Wire>
__device__ __forceinline__ void sum_listed(const Team& team, const SourceList& list,
                                           const SourceCounts& counts, int64_t row_bytes, char* out,
                                           Wire& wire) {
  __syncwarp();
  if (kSum != Sum::kOutputPlusAddend &&
      counts.own + counts.landed_before + counts.landed_after == 0) {
    if constexpr (std::is_same_v<Wire, RoundedWire<T>> || kSum != Sum::kPartial) {
      zero_row(team, out, row_bytes, kVectorBytes);
    } else {
      const RowParts range(team, row_bytes);
      for (int64_t offset = range.first; offset < row_bytes; offset += range.step) {
        wire.store(RowPart{}, range, out, offset);
      }
    }
  } else if (RowParts(team, row_bytes).first < row_bytes) {
    sum_parts<T, kSum>(team, list, counts, row_bytes, out, wire);
  }
  __syncwarp();
}

// Writes factor * row to `out`, unless `out` is null. Returns this lane's share of the inner
// product of `row` and `other`, or 0 if `other` is null.
template <typename T>
__device__ __forceinline__ float scale_row(const Team& team, const char* row, const char* other,
                                           int64_t row_bytes, float factor, char* out) {
  const RowParts range(team, row_bytes);
  float dot = 0.f;
#pragma unroll 2
  for (int64_t offset = range.first; offset < row_bytes; offset += range.step) {
    RowPart part, others;
    part.load(range, row, offset);
    if (other != nullptr) others.load(range, other, offset);
    if (out != nullptr) {
      Float32Part<T> scaled;
      scaled.set(factor, part);
      scaled.rounded().store(range, out, offset);
    }
    if (other == nullptr) continue;
    const Float32Part<T> wide(part), wide_others(others);
    range.each_word(offset, [&](int u, int64_t) { dot += wide.dot(wide_others, u); });
  }
  return dot;
}

}  // namespace moe_a2a
