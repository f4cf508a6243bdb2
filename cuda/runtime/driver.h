// The CUDA driver's functions are looked up at run time, so the package loads without a driver.
#pragma once

#include <cuda.h>

namespace moe_a2a {

#define MOE_A2A_DRIVER_FUNCTIONS(each)                                                            \
  each(cuMemAddressReserve) each(cuMemAddressFree) each(cuMemCreate) each(cuMemMap)               \
      each(cuMemUnmap) each(cuMemRelease) each(cuMemSetAccess) each(cuMemExportToShareableHandle) \
          each(cuMemImportFromShareableHandle) each(cuMemGetAllocationGranularity)                \
              each(cuCtxGetCurrent) each(cuCtxSetCurrent) each(cuGetErrorString)

struct Driver {
#define MOE_A2A_FUNCTION(name) decltype(&::name) name = nullptr;
  MOE_A2A_DRIVER_FUNCTIONS(MOE_A2A_FUNCTION)
#undef MOE_A2A_FUNCTION
};

// Returns the address of a driver function as of CUDA 12.0, or null.
void* FindInDriver(const char* symbol);

// Returns null if there is no driver or the driver lacks a function. Creates no context.
const Driver* GetDriver();

// Restores the thread's current context at the end of the scope. cudaGetDevice() is not used,
// because it would create a context in a thread that has none.
class DeviceScope {
 public:
  DeviceScope() {
    if (driver_ != nullptr) driver_->cuCtxGetCurrent(&before_);
  }
  ~DeviceScope() {
    if (driver_ != nullptr) driver_->cuCtxSetCurrent(before_);
  }
  DeviceScope(const DeviceScope&) = delete;

 private:
  const Driver* const driver_ = GetDriver();
  CUcontext before_ = nullptr;
};

}  // namespace moe_a2a
