// Computes activations and their derivatives in float32. The activation of NaN is NaN.
#pragma once

#include "gemm/form.h"
#include "lists.h"

namespace moe_a2a::gemm {

// Returns e to the power of x. Subnormal results are 0, which saves four instructions.
__device__ inline float fast_exp(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.44269504f * x));
  return y;
}

__device__ inline float sigmoid(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.f + fast_exp(-x)));
  return y;
}

struct Activated {
  float value, slope;
};

template <Activation A>
__device__ inline Activated activate(float x, float alpha) {
  if constexpr (A == Activation::kSilu || A == Activation::kClampedSwiglu) {
    const float scale = A == Activation::kSilu ? 1.f : alpha;
    const float s = sigmoid(scale * x), value = x * s;
    return {value, s + scale * value * (1.f - s)};
  } else if constexpr (A == Activation::kGelu) {
    constexpr float kRootHalf = 0.70710678f, kDensity = 0.39894228f;  // sqrt(1/2), 1/sqrt(2 pi)
    const float phi = 0.5f * erfcf(-kRootHalf * x);
    return {x * phi, phi + kDensity * x * fast_exp(-0.5f * x * x)};
  } else if constexpr (A == Activation::kGeluTanh) {
    // (1 + tanh(y)) / 2 = sigmoid(2 y).
    constexpr float kScale = 1.59576912f, kCubic = 0.044715f;  // 2 sqrt(2/pi)
    const float s = sigmoid(kScale * x * (1.f + kCubic * x * x)), value = x * s;
    return {value, s + value * (1.f - s) * kScale * (1.f + 3.f * kCubic * x * x)};
  } else if constexpr (A == Activation::kRelu) {
    return {x < 0.f ? 0.f : x, x > 0.f ? 1.f : 0.f};
  } else {
    const float positive = x < 0.f ? 0.f : x;
    return {positive * positive, 2.f * positive};
  }
}

struct Gated {
  float value, d_gate, d_up;
};

template <Activation A>
__device__ inline Gated activate_gated(float gate, float up, float alpha, float limit) {
  if constexpr (A == Activation::kClampedSwiglu) {
    const bool cuts_gate = gate > limit, cuts_up = fabsf(up) > limit;
    const Activated a = activate<A>(cuts_gate ? limit : gate, alpha);
    const float factor = (cuts_up ? copysignf(limit, up) : up) + 1.f;
    return {a.value * factor, cuts_gate ? 0.f : a.slope * factor, cuts_up ? 0.f : a.value};
  } else {
    const Activated a = activate<A>(gate, alpha);
    return {a.value * up, a.slope * up, a.value};
  }
}

// Calls body(Constant<A>) for the activation `a`, so that the body never branches on `a`.
template <bool kIsGated, typename Body>
__device__ inline void for_activation(Activation a, Body&& body) {
  switch (a) {
    case Activation::kSilu: return body(Constant<Activation::kSilu>{});
    case Activation::kGelu: return body(Constant<Activation::kGelu>{});
    case Activation::kGeluTanh: return body(Constant<Activation::kGeluTanh>{});
    case Activation::kRelu: return body(Constant<Activation::kRelu>{});
    case Activation::kSquaredRelu: return body(Constant<Activation::kSquaredRelu>{});
    case Activation::kClampedSwiglu:
      if constexpr (kIsGated) body(Constant<Activation::kClampedSwiglu>{});
      return;
    case Activation::kScaledBias: return;
  }
}

}  // namespace moe_a2a::gemm
