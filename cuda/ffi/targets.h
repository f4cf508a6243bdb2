// The targets and types that this package registers with XLA.
#pragma once

#include <string>
#include <vector>

struct XLA_FFI_CallFrame;
struct XLA_FFI_Error;

namespace moe_a2a {

using Handler = XLA_FFI_Error*(XLA_FFI_CallFrame*);

struct Target {
  std::string name;
  Handler* instantiate;  // called when a program is loaded; may be null
  Handler* initialize;   // called before each execution
  Handler* execute;
};

const std::vector<Target>& Targets();

// Adds the targets of ffi/products.cc. XLA may capture their calls in a CUDA graph.
void AddProductTargets(std::vector<Target>& targets);

// The type of the state that `instantiate` makes. XLA assigns the id.
struct StateType {
  const char* name;
  void* id;
  const void* info;
};

StateType StateOfTargets();

}  // namespace moe_a2a
