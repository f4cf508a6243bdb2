// The emulator's bfloat16, with more functions for tools/driver/schedules.cu.
#pragma once

#include "../../include/cuda_bf16.h"

inline __nv_bfloat16 __float2bfloat16(float v) { return __float2bfloat16_rn(v); }
inline float __expf(float v) { return std::exp(v); }
