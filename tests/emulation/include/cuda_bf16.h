#pragma once

#include <cstdint>

struct __nv_bfloat16 {
  uint16_t bits;
};

inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 v) { return v.bits; }
inline float __bfloat162float(__nv_bfloat16 v) { return __uint_as_float(uint32_t{v.bits} << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float v) {
  const uint32_t bits = __float_as_uint(v);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return {0x7FFF};
  return {static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)};
}
