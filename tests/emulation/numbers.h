#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "device/element.cuh"
#include "params.h"
#include "random.h"

namespace emulation {

inline int item_bytes(moe_a2a::ElementType type) { return moe_a2a::element_bytes(type); }

inline void write_number(char* at, moe_a2a::ElementType type, float v) {
  moe_a2a::for_each(moe_a2a::Elements{}, [&](auto element) {
    using T = typename decltype(element)::type;
    if (type != moe_a2a::Element<T>::kType) return;
    const T number = moe_a2a::from_float<T>(v);
    std::memcpy(at, &number, sizeof(number));
  });
}

inline float read_number(const char* at, moe_a2a::ElementType type) {
  float v = 0;
  moe_a2a::for_each(moe_a2a::Elements{}, [&](auto element) {
    using T = typename decltype(element)::type;
    if (type != moe_a2a::Element<T>::kType) return;
    T number;
    std::memcpy(&number, at, sizeof(number));
    v = moe_a2a::to_float(number);
  });
  return v;
}

// Sums are exact in every type and any order.
inline float small_integer(Random& random) { return static_cast<float>(random.between(-4, 4)); }

// The magnitudes of float4_e2m1fn, indexed by code.
constexpr float kFloat4[] = {0.f, 0.5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f};

// Of 16 consecutive elements, at least one is 6 or -6, so the scale of a group is a power of two.
inline float exact_number(Random& random, int64_t element) {
  const float magnitude = element % 16 == 5 ? 6.f : kFloat4[random.below(8)];
  return random.one_in(2) ? -magnitude : magnitude;
}

inline float decode(moe_a2a::TokenFormat format, const char* values, const char* scales, int64_t i,
                    float global_scale) {
  using moe_a2a::TokenFormat;
  const int64_t group = i / moe_a2a::group_size(format);
  float scale = 0;
  switch (format) {
    case TokenFormat::kBlockwiseFp8:
      std::memcpy(&scale, scales + group * 4, sizeof(scale));
      return from_e4m3(static_cast<uint8_t>(values[i])) * scale;
    case TokenFormat::kMxFp8:
      scale = std::ldexp(1.f, static_cast<uint8_t>(scales[group]) - 127);
      return from_e4m3(static_cast<uint8_t>(values[i])) * scale;
    case TokenFormat::kNvFp4: {
      const int code = values[i / 2] >> (i % 2 == 0 ? 0 : 4) & 15;
      const float magnitude = kFloat4[code & 7];
      return (code & 8 ? -magnitude : magnitude) * from_e4m3(static_cast<uint8_t>(scales[group])) *
             global_scale;
    }
  }
  moe_a2a::reject_value();
}

}  // namespace emulation
