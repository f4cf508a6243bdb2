// Lists of types and of values. A value that is not in its list is an error.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <type_traits>

#include "layout.h"

namespace moe_a2a {

template <typename T>
struct Type {
  using type = T;
};
template <typename... T>
struct Types {
  static constexpr int kCount = sizeof...(T);
};

template <auto kValue>
using Constant = std::integral_constant<decltype(kValue), kValue>;
template <auto... kValues>
struct Constants {
  static constexpr int kCount = sizeof...(kValues);
};

// Calls body(Type<T>) or body(Constant<value>) for each element of the list, in order.
template <typename... T, typename Body>
constexpr void for_each(Types<T...>, Body&& body) {
  (body(Type<T>{}), ...);
}
template <auto... kValues, typename Body>
constexpr void for_each(Constants<kValues...>, Body&& body) {
  (body(Constant<kValues>{}), ...);
}

// Ends the program. A kernel never gets here, because the host checks all values first.
[[noreturn]] MOE_A2A_HOST_DEVICE inline void reject_value() {
#ifdef __CUDA_ARCH__
  __builtin_unreachable();
#else
  std::fputs("jax_moe_a2a: an enumeration has an unknown value\n", stderr);
  std::abort();
#endif
}

}  // namespace moe_a2a
