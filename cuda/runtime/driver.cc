#include "runtime/driver.h"

#include <cuda_runtime_api.h>

#include <type_traits>

namespace moe_a2a {

void* FindInDriver(const char* symbol) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult result;
  constexpr unsigned kVersion = 12000;
#if CUDART_VERSION >= 12050
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(symbol, &address, kVersion, cudaEnableDefault, &result);
#else
  (void)kVersion;
  const cudaError_t error = cudaGetDriverEntryPoint(symbol, &address, cudaEnableDefault, &result);
#endif
  return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? address : nullptr;
}

const Driver* GetDriver() {
  static const Driver* driver = []() -> const Driver* {
    static Driver d;
    bool has_all = true;
    const auto find = [&](const char* symbol, auto& function) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(FindInDriver(symbol));
      has_all = has_all && function != nullptr;
    };
#define MOE_A2A_FIND(name) find(#name, d.name);
    MOE_A2A_DRIVER_FUNCTIONS(MOE_A2A_FIND)
#undef MOE_A2A_FIND
    return has_all ? &d : nullptr;
  }();
  return driver;
}

}  // namespace moe_a2a
