#pragma once

#include <cmath>
#include <cstdint>

struct __half {
  uint16_t bits;
};
struct __half2_raw {
  unsigned short x, y;
};

inline unsigned short __half_as_ushort(__half v) { return v.bits; }
inline __half __ushort_as_half(unsigned short bits) { return {bits}; }
inline float __half2float(__half v) {
  const uint32_t sign = uint32_t{v.bits} >> 15 << 31;
  const int exponent = v.bits >> 10 & 31;
  const uint32_t fraction = v.bits & 1023;
  if (exponent == 31) return __uint_as_float(sign | 0x7F800000 | fraction << 13);
  const float magnitude = exponent == 0
                              ? std::ldexp(static_cast<float>(fraction), -24)
                              : std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
  return sign ? -magnitude : magnitude;
}
// Ties to even.
inline __half __float2half_rn(float v) {
  const uint32_t bits = __float_as_uint(v);
  const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const float magnitude = std::fabs(v);
  if (std::isnan(v)) return {0x7FFF};
  if (magnitude == 0.f) return {sign};
  if (magnitude >= 65520.f) return {static_cast<uint16_t>(sign | 0x7C00)};
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  const int scale = std::max(exponent - 11, -24);  // exponent of the last bit
  const auto units = static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, -scale)));
  // A carry out of the fraction increments the exponent.
  const uint32_t encoded = (static_cast<uint32_t>(scale + 24) << 10) + units;
  return {static_cast<uint16_t>(sign | encoded)};
}
inline float2 __half22float2(__half2_raw v) { return {__half2float({v.x}), __half2float({v.y})}; }
