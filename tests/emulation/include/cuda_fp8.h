#pragma once

#include <cuda_fp16.h>

enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };
using __nv_fp8x2_storage_t = unsigned short;

namespace emulation {

inline float from_e4m3(uint8_t code) {
  const int exponent = code >> 3 & 15, fraction = code & 7;
  const float magnitude = (code & 0x7F) == 0x7F ? NAN
                          : exponent == 0       ? std::ldexp(static_cast<float>(fraction), -9)
                                                : std::ldexp(8.f + fraction, exponent - 10);
  return code & 0x80 ? -magnitude : magnitude;
}

// Ties to even. Large numbers become the largest finite number.
inline uint8_t to_e4m3(float v) {
  const auto sign = static_cast<uint8_t>(__float_as_uint(v) >> 31 << 7);
  if (std::isnan(v)) return sign | 0x7F;
  const float magnitude = std::fmin(std::fabs(v), 448.f);
  if (magnitude == 0.f) return sign;
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  const int scale = std::max(exponent - 4, -9);  // exponent of the last bit
  const auto units = static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, -scale)));
  return static_cast<uint8_t>(sign | ((static_cast<uint32_t>(scale + 9) << 3) + units));
}

}  // namespace emulation

inline __nv_fp8x2_storage_t __nv_cvt_float2_to_fp8x2(float2 v, __nv_saturation_t,
                                                     __nv_fp8_interpretation_t) {
  return static_cast<__nv_fp8x2_storage_t>(emulation::to_e4m3(v.x) | emulation::to_e4m3(v.y) << 8);
}
inline __half2_raw __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t pair,
                                              __nv_fp8_interpretation_t) {
  return {__float2half_rn(emulation::from_e4m3(pair & 0xFF)).bits,
          __float2half_rn(emulation::from_e4m3(pair >> 8)).bits};
}
