// The FFI handlers, as XLA calls them.
#ifndef MOE_A2A_FFI_HANDLERS_H_
#define MOE_A2A_FFI_HANDLERS_H_

struct XLA_FFI_CallFrame;
struct XLA_FFI_Error;

namespace moe_a2a {

extern "C" {
// For all of them: when a program is loaded, and before each of its executions.
XLA_FFI_Error* moe_a2a_instantiate(XLA_FFI_CallFrame*);
XLA_FFI_Error* moe_a2a_initialize(XLA_FFI_CallFrame*);
XLA_FFI_Error* moe_a2a_route(XLA_FFI_CallFrame*);
XLA_FFI_Error* moe_a2a_dispatch(XLA_FFI_CallFrame*);
XLA_FFI_Error* moe_a2a_format_dispatch(XLA_FFI_CallFrame*);
XLA_FFI_Error* moe_a2a_weighted_dispatch(XLA_FFI_CallFrame*);
XLA_FFI_Error* moe_a2a_routed_dispatch(XLA_FFI_CallFrame*);
XLA_FFI_Error* moe_a2a_combine(XLA_FFI_CallFrame*);
XLA_FFI_Error* moe_a2a_dispatch_start(XLA_FFI_CallFrame*);
XLA_FFI_Error* moe_a2a_dispatch_done(XLA_FFI_CallFrame*);
XLA_FFI_Error* moe_a2a_combine_start(XLA_FFI_CallFrame*);
XLA_FFI_Error* moe_a2a_combine_done(XLA_FFI_CallFrame*);
// Whole exchanges, for XLA to capture in a CUDA graph.
XLA_FFI_Error* moe_a2a_route_in_graph(XLA_FFI_CallFrame*);
XLA_FFI_Error* moe_a2a_dispatch_in_graph(XLA_FFI_CallFrame*);
XLA_FFI_Error* moe_a2a_format_dispatch_in_graph(XLA_FFI_CallFrame*);
XLA_FFI_Error* moe_a2a_weighted_dispatch_in_graph(XLA_FFI_CallFrame*);
XLA_FFI_Error* moe_a2a_routed_dispatch_in_graph(XLA_FFI_CallFrame*);
XLA_FFI_Error* moe_a2a_combine_in_graph(XLA_FFI_CallFrame*);
}

}  // namespace moe_a2a

#endif  // MOE_A2A_FFI_HANDLERS_H_
