// Sums of rows in float32, and the roundings on the way.
#ifndef MOE_A2A_DEVICE_SUM_CUH_
#define MOE_A2A_DEVICE_SUM_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device/copy.cuh"
#include "params.h"

namespace moe_a2a {

__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }
__device__ __forceinline__ float to_float(float v) { return v; }

template <typename T>
__device__ __forceinline__ T from_float(float v);
template <>
__device__ __forceinline__ __nv_bfloat16 from_float(float v) {
  return __float2bfloat16_rn(v);
}
template <>
__device__ __forceinline__ __half from_float(float v) {
  return __float2half_rn(v);
}
template <>
__device__ __forceinline__ float from_float(float v) {
  return v;
}

// `kCount` neighbouring elements, moved as one access.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  T v[kCount];
};

template <typename T, int kCount>
__device__ __forceinline__ Pack<T, kCount> load_pack(const T* address) {
  using W = typename Word<sizeof(T) * kCount>::Type;
  Pack<T, kCount> pack;
  *reinterpret_cast<W*>(&pack) = load_landed(reinterpret_cast<const W*>(address));
  return pack;
}

template <typename T, int kCount>
__device__ __forceinline__ void store_pack(T* address, const Pack<T, kCount>& pack) {
  using W = typename Word<sizeof(T) * kCount>::Type;
  *reinterpret_cast<W*>(address) = *reinterpret_cast<const W*>(&pack);
}

// Packs that a thread holds at a time, a team's width apart.
constexpr int kSumUnroll = 2;

// Where a thread is in a row: pack u starts at element `first + u * stride`, if that is < elements.
template <int kCount>
struct Piece {
  int64_t first, stride, elements;

  __device__ Piece(const Team& team, int64_t base, int64_t elements)
      : first((base + team.thread()) * kCount),
        stride(int64_t{team.threads()} * kCount),
        elements(elements) {}
  __device__ int64_t element(int u) const { return first + u * stride; }
  __device__ bool has(int u) const { return element(u) < elements; }
};

// Calls `body(Piece)` until the team has been through the row. All lanes of a warp go round equally
// often: `body` may shuffle.
template <int kCount, typename Body>
__device__ __forceinline__ void for_each_piece(const Team& team, int64_t elements, Body&& body) {
  for (int64_t base = 0; base * kCount < elements; base += int64_t{kSumUnroll} * team.threads()) {
    body(Piece<kCount>(team, base, elements));
  }
}

template <typename T, int kCount>
struct Packs {
  Pack<T, kCount> v[kSumUnroll];

  __device__ void load(const T* row, const Piece<kCount>& piece) {
#pragma unroll
    for (int u = 0; u < kSumUnroll; ++u) {
      if (piece.has(u)) v[u] = load_pack<T, kCount>(row + piece.element(u));
    }
  }
  __device__ void store(T* row, const Piece<kCount>& piece) const {
#pragma unroll
    for (int u = 0; u < kSumUnroll; ++u) {
      if (piece.has(u)) store_pack(row + piece.element(u), v[u]);
    }
  }
};

template <int kCount>
struct Accumulator {
  float v[kSumUnroll][kCount];

  __device__ void clear() {
#pragma unroll
    for (int u = 0; u < kSumUnroll; ++u) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) v[u][i] = 0.f;
    }
  }

  // += factor(u) * packs; what lies behind the row's end is not used.
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

// The weight of a row's elements: usually one for all of them.
struct RowWeights {
  const float* weights;  // null: 1
  int64_t elements_per_weight;

  template <int kCount>
  __device__ float at(const Piece<kCount>& piece, int u) const {
    if (weights == nullptr) return 1.f;
    if (piece.elements == elements_per_weight) return *weights;
    return piece.has(u) ? weights[piece.element(u) / elements_per_weight] : 0.f;
  }
};

__device__ __forceinline__ RowWeights row_weights(const CombineParams& p, int64_t elements,
                                                  int pair, int64_t row) {
  if (p.num_pairs == 0) return {nullptr, elements};
  return {p.pair_weights[pair] + row * (elements / p.elements_per_weight), p.elements_per_weight};
}

// The sum over a token's rows on this rank, in the order of their choices. Lane k of every warp holds
// the row of choice k, or < 0; `choices` are the lanes that hold one.
template <typename T, int kCount>
__device__ __forceinline__ Accumulator<kCount> sum_rows(const CombineParams& p,
                                                        const SummedArray& array, int row,
                                                        uint32_t choices,
                                                        const Piece<kCount>& piece) {
  Accumulator<kCount> acc;
  acc.clear();
  while (choices != 0) {
    const int64_t first = __shfl_sync(kAllLanes, row, __ffs(choices) - 1);
    choices &= choices - 1;
    // Pairs are summed choice by choice: only a single one allows two rows at a time.
    const bool both = choices != 0 && p.num_pairs <= 1;
    const int64_t second = both ? __shfl_sync(kAllLanes, row, __ffs(choices) - 1) : 0;
    if (both) choices &= choices - 1;
    for (int pair = 0; pair < max(1, p.num_pairs); ++pair) {
      const T* rows = static_cast<const T*>(p.num_pairs == 0 ? array.rows : p.pair_rows[pair]);
      const RowWeights first_weights = row_weights(p, array.elements, pair, first);
      const RowWeights second_weights = row_weights(p, array.elements, pair, second);
      Packs<T, kCount> a, b;
      a.load(rows + first * array.elements, piece);
      if (both) b.load(rows + second * array.elements, piece);
      acc.add(a, [&](int u) { return first_weights.at(piece, u); });
      if (both) acc.add(b, [&](int u) { return second_weights.at(piece, u); });
    }
  }
  return acc;
}

}  // namespace moe_a2a

#endif  // MOE_A2A_DEVICE_SUM_CUH_
