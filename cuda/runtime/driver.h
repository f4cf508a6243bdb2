// The driver's functions that this package calls, found at run time: it loads where there is no driver.
#ifndef MOE_A2A_RUNTIME_DRIVER_H_
#define MOE_A2A_RUNTIME_DRIVER_H_

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

// Null if there is no driver, or if it lacks these functions. Creates no context.
const Driver* GetDriver();

// Restores the thread's current context. If the thread had none, it has none again, because choosing the device that
// cudaGetDevice() then names, the first one, would create a context on it.
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

#endif  // MOE_A2A_RUNTIME_DRIVER_H_
