// The number types that kernels compute with: a struct for each, and the list of all.
#pragma once

#include <cstdint>

#include "lists.h"

// Types of CUDA, defined in cuda_bf16.h and cuda_fp16.h.
struct __nv_bfloat16;
struct __half;

namespace moe_a2a {

enum class ElementType : int32_t { kBFloat16, kFloat16, kFloat32 };

// Properties of the number type T, for host and device. device/element.cuh has the conversions.
template <typename T>
struct Element;

template <>
struct Element<__nv_bfloat16> {
  static constexpr ElementType kType = ElementType::kBFloat16;
  static constexpr int kBytes = 2;
  static constexpr uint32_t kMost = 0x7F7F0000;  // the largest finite number, as bits of a float32
  static constexpr uint32_t kNanWord = 0x7FC07FC0;  // 32 bits of NaN
};

template <>
struct Element<__half> {
  static constexpr ElementType kType = ElementType::kFloat16;
  static constexpr int kBytes = 2;
  static constexpr uint32_t kMost = 0x477FE000;
  static constexpr uint32_t kNanWord = 0x7E007E00;
};

template <>
struct Element<float> {
  static constexpr ElementType kType = ElementType::kFloat32;
  static constexpr int kBytes = 4;
  static constexpr uint32_t kMost = 0x7F7FFFFF;
  static constexpr uint32_t kNanWord = 0x7FC00000;
};

// To find the type of a value, a kernel makes no comparison with the last element of this list.
using Elements = Types<float, __nv_bfloat16, __half>;

template <typename First, typename... Rest>
MOE_A2A_HOST_DEVICE constexpr int element_bytes(ElementType type, Types<First, Rest...>) {
  if constexpr (sizeof...(Rest) > 0) {
    return type == Element<First>::kType ? Element<First>::kBytes
                                         : element_bytes(type, Types<Rest...>{});
  } else {
    if (type != Element<First>::kType) reject_value();
    return Element<First>::kBytes;
  }
}
MOE_A2A_HOST_DEVICE constexpr int element_bytes(ElementType type) {
  return element_bytes(type, Elements{});
}

}  // namespace moe_a2a
