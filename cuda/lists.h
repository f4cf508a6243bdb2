// Lists of types and of values, and the step from a value that is known when the program runs to one that is known when it
// is compiled. A value that is not in the list is an error; no list has a default.
#ifndef MOE_A2A_LISTS_H_
#define MOE_A2A_LISTS_H_

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

// Calls body(Type<T>) or body(Constant<value>) for each in the list, in its order.
template <typename... T, typename Body>
constexpr void for_each(Types<T...>, Body&& body) {
  (body(Type<T>{}), ...);
}
template <auto... kValues, typename Body>
constexpr void for_each(Constants<kValues...>, Body&& body) {
  (body(Constant<kValues>{}), ...);
}

template <auto... kValues, typename Value>
constexpr bool contains(Constants<kValues...>, Value value) {
  return ((value == kValues) || ...);
}

// A value that is in no list ends the program. A kernel cannot have one: the host has chosen the kernel, or the value, from
// the list.
[[noreturn]] MOE_A2A_HOST_DEVICE inline void reject_value() {
#ifdef __CUDA_ARCH__
  __builtin_unreachable();
#else
  std::fputs("jax_moe_a2a: an enumeration has an unknown value\n", stderr);
  std::abort();
#endif
}

// Returns what `Traits` has for a value of the list, as Traits<value>::kNumbers.*kMember.
template <template <auto> class Traits, auto kMember, auto kFirst, auto... kRest, typename Value>
MOE_A2A_HOST_DEVICE constexpr auto look_up(Constants<kFirst, kRest...>, Value value) {
  constexpr auto kNumber = Traits<kFirst>::kNumbers.*kMember;
  if constexpr (sizeof...(kRest) > 0) {
    return value == kFirst ? kNumber : look_up<Traits, kMember>(Constants<kRest...>{}, value);
  } else {
    if (value != kFirst) reject_value();
    return kNumber;
  }
}

}  // namespace moe_a2a

#endif  // MOE_A2A_LISTS_H_
