// launch.cc implements this part of the runtime for kernels, and host/fake_driver.cc for the host
// code.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorUnknown = 999
};
using cudaStream_t = struct CUstream_st*;
using cudaEvent_t = struct CUevent_st*;

struct dim3 {
  unsigned x, y, z = 1;
  explicit dim3(unsigned x, unsigned y = 1) : x(x), y(y) {}
};

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
struct cudaFuncAttributes {};

extern "C" cudaError_t cudaLaunchKernel(const void* kernel, dim3 blocks, dim3 threads,
                                        void** arguments, size_t shared_bytes, cudaStream_t stream);

namespace emulation {

using CallKernel = void (*)(const void* kernel, void** arguments);

void load_kernel(const void* kernel, CallKernel call, size_t dynamic_shared_bytes);

template <typename... Params, size_t... kIndices>
void call_with(const void* kernel, void** arguments, std::index_sequence<kIndices...>) {
  reinterpret_cast<void (*)(Params...)>(reinterpret_cast<uintptr_t>(kernel))(
      *static_cast<Params*>(arguments[kIndices])...);
}
template <typename... Params>
void call_all(const void* kernel, void** arguments) {
  call_with<Params...>(kernel, arguments, std::index_sequence_for<Params...>());
}

template <typename... Params>
void load_kernel(void (*kernel)(Params...), size_t bytes) {
  load_kernel(reinterpret_cast<const void*>(kernel), call_all<Params...>, bytes);
}

constexpr size_t kStaticLimit = 48 << 10;  // more shared memory needs an attribute

}  // namespace emulation

// A kernel must be loaded before a launch. At the load, the emulator notes the parameters' types.
template <typename... Params>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Params...), cudaFuncAttribute, int bytes) {
  emulation::load_kernel(kernel, static_cast<size_t>(bytes));
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline const char* cudaGetErrorString(cudaError_t) { return "an error"; }
template <typename... Params>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, void (*kernel)(Params...)) {
  emulation::load_kernel(kernel, emulation::kStaticLimit);
  return cudaSuccess;
}
