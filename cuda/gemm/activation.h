// The activations that grouped GEMMs apply to their results.
#pragma once

#include <cstdint>

namespace moe_a2a {

// FusedActivation in Python has the same numbers (jax_moe_a2a/_src/experts/activations.py).
enum class Activation : int32_t {
  kSilu,           // x sigmoid(x)
  kGelu,           // x Phi(x)
  kGeluTanh,       // kGelu, approximated with tanh
  kRelu,           // max(x, 0)
  kSquaredRelu,    // max(x, 0)^2
  kClampedSwiglu,  // gated (GPT-OSS): x sigmoid(alpha x) (up + 1), x <= limit, |up| <= limit
  kScaledBias,     // only adds the bias, times the router weight
};

}  // namespace moe_a2a
