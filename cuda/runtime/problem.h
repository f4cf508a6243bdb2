#ifndef MOE_A2A_RUNTIME_PROBLEM_H_
#define MOE_A2A_RUNTIME_PROBLEM_H_

#include <string>
#include <utility>

namespace moe_a2a {

// The text of an error; empty on success.
struct Problem : std::string {
  Problem() = default;
  Problem(std::string text, bool lacks_memory = false)
      : std::string(std::move(text)), lacks_memory(lacks_memory) {}
  Problem(const char* text) : std::string(text) {}

  bool lacks_memory = false;  // a device has too little memory; a smaller shape may succeed
};

}  // namespace moe_a2a

#endif  // MOE_A2A_RUNTIME_PROBLEM_H_
