// The kernels between two FP8 matrix products. act_encode applies the activation to the first
// product, multiplies the activations by router weights, rounds them to the dtype of the product,
// and encodes them in BlockwiseFp8. act_grad computes the gradients of act_encode.
//
// Holds afterwards: the results of all rows of groups. Other rows are not read or written.
//
// Layout: 8 neighbouring lanes process a group of 128 columns. They load 128 contiguous bytes at a
// time: vector v of lane l starts at byte 16 (8 v + l). A warp of act_grad processes a row.
//
// Launch: one block per multiprocessor. A thread loads 64 bytes or more at a time, so enough bytes
// are in flight for the full bandwidth of the memory.
#include "gemm/act_encode.h"

#include <algorithm>
#include <type_traits>

#include "device/element.cuh"
#include "device/format.cuh"
#include "gemm/activation.cuh"
#include "runtime/cuda_error.h"

namespace moe_a2a {
namespace {

// The largest numbers of threads for which a multiprocessor has enough registers.
template <typename T>
constexpr int kActThreads = sizeof(T) == 2 ? 1024 : 640;
template <typename T>
constexpr int kGradThreads = sizeof(T) == 2 ? 768 : 512;
constexpr TokenFormat kFormat = TokenFormat::kBlockwiseFp8;
constexpr int kGroup = Format<kFormat>::kGroup, kLanes = kGroupLanes<kFormat>;
constexpr int kGroupsOfWarp = kWarpThreads / kLanes;

// Loads a lane's vectors, the first at `from`. The loads are streaming, because the kernel reads
// its operands only once. The cache then keeps other arrays for the next product.
template <typename T>
__device__ __forceinline__ LaneNumbers<T> load_lane(const T* from) {
  LaneNumbers<T> lane;
#pragma unroll
  for (int v = 0; v < static_cast<int>(sizeof(lane) / sizeof(uint4)); ++v) {
    lane.vectors[v] = __ldcs(reinterpret_cast<const uint4*>(from) + v * kLanes);
  }
  return lane;
}

template <typename T>
__device__ __forceinline__ void store_lane(T* to, const LaneNumbers<T>& lane) {
#pragma unroll
  for (int v = 0; v < static_cast<int>(sizeof(lane) / sizeof(uint4)); ++v) {
    reinterpret_cast<uint4*>(to)[v * kLanes] = lane.vectors[v];
  }
}

// Encodes a lane's numbers, and stores them, the first at `to`. All lanes of a warp call it.
template <typename T>
__device__ __forceinline__ void store_encoded(const LaneNumbers<T>& numbers, bool stores,
                                              uint32_t member, uint8_t* to, uint32_t* scale) {
  const GlobalScale none(1.f);
  const GroupEncoding<kFormat> encoding(largest_of_lanes<kLanes>(largest_magnitude(numbers)), none);
  if (!stores) return;
  const Values<kFormat> values = encode_lane(numbers, encoding, none);
#pragma unroll
  for (int v = 0; v < static_cast<int>(sizeof(numbers) / sizeof(uint4)); ++v) {
    if constexpr (sizeof(T) == 2) {
      const uint2 words = {values.words[2 * v], values.words[2 * v + 1]};
      reinterpret_cast<uint2*>(to)[v * kLanes] = words;
    } else {
      reinterpret_cast<uint32_t*>(to)[v * kLanes] = values.words[v];
    }
  }
  if (member == 0) *scale = encoding.scale;
}

// Returns a word of weighted activations, rounded to T. A weight of 0 gives zeros.
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
  // Warps with consecutive numbers are in different blocks, so that few rows still use all blocks.
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
      // All lanes must take part in warp shuffles, so lanes past the end repeat the last item.
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
            __syncwarp();  // Otherwise the compiler interleaves vectors, and erfc() would spill.
            const uint4 a = gate.vectors[v], b = up.vectors[v];
            h.vectors[v] = {word(a.x, b.x), word(a.y, b.y), word(a.z, b.z), word(a.w, b.w)};
          }
        });
      }
      store_encoded(h, true, member, p.values + int64_t{row} * p.columns + column,
                    p.scales + int64_t{row} * groups_of_row + group);
    }
  }
}

// Replaces words of pre-activations by their gradients. Replaces `ct_word`, a word of the gradient
// of weighted activations, by weighted activations. If the weight is 0, all become zeros. Adds
// ct * unweighted activation to `dot`.
template <Activation kFunction, typename T, bool kIsGated>
__device__ __forceinline__ void grad_word(uint32_t* gate_word, uint32_t* up_word, uint32_t* ct_word,
                                          float weight, const ActGrad& p, float* dot) {
  constexpr int kPerWord = sizeof(uint32_t) / sizeof(T);
  float x[kPerWord], up[kPerWord], ct[kPerWord];
  unpack<T>(*gate_word, x);
  unpack<T>(*up_word, up);
  unpack<T>(*ct_word, ct);
#pragma unroll
  for (int i = 0; i < kPerWord; ++i) {
    const float weighted = weight * ct[i];
    float act;
    if constexpr (kIsGated) {
      const gemm::Gated a = gemm::activate_gated<kFunction>(x[i], up[i], p.alpha, p.limit);
      act = a.value, x[i] = weighted * a.d_gate, up[i] = weighted * a.d_up;
    } else {
      const gemm::Activated a = gemm::activate<kFunction>(x[i], p.alpha);
      act = a.value, x[i] = weighted * a.slope;
    }
    *dot += ct[i] * act;
    ct[i] = weight * act;
    if (weight == 0.f) x[i] = up[i] = ct[i] = 0.f;
  }
  *gate_word = pack<T>(x);
  *up_word = pack<T>(up);
  *ct_word = pack<T>(ct);
}

template <typename T, bool kIsGated>
__global__ void __launch_bounds__(kGradThreads<T>, 1) act_grad(const ActGrad p) {
  constexpr int kVectorNumbers = sizeof(uint4) / sizeof(T);
  constexpr int kVectors = kLaneElements / kVectorNumbers, kHalves = kIsGated ? 2 : 1;
  const uint32_t lane = threadIdx.x % kWarpThreads, member = lane % kLanes;
  const uint32_t warp = threadIdx.x / kWarpThreads * gridDim.x + blockIdx.x;
  const uint32_t stride = gridDim.x * (kGradThreads<T> / kWarpThreads);
  const uint32_t groups_of_row = p.columns / kGroup;
#pragma unroll 1
  for (int32_t b = 0; b < p.batch; ++b) {
    const int32_t first_group = b * p.num_groups, last_group = first_group + p.num_groups - 1;
    const int32_t first_row = p.starts[first_group];
    const auto num_rows =
        static_cast<uint32_t>(p.starts[last_group] + p.sizes[last_group] - first_row);
#pragma unroll 1
    for (uint32_t r = warp; r < num_rows; r += stride) {
      const int64_t row = first_row + static_cast<int64_t>(r);
      const float weight = __ldg(p.row_weights + row);
      float dot = 0.f;
#pragma unroll 1
      for (uint32_t base = 0; base < groups_of_row; base += kGroupsOfWarp) {
        const uint32_t group = base + lane / kLanes;
        const bool is_in = group < groups_of_row;
        const uint32_t column = group * kGroup + member * kVectorNumbers;
        const int64_t of_act = row * p.columns + column,
                      of_pre = row * kHalves * p.columns + column;
        LaneNumbers<T> gate = {}, up = {}, ct = {};
        if (is_in) {
          const T* pre = static_cast<const T*>(p.product) + of_pre;
          gate = load_lane(pre);
          if constexpr (kIsGated) up = load_lane(pre + p.columns);
          ct = load_lane(static_cast<const T*>(p.ct) + of_act);
        }
        gemm::for_activation<kIsGated>(p.function, [&](auto function) {
          const auto word = [&](uint32_t* gate_word, uint32_t* up_word, uint32_t* ct_word) {
            grad_word<decltype(function)::value, T, kIsGated>(gate_word, up_word, ct_word, weight,
                                                              p, &dot);
          };
#pragma unroll
          for (int v = 0; v < kVectors; ++v) {
            __syncwarp();  // as in act_encode
            uint4 &a = gate.vectors[v], &b = up.vectors[v], &c = ct.vectors[v];
            word(&a.x, &b.x, &c.x);
            word(&a.y, &b.y, &c.y);
            word(&a.z, &b.z, &c.z);
            word(&a.w, &b.w, &c.w);
          }
        });
        if (is_in) {
          T* d_pre = static_cast<T*>(p.d_pre) + of_pre;
          store_lane(d_pre, gate);
          if constexpr (kIsGated) store_lane(d_pre + p.columns, up);
          store_lane(static_cast<T*>(p.h) + of_act, ct);
        }
        uint32_t* scale = p.scales + row * kHalves * groups_of_row + group;
        store_encoded(gate, is_in, member, p.values + of_pre, scale);
        if constexpr (kIsGated) {
          store_encoded(up, is_in, member, p.values + of_pre + p.columns, scale + groups_of_row);
        }
      }
#pragma unroll
      for (int d = 1; d < kWarpThreads; d *= 2) dot += __shfl_xor_sync(kAllLanes, dot, d);
      if (lane == 0) p.d_weights[row] = dot;
    }
  }
}

// Calls body(element type, is gated, kernel, threads) for every kernel with parameters `Call`.
template <typename Call, typename Body>
void each_kernel(Body&& body) {
  for_each(Types<__nv_bfloat16, float>{}, [&](auto element) {
    using T = typename decltype(element)::type;
    if constexpr (std::is_same_v<Call, ActGrad>) {
      body(Element<T>::kType, false, act_grad<T, false>, kGradThreads<T>);
      body(Element<T>::kType, true, act_grad<T, true>, kGradThreads<T>);
    } else {
      body(Element<T>::kType, false, act_encode<T, false>, kActThreads<T>);
      body(Element<T>::kType, true, act_encode<T, true>, kActThreads<T>);
    }
  });
}

template <typename Call>
Problem Launch(const Call& call, int64_t warps, int num_sms, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(num_sms, warps));
  if (blocks == 0) return "";
  Problem problem = "no kernel applies an activation to this type";
  each_kernel<Call>([&](ElementType type, bool is_gated, auto* kernel, int threads) {
    if (type != call.type || is_gated != call.is_gated) return;
    kernel<<<blocks, threads, 0, stream>>>(call);
    problem = ProblemOf(cudaGetLastError(), "launching act_encode");
  });
  return problem;
}

}  // namespace

cudaError_t LoadActEncode() {
  cudaError_t error = cudaSuccess;
  const auto load = [&](ElementType, bool, auto* kernel, int) {
    cudaFuncAttributes attributes;
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, kernel);
  };
  each_kernel<ActEncode>(load);
  each_kernel<ActGrad>(load);
  return error;
}

Problem LaunchActEncode(const ActEncode& call, int num_sms, cudaStream_t stream) {
  const int64_t items = call.num_rows * (call.columns / kGroup);
  return Launch(call, (items + kGroupsOfWarp - 1) / kGroupsOfWarp, num_sms, stream);
}

Problem LaunchActGrad(const ActGrad& call, int num_sms, cudaStream_t stream) {
  return Launch(call, call.num_rows, num_sms, stream);
}

}  // namespace moe_a2a
