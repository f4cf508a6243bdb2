// Encodes and decodes numbers in a token format, bit for bit as docs/formats.md defines it.
//
// A lane has 16 neighbouring numbers. A group, which shares a scale, is in one lane or a few
// neighbouring lanes. The lanes of a group exchange only its largest magnitude.
//
// All arithmetic is multiplications and conversions that the hardware rounds as docs/formats.md
// says. No product is added to anything, because the compiler could fuse the two operations.
#pragma once

#include <cuda_fp8.h>

#include "device/ptx.cuh"
#include "device/sum.cuh"

namespace moe_a2a {

constexpr int kLaneElements = 16;

template <TokenFormat F>
constexpr int kLaneBytes = kLaneElements * Format<F>::kValueBits / 8;
template <TokenFormat F>
constexpr int kGroupLanes = Format<F>::kGroup / kLaneElements;

// Checks that a group fills 1, 2, 4, ... lanes, as largest_of_lanes() requires.
template <auto... kFormats>
constexpr bool have_groups_of_lanes(Constants<kFormats...>) {
  return ((Format<kFormats>::kGroup % kLaneElements == 0 &&
           kWarpThreads % kGroupLanes<kFormats> == 0 &&
           (kGroupLanes<kFormats> & (kGroupLanes<kFormats> - 1)) == 0) &&
          ...);
}
static_assert(have_groups_of_lanes(TokenFormats{}));

// These formats have float8_e4m3fn values, and scales that are powers of two.
template <TokenFormat F>
constexpr bool kHasPowerOfTwoScales = F == TokenFormat::kBlockwiseFp8 || F == TokenFormat::kMxFp8;
// These formats have float4_e2m1fn values, float8_e4m3fn scales and a global scale.
template <TokenFormat F>
constexpr bool kHasGlobalScale = F == TokenFormat::kNvFp4;

// The 16 numbers of a lane, in the order of memory.
template <typename T>
struct LaneNumbers {
  uint4 vectors[kLaneElements * sizeof(T) / kVectorBytes];
};

template <TokenFormat F, int kCount = kLaneElements>
struct Values {
  uint32_t words[ceil_div(kCount * Format<F>::kValueBits, 32)];
};

constexpr uint32_t kMinNormal = 1u << 23;  // bits of the smallest normal float32
constexpr uint32_t kInfinity = 0xFFu << 23;
constexpr float kMaxE4M3 = 448.f;
constexpr uint32_t kNanE4M3 = 0x7F;

// Rounds to nearest, and saturates to the largest value. `low` becomes the low byte.
__device__ __forceinline__ uint32_t to_e4m3(float low, float high) {
  return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
}

// Converts the low byte to x and the high byte to y, exactly.
__device__ __forceinline__ float2 from_e4m3(uint32_t pair) {
  const __half2_raw halves =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), __NV_E4M3);
  return __half22float2(halves);
}

// Calls body(index of the word, word) for each 32-bit word of the numbers.
template <typename T, typename Body>
__device__ __forceinline__ void each_word(const LaneNumbers<T>& lane, Body&& body) {
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(lane.vectors) / sizeof(uint4)); ++i) {
    const uint4& v = lane.vectors[i];
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) body(4 * i + w, words[w]);
  }
}

template <typename T>
__device__ __forceinline__ void widen(const LaneNumbers<T>& lane, float (&numbers)[kLaneElements]) {
  constexpr int kPerWord = sizeof(uint32_t) / sizeof(T);
  each_word(lane, [&](int i, uint32_t word) { unpack<T>(word, numbers + i * kPerWord); });
}

// Returns the largest magnitude, as bits of a float32, or 0 if it is subnormal.
template <int kCount>
__device__ __forceinline__ uint32_t largest_magnitude(const float (&numbers)[kCount]) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    largest = max(largest, __float_as_uint(numbers[i]) & 0x7FFFFFFF);
  }
  return largest < kMinNormal ? 0 : largest;
}

template <typename T>
__device__ __forceinline__ uint32_t largest_magnitude(const LaneNumbers<T>& lane) {
  uint32_t largest = 0;
  if constexpr (sizeof(T) == 4) {
    each_word(lane, [&](int, uint32_t word) { largest = max(largest, word & 0x7FFFFFFF); });
  } else {
    each_word(lane, [&](int, uint32_t word) { largest = __vmaxu2(largest, word & 0x7FFF7FFF); });
    float wide[2];  // [0]: the larger magnitude of the two halves
    unpack<T>(max(largest & 0xFFFF, largest >> 16), wide);
    largest = __float_as_uint(wide[0]);
  }
  return largest < kMinNormal ? 0 : largest;
}

// Returns the maximum of `largest` over the kLanes neighbouring lanes of a group.
template <int kLanes>
__device__ __forceinline__ uint32_t largest_of_lanes(uint32_t largest) {
#pragma unroll
  for (int d = 1; d < kLanes; d *= 2) {
    largest = max(largest, __shfl_xor_sync(kAllLanes, largest, d));
  }
  return largest;
}

// The global scale of NvFp4. A number is about value * scale of its group * global scale.
struct GlobalScale {
  float value, inverse;
  bool is_valid;

  __device__ explicit GlobalScale(float scale) {
    constexpr uint32_t kLeast = (127 - 116) << 23, kMost = (127 + 116) << 23;
    const uint32_t bits = __float_as_uint(scale);
    value = __uint_as_float(min(max(bits, kLeast), kMost));
    inverse = __frcp_rn(value);
    is_valid = bits < kInfinity;  // As bits, negative numbers exceed infinity.
  }
};

// The scale of a group, and what encodes its numbers. `largest` is the group's largest magnitude.
template <TokenFormat F>
struct GroupEncoding {
  typename Format<F>::Scale scale;
  float factor;    // NvFp4: the scale; other formats: 1 / scale
  uint32_t keeps;  // mask of the codes: 0 if the group is not finite

  __device__ __forceinline__ GroupEncoding(uint32_t largest, const GlobalScale& global) {
    static_assert(kHasPowerOfTwoScales<F> || kHasGlobalScale<F>);
    bool is_finite = largest < kInfinity;
    if constexpr (kHasGlobalScale<F>) {
      is_finite = is_finite && global.is_valid;
      const float y = multiply_flushed(__uint_as_float(largest), global.inverse);
      const float sixth = multiply_flushed(y, __uint_as_float(0x3E2AAAAB));
      const uint32_t code = to_e4m3(fminf(sixth, kMaxE4M3), 0.f);
      scale = is_finite ? code : kNanE4M3;
      // With a scale of 0, all Float4Bounds are infinite, so all values are zero.
      factor = code == 0 ? __uint_as_float(kInfinity) : from_e4m3(code).x;
    } else {
      int exponent = static_cast<int>(largest >> 23) - 127 - 8;
      if constexpr (F == TokenFormat::kBlockwiseFp8) {
        exponent += (largest & (kMinNormal - 1)) > 0x600000;  // the largest value is 1.75 * 2**8
      }
      exponent = max(exponent, -117);
      factor = __uint_as_float(static_cast<uint32_t>(127 - exponent) << 23);
      const uint32_t biased = largest == 0 ? 0 : is_finite ? exponent + 127 : 255;
      if constexpr (F == TokenFormat::kBlockwiseFp8) {
        scale = biased << 23 | (biased == 255 ? 1u << 22 : 0);
      } else {
        static_assert(sizeof(scale) == 1);  // a scale is a biased exponent
        scale = biased;
      }
    }
    keeps = is_finite ? ~0u : 0;
  }
};

// Rounds y / scale to float4_e2m1fn. There is a bound between each two neighbouring values. The
// code is the number of bounds below y. A y on a bound gets the even code.
struct Float4Bounds {
  float bounds[7];

  __device__ __forceinline__ explicit Float4Bounds(float scale)
      : bounds{scale * 0.25f, scale * 0.75f, scale * 1.25f, scale * 1.75f,
               scale * 2.5f,  scale * 3.5f,  scale * 5.f} {}
  __device__ __forceinline__ uint32_t passed(float y) const {
    const bool high = y >= bounds[3];
    const bool middle = y >= (high ? bounds[5] : bounds[1]);
    const float last = high ? (middle ? bounds[6] : bounds[4]) : (middle ? bounds[2] : bounds[0]);
    return (high ? 4 : 0) + (middle ? 2 : 0) + (y > last ? 1 : 0);
  }
};

template <TokenFormat F, int kCount>
__device__ __forceinline__ Values<F, kCount> encode_numbers(const float (&x)[kCount],
                                                            const GroupEncoding<F>& group,
                                                            const GlobalScale& global) {
  constexpr int kWords = sizeof(Values<F, kCount>) / sizeof(uint32_t);
  Values<F, kCount> values;
  if constexpr (kHasGlobalScale<F>) {
    const Float4Bounds bounds(group.factor);
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      uint32_t word = 0;
#pragma unroll
      for (int i = 0; i < 8 && 8 * w + i < kCount; ++i) {
        const float number = x[8 * w + i];
        const float y = multiply_flushed(fabsf(number), global.inverse);
        const uint32_t code = bounds.passed(y) | (__float_as_uint(number) >> 28 & 8);
        word |= code << 4 * i;
      }
      values.words[w] = word & group.keeps;
    }
  } else {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const auto scaled = [&](int i) { return multiply_flushed(x[4 * w + i], group.factor); };
      const uint32_t word = to_e4m3(scaled(0), scaled(1)) | to_e4m3(scaled(2), scaled(3)) << 16;
      values.words[w] = word & group.keeps;
    }
  }
  return values;
}

template <TokenFormat F, typename T>
__device__ __forceinline__ Values<F> encode_lane(const LaneNumbers<T>& lane,
                                                 const GroupEncoding<F>& group,
                                                 const GlobalScale& global) {
  float x[kLaneElements];
  widen(lane, x);
  return encode_numbers(x, group, global);
}

template <TokenFormat F>
__device__ __forceinline__ float float32_scale(typename Format<F>::Scale scale) {
  static_assert(F == TokenFormat::kBlockwiseFp8 || F == TokenFormat::kMxFp8 ||
                F == TokenFormat::kNvFp4);
  if constexpr (F == TokenFormat::kBlockwiseFp8) return __uint_as_float(scale);
  if constexpr (F == TokenFormat::kMxFp8) return __uint_as_float(uint32_t{scale} << 23);
  if constexpr (F == TokenFormat::kNvFp4) return from_e4m3(scale).x;
}

// Converts the four float4_e2m1fn codes in the low 16 bits of `codes`.
__device__ __forceinline__ void from_e2m1(uint32_t codes, float* values) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t code = codes >> 4 * i;
    // `half` has the bits of a float16: 2**-14 times the value, which is subnormal for 0.5.
    const uint32_t half = (code & 8) << 12 | (code & 7) << 9;
    values[i] = __half2float(__ushort_as_half(static_cast<uint16_t>(half))) * 0x1p14f;
  }
}

// Decodes values of one group, and saturates them to the range of T. Returns false if the group is
// not finite: its numbers are NaN, and `x` is unspecified.
template <typename T, TokenFormat F, int kCount>
__device__ __forceinline__ bool decode_numbers(const Values<F, kCount>& values,
                                               typename Format<F>::Scale scale,
                                               const GlobalScale& global, float (&x)[kCount]) {
  static_assert(kCount % 4 == 0);
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    if constexpr (kHasGlobalScale<F>) {
      from_e2m1(values.words[i / 8] >> 4 * (i % 8), x + i);
    } else {
      const uint32_t word = values.words[i / 4];
      const float2 low = from_e4m3(word & 0xFFFF), high = from_e4m3(word >> 16);
      x[i] = low.x, x[i + 1] = low.y, x[i + 2] = high.x, x[i + 3] = high.y;
    }
  }
  const float factor = float32_scale<F>(scale), most = __uint_as_float(Element<T>::kMost);
  bool is_finite = (__float_as_uint(factor) & kInfinity) != kInfinity;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    x[i] = __fmul_rn(x[i], factor);
    if (kHasGlobalScale<F>) x[i] = __fmul_rn(x[i], global.value);
    x[i] = fminf(fmaxf(x[i], -most), most);
  }
  if (kHasGlobalScale<F>) is_finite = is_finite && global.is_valid;
  return is_finite;
}

template <TokenFormat F, typename T>
__device__ __forceinline__ LaneNumbers<T> decode_lane(const Values<F>& values,
                                                      typename Format<F>::Scale scale,
                                                      const GlobalScale& global) {
  float x[kLaneElements];
  const bool is_finite = decode_numbers<T>(values, scale, global, x);
  constexpr int kPerWord = sizeof(uint32_t) / sizeof(T);
  const auto word = [&](int i) {
    return is_finite ? pack<T>(x + i * kPerWord) : Element<T>::kNanWord;
  };
  LaneNumbers<T> lane;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(lane.vectors) / sizeof(uint4)); ++i) {
    lane.vectors[i] = {word(4 * i), word(4 * i + 1), word(4 * i + 2), word(4 * i + 3)};
  }
  return lane;
}

}  // namespace moe_a2a
