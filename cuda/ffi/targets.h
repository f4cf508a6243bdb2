// The targets and the type that this package registers with XLA.
#pragma once

#include <string>
#include <vector>

struct XLA_FFI_CallFrame;
struct XLA_FFI_Error;

namespace moe_a2a {

using Handler = XLA_FFI_Error*(XLA_FFI_CallFrame*);

struct Target {
  std::string name;
  Handler* instantiate;  // XLA calls it when a program is loaded; may be null
  Handler* initialize;   // XLA calls it before each execution
  Handler* execute;
};

const std::vector<Target>& Targets();

// Adds the targets of ffi/products.cc. A CUDA graph may capture their calls, except cuBLASLt's.
void AddProductTargets(std::vector<Target>& targets);

struct StateType {
  const char* name;
  void* id;
  const void* info;
};

StateType StateOfTargets();

}  // namespace moe_a2a
