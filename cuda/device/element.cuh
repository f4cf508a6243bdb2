// Converts numbers between each element type and float32. Elements are in 32-bit words, because the
// compiler keeps words in registers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "element.h"

namespace moe_a2a {

template <typename T>
__device__ __forceinline__ T from_float(float v);  // rounds to nearest
// v[0] is the number in the low bits of the word.
template <typename T>
__device__ __forceinline__ void unpack(uint32_t word, float* v);
template <typename T>
__device__ __forceinline__ uint32_t pack(const float* v);

__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
template <>
__device__ __forceinline__ __nv_bfloat16 from_float(float v) {
  return __float2bfloat16_rn(v);
}
template <>
__device__ __forceinline__ void unpack<__nv_bfloat16>(uint32_t word, float* v) {
  v[0] = __uint_as_float(word << 16);
  v[1] = __uint_as_float(word & 0xFFFF0000u);
}
template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(const float* v) {
  return __bfloat16_as_ushort(__float2bfloat16_rn(v[0])) |
         static_cast<uint32_t>(__bfloat16_as_ushort(__float2bfloat16_rn(v[1]))) << 16;
}

__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }
template <>
__device__ __forceinline__ __half from_float(float v) {
  return __float2half_rn(v);
}
template <>
__device__ __forceinline__ void unpack<__half>(uint32_t word, float* v) {
  v[0] = __half2float(__ushort_as_half(static_cast<uint16_t>(word)));
  v[1] = __half2float(__ushort_as_half(static_cast<uint16_t>(word >> 16)));
}
template <>
__device__ __forceinline__ uint32_t pack<__half>(const float* v) {
  return __half_as_ushort(__float2half_rn(v[0])) |
         static_cast<uint32_t>(__half_as_ushort(__float2half_rn(v[1]))) << 16;
}

__device__ __forceinline__ float to_float(float v) { return v; }
template <>
__device__ __forceinline__ float from_float(float v) {
  return v;
}
template <>
__device__ __forceinline__ void unpack<float>(uint32_t word, float* v) {
  v[0] = __uint_as_float(word);
}
template <>
__device__ __forceinline__ uint32_t pack<float>(const float* v) {
  return __float_as_uint(v[0]);
}

template <typename... T>
constexpr bool have_their_sizes(Types<T...>) {
  return (
      (sizeof(T) == Element<T>::kBytes && element_bytes(Element<T>::kType) == Element<T>::kBytes) &&
      ...);
}
static_assert(have_their_sizes(Elements{}));

}  // namespace moe_a2a
