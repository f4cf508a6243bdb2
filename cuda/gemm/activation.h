// The activations that grouped GEMMs apply to their results.
#pragma once

#include <cstdint>

namespace moe_a2a {

// Python's FusedActivation has the same numbers (jax_moe_a2a/_src/experts/activations.py).
enum class Activation : int32_t {
  kSilu,           // x sigmoid(x)
  kGelu,           // x Phi(x)
  kGeluTanh,       // its approximation with tanh
  kRelu,           // max(x, 0)
  kSquaredRelu,    // max(x, 0)^2
  kClampedSwiglu,  // gated (GPT-OSS): x sigmoid(alpha x) (up + 1), x <= limit, |up| <= limit
  kScaledBias,     // no activation; router weights multiply only the bias
};

}  // namespace moe_a2a
