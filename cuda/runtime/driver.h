// The functions of the CUDA driver that this package calls. They are found at run time, so that the
// package loads on a machine without a driver.
#pragma once

#include <cuda.h>

namespace moe_a2a {

struct Driver {
  decltype(&cuMemAddressReserve) address_reserve = nullptr;
  decltype(&cuMemAddressFree) address_free = nullptr;
  decltype(&cuMemCreate) create = nullptr;
  decltype(&cuMemMap) map = nullptr;
  decltype(&cuMemUnmap) unmap = nullptr;
  decltype(&cuMemRelease) release = nullptr;
  decltype(&cuMemSetAccess) set_access = nullptr;
  decltype(&cuMemExportToShareableHandle) export_handle = nullptr;
  decltype(&cuMemImportFromShareableHandle) import_handle = nullptr;
  decltype(&cuMemGetAllocationGranularity) granularity = nullptr;
  decltype(&cuCtxGetCurrent) current_context = nullptr;
  decltype(&cuCtxSetCurrent) set_current_context = nullptr;
  decltype(&cuGetErrorString) error_string = nullptr;
};

// Returns the function of the driver with this name in CUDA 12.0, or null if the driver has no such
// function.
void* FindInDriver(const char* symbol);

// Returns the functions, or null if the machine has no driver or the driver lacks one of the
// functions. Creates no context.
const Driver* GetDriver();

// At the end of the scope, restores the thread's current context, or sets no context if the thread
// had none. Saving and restoring the result of cudaGetDevice() instead would create a context on
// device 0 in a thread without a context.
class DeviceScope {
 public:
  DeviceScope() {
    if (driver_ != nullptr) driver_->current_context(&before_);
  }
  ~DeviceScope() {
    if (driver_ != nullptr) driver_->set_current_context(before_);
  }
  DeviceScope(const DeviceScope&) = delete;

 private:
  const Driver* const driver_ = GetDriver();
  CUcontext before_ = nullptr;
};

}  // namespace moe_a2a
