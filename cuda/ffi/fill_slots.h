// The FFI handlers of the kernel that plans placements.
#ifndef MOE_A2A_FFI_FILL_SLOTS_H_
#define MOE_A2A_FFI_FILL_SLOTS_H_

struct XLA_FFI_CallFrame;
struct XLA_FFI_Error;

namespace moe_a2a {

extern "C" {
// XLA calls the first handler before each execution of a program. It may capture the other in a CUDA graph.
XLA_FFI_Error* moe_a2a_fill_slots_initialize(XLA_FFI_CallFrame*);
XLA_FFI_Error* moe_a2a_fill_slots(XLA_FFI_CallFrame*);
}

}  // namespace moe_a2a

#endif  // MOE_A2A_FFI_FILL_SLOTS_H_
