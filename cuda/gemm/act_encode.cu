// The pass between two products in FP8: activates the first product, multiplies by router weights,
// rounds to the dtype of the product, and encodes in BlockwiseFp8. Without router weights, it
// encodes rows as they are.
//
// Holds: the results of all rows of groups are written. Other rows are neither read nor written.
// Layout: a group of 128 columns belongs to 8 neighbouring lanes. Their loads are 128 contiguous
// bytes each, so the 16 numbers of a lane are not neighbours: vector v of lane l starts at byte 16
// (8 v + l) of the group. Launch: one block on a multiprocessor. A thread loads 64 or 128 bytes at
// a time, and the 64 KiB or more of a block are above the share of a multiprocessor of the memory's
// latency times bandwidth.
#include "gemm/act_encode.h"

#include <algorithm>

#include "device/element.cuh"
#include "device/format.cuh"
#include "gemm/activation.cuh"

namespace moe_a2a {
namespace {

// The most threads of a block for which there are enough registers.
template <typename T>
constexpr int kActThreads = sizeof(T) == 2 ? 1024 : 640;
constexpr TokenFormat kFormat = TokenFormat::kBlockwiseFp8;
constexpr int kGroup = Format<kFormat>::kGroup, kLanes = kGroupLanes<kFormat>;
constexpr int kGroupsOfWarp = kWarpThreads / kLanes;

// Loads the numbers of a lane. `from` is the lane's first vector. The product is read once, so that
// the cache keeps what the next product reads.
template <typename T>
__device__ __forceinline__ LaneNumbers<T> load_lane(const T* from) {
  LaneNumbers<T> lane;
#pragma unroll
  for (int v = 0; v < static_cast<int>(sizeof(lane) / sizeof(uint4)); ++v) {
    lane.vectors[v] = __ldcs(reinterpret_cast<const uint4*>(from) + v * kLanes);
  }
  return lane;
}

// Returns the weighted activations of the numbers of a word, rounded to T. Zeros for a weight of 0.
template <Activation kFunction, typename T, bool kIsGated>
__device__ __forceinline__ uint32_t activate_word(uint32_t gate_word, uint32_t up_word,
                                                  float weight, const ActEncode& p) {
  constexpr int kPerWord = sizeof(uint32_t) / sizeof(T);
  float x[kPerWord], up[kPerWord];
  unpack<T>(gate_word, x);
  unpack<T>(up_word, up);
#pragma unroll
  for (int i = 0; i < kPerWord; ++i) {
    if constexpr (kIsGated) {
      x[i] = gemm::activate_gated<kFunction>(x[i], up[i], p.alpha, p.limit).value;
    } else {
      x[i] = gemm::activate<kFunction>(x[i], p.alpha).value;
    }
    x[i] = weight == 0.f ? 0.f : __fmul_rn(x[i], weight);
  }
  return pack<T>(x);
}

template <typename T, bool kIsGated>
__global__ void __launch_bounds__(kActThreads<T>, 1) act_encode(const ActEncode p) {
  constexpr int kVectorNumbers = sizeof(uint4) / sizeof(T);
  constexpr int kVectors = kLaneElements / kVectorNumbers;
  const uint32_t lane = threadIdx.x % kWarpThreads, member = lane % kLanes;
  // Neighbouring warps of the grid are in different blocks, so that few rows occupy all blocks.
  const uint32_t warp = threadIdx.x / kWarpThreads * gridDim.x + blockIdx.x;
  const uint32_t stride = gridDim.x * (kActThreads<T> / kWarpThreads) * kGroupsOfWarp;
  const uint32_t groups_of_row = p.columns / kGroup;
#pragma unroll 1
  for (int32_t b = 0; b < p.batch; ++b) {
    const int32_t first_group = b * p.num_groups, last_group = first_group + p.num_groups - 1;
    const int32_t first_row = p.starts[first_group];
    const int32_t end_row = p.starts[last_group] + p.sizes[last_group];
    const uint32_t end = static_cast<uint32_t>(end_row - first_row) * groups_of_row;
#pragma unroll 1
    for (uint32_t base = warp * kGroupsOfWarp; base < end; base += stride) {
      // All lanes shuffle. Those after the end write what others write.
      const uint32_t item = min(base + lane / kLanes, end - 1);
      const int32_t row = first_row + static_cast<int32_t>(item / groups_of_row);
      const uint32_t group = item % groups_of_row;
      const uint32_t column = group * kGroup + member * kVectorNumbers;
      const T* from =
          static_cast<const T*>(p.product) + int64_t{row} * (kIsGated ? 2 : 1) * p.columns + column;
      const LaneNumbers<T> gate = load_lane(from);
      LaneNumbers<T> up = {}, h;
      if constexpr (kIsGated) up = load_lane(from + p.columns);
      if (!kIsGated && p.row_weights == nullptr) {
        h = gate;
      } else {
        const float weight = __ldg(p.row_weights + row);
        gemm::for_activation<kIsGated>(p.function, [&](auto function) {
          const auto word = [&](uint32_t gate_word, uint32_t up_word) {
            return activate_word<decltype(function)::value, T, kIsGated>(gate_word, up_word, weight,
                                                                         p);
          };
#pragma unroll
          for (int v = 0; v < kVectors; ++v) {
            __syncwarp();  // With the numbers of two vectors at a time, erfc() would spill
                           // registers.
            const uint4 a = gate.vectors[v], b = up.vectors[v];
            h.vectors[v] = {word(a.x, b.x), word(a.y, b.y), word(a.z, b.z), word(a.w, b.w)};
          }
        });
      }

      const GlobalScale none(1.f);
      const GroupEncoding<kFormat> encoding(largest_of_lanes<kLanes>(largest_magnitude(h)), none);
      const Values<kFormat> values = encode_lane(h, encoding, none);
      uint8_t* to = p.values + int64_t{row} * p.columns + column;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if constexpr (sizeof(T) == 2) {
          const uint2 words = {values.words[2 * v], values.words[2 * v + 1]};
          reinterpret_cast<uint2*>(to)[v * kLanes] = words;
        } else {
          reinterpret_cast<uint32_t*>(to)[v * kLanes] = values.words[v];
        }
      }
      if (member == 0) p.scales[int64_t{row} * groups_of_row + group] = encoding.scale;
    }
  }
}

// Calls body(element type, is gated, kernel, threads) for every kernel.
template <typename Body>
void each_kernel(Body&& body) {
  for_each(Types<__nv_bfloat16, float>{}, [&](auto element) {
    using T = typename decltype(element)::type;
    body(Element<T>::kType, false, act_encode<T, false>, kActThreads<T>);
    body(Element<T>::kType, true, act_encode<T, true>, kActThreads<T>);
  });
}

}  // namespace

cudaError_t LoadActEncode() {
  cudaError_t error = cudaSuccess;
  each_kernel([&](ElementType, bool, auto* kernel, int) {
    cudaFuncAttributes attributes;
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, kernel);
  });
  return error;
}

Problem LaunchActEncode(const ActEncode& call, int num_sms, cudaStream_t stream) {
  const int64_t warps =
      (call.num_rows * (call.columns / kGroup) + kGroupsOfWarp - 1) / kGroupsOfWarp;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(num_sms, warps));
  if (blocks == 0) return "";
  Problem problem = "no kernel applies an activation to this type";
  each_kernel([&](ElementType type, bool is_gated, auto* kernel, int threads) {
    if (type != call.type || is_gated != call.is_gated) return;
    kernel<<<blocks, threads, 0, stream>>>(call);
    const cudaError_t error = cudaGetLastError();
    problem = error == cudaSuccess ? "" : cudaGetErrorString(error);
  });
  return problem;
}

}  // namespace moe_a2a
