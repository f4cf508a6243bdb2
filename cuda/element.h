// The number types that kernels compute with: a struct for each type, and the list of all types.
#pragma once

#include <cstdint>

#include "lists.h"

// Types of CUDA, defined in cuda_bf16.h and cuda_fp16.h.
struct __nv_bfloat16;
struct __half;

namespace moe_a2a {

enum class ElementType : int32_t { kBFloat16, kFloat16, kFloat32 };

// Properties of the number type T. device/element.cuh has the conversions.
template <typename T>
struct Element;

template <>
struct Element<__nv_bfloat16> {
  static constexpr ElementType kType = ElementType::kBFloat16;
  static constexpr int kBytes = 2;
  static constexpr uint32_t kMost = 0x7F7F0000;     // the largest finite number, as float32 bits
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

using Elements = Types<float, __nv_bfloat16, __half>;

MOE_A2A_HOST_DEVICE constexpr int element_bytes(ElementType type) {
  return type == ElementType::kFloat32 ? 4 : 2;
}

}  // namespace moe_a2a
