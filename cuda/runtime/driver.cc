#include "runtime/driver.h"

#include <cuda_runtime_api.h>

namespace moe_a2a {

void* FindInDriver(const char* symbol) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult result;
  constexpr unsigned kVersion = 12000;  // the API as of CUDA 12.0
#if CUDART_VERSION >= 12050
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(symbol, &address, kVersion, cudaEnableDefault, &result);
#else
  (void)kVersion;
  const cudaError_t error = cudaGetDriverEntryPoint(symbol, &address, cudaEnableDefault, &result);
#endif
  return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? address : nullptr;
}

namespace {

template <typename Function>
bool Find(const char* symbol, Function* function) {
  *function = reinterpret_cast<Function>(FindInDriver(symbol));
  return *function != nullptr;
}

}  // namespace

const Driver* GetDriver() {
  static const Driver* driver = []() -> const Driver* {
    static Driver d;
    const bool found = Find("cuMemAddressReserve", &d.address_reserve) &&
                       Find("cuMemAddressFree", &d.address_free) &&
                       Find("cuMemCreate", &d.create) && Find("cuMemMap", &d.map) &&
                       Find("cuMemUnmap", &d.unmap) && Find("cuMemRelease", &d.release) &&
                       Find("cuMemSetAccess", &d.set_access) &&
                       Find("cuMemExportToShareableHandle", &d.export_handle) &&
                       Find("cuMemImportFromShareableHandle", &d.import_handle) &&
                       Find("cuMemGetAllocationGranularity", &d.granularity) &&
                       Find("cuCtxGetCurrent", &d.current_context) &&
                       Find("cuCtxSetCurrent", &d.set_current_context) &&
                       Find("cuGetErrorString", &d.error_string);
    return found ? &d : nullptr;
  }();
  return driver;
}

}  // namespace moe_a2a
