// The FFI handlers of the grouped GEMM.
#ifndef MOE_A2A_FFI_GROUPED_GEMM_H_
#define MOE_A2A_FFI_GROUPED_GEMM_H_

struct XLA_FFI_CallFrame;
struct XLA_FFI_Error;

namespace moe_a2a {

extern "C" {
// XLA calls the first handler before each execution of a program. The others are the calls, which
// XLA may capture in a CUDA graph.
XLA_FFI_Error* moe_a2a_grouped_gemm_initialize(XLA_FFI_CallFrame*);
XLA_FFI_Error* moe_a2a_grouped_gemm(XLA_FFI_CallFrame*);
XLA_FFI_Error* moe_a2a_dot_act(XLA_FFI_CallFrame*);
XLA_FFI_Error* moe_a2a_act_dot_grad(XLA_FFI_CallFrame*);
XLA_FFI_Error* moe_a2a_fp8_gemm(XLA_FFI_CallFrame*);
XLA_FFI_Error* moe_a2a_act_encode(XLA_FFI_CallFrame*);
XLA_FFI_Error* moe_a2a_encode_squares(XLA_FFI_CallFrame*);
}

}  // namespace moe_a2a

#endif  // MOE_A2A_FFI_GROUPED_GEMM_H_
