#ifndef MOE_A2A_RUNTIME_PROBLEM_H_
#define MOE_A2A_RUNTIME_PROBLEM_H_

#include <string>

namespace moe_a2a {

// Empty on success, else what went wrong.
using Problem = std::string;

}  // namespace moe_a2a

#endif  // MOE_A2A_RUNTIME_PROBLEM_H_
