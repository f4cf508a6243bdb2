#pragma once

#include <string>
#include <type_traits>
#include <utility>

namespace moe_a2a {

// Joins texts and numbers to one text.
template <typename... Parts>
std::string Concat(const Parts&... parts) {
  const auto text = [](const auto& part) {
    if constexpr (std::is_arithmetic_v<std::decay_t<decltype(part)>>) {
      return std::to_string(part);
    } else {
      return std::string(part);
    }
  };
  return (text(parts) + ...);
}

// The text of an error; empty on success.
struct Problem : std::string {
  Problem() = default;
  Problem(std::string text, bool lacks_memory = false)
      : std::string(std::move(text)), lacks_memory(lacks_memory) {}
  Problem(const char* text) : std::string(text) {}

  bool lacks_memory = false;  // a device has too little memory; smaller shapes may fit
  // The call is well-formed, but no kernel supports it, so the lowering uses other operations. Any
  // other problem of a call means that the code that made the call has a bug.
  bool is_unsupported = false;
  bool is_invalid = false;  // a program's call has a wrong argument
};

template <typename... Parts>
Problem Invalid(const Parts&... parts) {
  Problem problem(Concat(parts...));
  problem.is_invalid = true;
  return problem;
}

template <typename... Parts>
Problem Unsupported(const Parts&... parts) {
  Problem problem(Concat(parts...));
  problem.is_unsupported = true;
  return problem;
}

// If the problem is not empty, returns it from the enclosing function.
#define MOE_A2A_TRY(...) \
  if (Problem problem = (__VA_ARGS__); !problem.empty()) return problem

}  // namespace moe_a2a
