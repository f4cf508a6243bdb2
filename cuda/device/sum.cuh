// Sums of rows in float32, and the roundings on the way.
#ifndef MOE_A2A_DEVICE_SUM_CUH_
#define MOE_A2A_DEVICE_SUM_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device/copy.cuh"
#include "params.h"

namespace moe_a2a {

__device__ inline float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ inline float to_float(__half v) { return __half2float(v); }
__device__ inline float to_float(float v) { return v; }

template <typename T>
__device__ inline T from_float(float v);
template <>
__device__ inline __nv_bfloat16 from_float(float v) {
  return __float2bfloat16_rn(v);
}
template <>
__device__ inline __half from_float(float v) {
  return __float2half_rn(v);
}
template <>
__device__ inline float from_float(float v) {
  return v;
}

// `kCount` neighbouring elements, moved as one access.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  T v[kCount];
};

template <typename T, int kCount>
__device__ inline Pack<T, kCount> load_pack(const T* address) {
  using W = typename Word<sizeof(T) * kCount>::Type;
  Pack<T, kCount> pack;
  *reinterpret_cast<W*>(&pack) = load_landed(reinterpret_cast<const W*>(address));
  return pack;
}

template <typename T, int kCount>
__device__ inline void store_pack(T* address, const Pack<T, kCount>& pack) {
  using W = typename Word<sizeof(T) * kCount>::Type;
  *reinterpret_cast<W*>(address) = *reinterpret_cast<const W*>(&pack);
}

// Elements that a lane holds at a time: kUnroll packs, kWarpThreads packs apart.
constexpr int kSumUnroll = 2;

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
};

// The element index of pack `u` of this lane.
template <int kCount>
__device__ inline int64_t element_of(int64_t base, int u) {
  return (base + u * kWarpThreads + threadIdx.x % kWarpThreads) * kCount;
}

// acc += factor(element) * row, over this lane's elements.
template <typename T, int kCount, typename Factor>
__device__ inline void add_row(Accumulator<kCount>& acc, const T* row, int64_t base,
                               int64_t elements, Factor&& factor) {
  Pack<T, kCount> packs[kSumUnroll];
#pragma unroll
  for (int u = 0; u < kSumUnroll; ++u) {
    const int64_t e = element_of<kCount>(base, u);
    if (e < elements) packs[u] = load_pack<T, kCount>(row + e);
  }
#pragma unroll
  for (int u = 0; u < kSumUnroll; ++u) {
    const int64_t e = element_of<kCount>(base, u);
    if (e >= elements) continue;
    const float f = factor(e);
#pragma unroll
    for (int i = 0; i < kCount; ++i) acc.v[u][i] += f * to_float(packs[u].v[i]);
  }
}

// The sum over a token's rows on this rank, in the order of their choices. One warp; lane k holds the
// row of choice k, or < 0; `choices` are the lanes that hold one.
template <typename T, int kCount>
__device__ inline void sum_rows(const CombineParams& p, const SummedArray& array, int row,
                                uint32_t choices, int64_t base, Accumulator<kCount>& acc) {
  acc.clear();
  for (uint32_t left = choices; left != 0; left &= left - 1) {
    const int64_t from_row = __shfl_sync(kAllLanes, row, __ffs(left) - 1);
    const int64_t offset = from_row * array.elements;
    if (p.num_pairs == 0) {
      add_row<T, kCount>(acc, static_cast<const T*>(array.rows) + offset, base, array.elements,
                         [](int64_t) { return 1.f; });
    }
    for (int pair = 0; pair < p.num_pairs; ++pair) {
      const float* weights = p.pair_weights[pair];
      const int64_t first = from_row * (array.elements / p.elements_per_weight);
      add_row<T, kCount>(
          acc, static_cast<const T*>(p.pair_rows[pair]) + offset, base, array.elements,
          [&](int64_t e) { return weights[first + e / p.elements_per_weight]; });
    }
  }
}

// Rounds to T and stores.
template <typename T, int kCount>
__device__ inline void store_rounded(T* row, const Accumulator<kCount>& acc, int64_t base,
                                     int64_t elements) {
#pragma unroll
  for (int u = 0; u < kSumUnroll; ++u) {
    const int64_t e = element_of<kCount>(base, u);
    if (e >= elements) continue;
    Pack<T, kCount> pack;
#pragma unroll
    for (int i = 0; i < kCount; ++i) pack.v[i] = from_float<T>(acc.v[u][i]);
    store_pack(row + e, pack);
  }
}

// acc += what `part` is once it has been rounded to T.
template <typename T, int kCount>
__device__ inline void add_rounded(Accumulator<kCount>& acc, const Accumulator<kCount>& part) {
#pragma unroll
  for (int u = 0; u < kSumUnroll; ++u) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) acc.v[u][i] += to_float(from_float<T>(part.v[u][i]));
  }
}

// Runs `body(T, Wire, kCount)` for the types of the array. Where the rows allow it, kCount elements
// fill 16 bytes of the wider of the two types.
template <typename Body>
__device__ inline void with_types(const SummedArray& array, Body&& body) {
  auto with_wire = [&](auto element) {
    using T = decltype(element);
    auto with_count = [&](auto wire) {
      constexpr int kVector = kVectorBytes / (sizeof(T) > sizeof(wire) ? sizeof(T) : sizeof(wire));
      if (array.vectorized) {
        body(element, wire, std::integral_constant<int, kVector>{});
      } else {
        body(element, wire, std::integral_constant<int, 1>{});
      }
    };
    if (array.wire_type == array.type) {
      with_count(T{});
    } else {
      with_count(float{});  // The handlers admit no other wire type.
    }
  };
  switch (array.type) {
    case ElementType::kBFloat16: return with_wire(__nv_bfloat16{});
    case ElementType::kFloat16: return with_wire(__half{});
    case ElementType::kFloat32: return with_wire(float{});
  }
}

}  // namespace moe_a2a

#endif  // MOE_A2A_DEVICE_SUM_CUH_
