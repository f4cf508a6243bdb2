// The part of the CUDA runtime that the sources use. launch.cc implements it for kernels, host/fake_driver.cc for the
// host code.
#pragma once

#include <cstddef>
#include <cstdint>

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorNotSupported = 801,
  cudaErrorUnknown = 999
};
using cudaStream_t = struct CUstream_st*;
using cudaEvent_t = struct CUevent_st*;

struct dim3 {
  unsigned x, y = 1, z = 1;
  explicit dim3(unsigned x) : x(x) {}
};

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
struct cudaFuncAttributes {};

extern "C" cudaError_t cudaLaunchKernel(const void* kernel, dim3 blocks, dim3 threads,
                                        void** arguments, size_t shared_bytes, cudaStream_t stream);

namespace emulation {

// Calls a kernel whose parameters lie at `arguments`.
using CallKernel = void (*)(const void* kernel, void** arguments);

void load_kernel(const void* kernel, CallKernel call, size_t dynamic_shared_bytes);

template <typename Param>
void call_one(const void* kernel, void** arguments) {
  reinterpret_cast<void (*)(Param)>(reinterpret_cast<uintptr_t>(kernel))(
      *static_cast<Param*>(arguments[0]));
}
template <typename First, typename Second>
void call_two(const void* kernel, void** arguments) {
  reinterpret_cast<void (*)(First, Second)>(reinterpret_cast<uintptr_t>(kernel))(
      *static_cast<First*>(arguments[0]), *static_cast<Second*>(arguments[1]));
}

template <typename Param>
void load_kernel(void (*kernel)(Param), size_t bytes) {
  load_kernel(reinterpret_cast<const void*>(kernel), call_one<Param>, bytes);
}
template <typename First, typename Second>
void load_kernel(void (*kernel)(First, Second), size_t bytes) {
  load_kernel(reinterpret_cast<const void*>(kernel), call_two<First, Second>, bytes);
}

constexpr size_t kStaticLimit = 48 << 10;  // dynamic shared memory that needs no attribute

}  // namespace emulation

// Loading a kernel is how the emulator learns its parameters: a kernel that was never loaded cannot be launched.
template <typename... Params>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Params...), cudaFuncAttribute, int bytes) {
  emulation::load_kernel(kernel, static_cast<size_t>(bytes));
  return cudaSuccess;
}
template <typename... Params>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, void (*kernel)(Params...)) {
  emulation::load_kernel(kernel, emulation::kStaticLimit);
  return cudaSuccess;
}
