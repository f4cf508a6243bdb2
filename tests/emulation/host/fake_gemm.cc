// Replaces the kernels of products, for programs that are lowered but never run.
#include "gemm/grouped_gemm.h"

#include "gemm/act_encode.h"
#include "gemm/encode_squares.h"
#include "gemm/fp8_gemm.h"
#include "library/library_gemm.h"

namespace moe_a2a {

cudaError_t LoadGroupedGemm() { return cudaSuccess; }

Problem LaunchGroupedGemm(const GroupedGemm&, cudaStream_t) { return "there is no kernel"; }

cudaError_t LoadGroupArrays() { return cudaSuccess; }

cudaError_t LaunchGroupArrays(const GroupArrays&, int, cudaStream_t) { return cudaSuccess; }

cudaError_t LoadFp8Gemm() { return cudaSuccess; }

Problem LaunchFp8Gemm(const Fp8Gemm&, cudaStream_t) { return "there is no kernel"; }

cudaError_t LoadActEncode() { return cudaSuccess; }

Problem LaunchActEncode(const ActEncode&, int, cudaStream_t) { return "there is no kernel"; }

Problem LaunchActGrad(const ActGrad&, int, cudaStream_t) { return "there is no kernel"; }

cudaError_t LoadEncodeSquares() { return cudaSuccess; }

Problem LaunchEncodeSquares(const EncodeSquares&, cudaStream_t) { return "there is no kernel"; }

}  // namespace moe_a2a
