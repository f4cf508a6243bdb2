// Converts problems to errors of XLA, and makes handlers.
#pragma once

#include "runtime/problem.h"
#include "xla/ffi/api/ffi.h"

namespace moe_a2a {

namespace ffi = xla::ffi;

// Too little memory has the same error code as in XLA.
inline ffi::Error ToError(const Problem& problem) {
  if (problem.empty()) return ffi::Error::Success();
  const ffi::ErrorCode code = problem.lacks_memory ? ffi::ErrorCode::kResourceExhausted
                              : problem.is_invalid ? ffi::ErrorCode::kInvalidArgument
                                                   : ffi::ErrorCode::kInternal;
  return ffi::Error(code, "jax_moe_a2a: " + problem);
}

template <bool kMayBeCaptured, typename Binding, typename Function>
auto* MakeHandler(Binding binding, Function function) {
  return kMayBeCaptured ? binding.To(function, {ffi::Traits::kCmdBufferCompatible}).release()
                        : binding.To(function).release();
}

}  // namespace moe_a2a
