#include "fake_driver.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "kernels/launch.h"
#include "placement/fill_slots.h"
#include "router/choose.h"
#include "runtime/cuda_error.h"

namespace fake_driver {

std::atomic<int64_t> room[kMaxDevices], used[kMaxDevices];
std::atomic<int> handles{0}, mappings{0};
std::atomic<bool> are_busy{false};
std::atomic<long> launches{0};
std::atomic<long> calls_until_failure{-1};

namespace {

struct Allocation {
  int device;  // negative: of another process
  int64_t bytes;
};
std::mutex mutex;
std::map<CUmemGenericAllocationHandle, Allocation>& allocations() {
  static auto* all = new std::map<CUmemGenericAllocationHandle, Allocation>();
  return *all;
}

bool fails() { return calls_until_failure >= 0 && calls_until_failure-- == 0; }

CUresult driver_result() { return fails() ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS; }
cudaError_t result() { return fails() ? cudaErrorMemoryAllocation : cudaSuccess; }

void* at(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

bool map_nothing(void* address, size_t bytes) {
  return mmap(address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED,
              -1, 0) != MAP_FAILED;
}

void keep(CUmemGenericAllocationHandle handle, const Allocation& allocation) {
  ++handles;
  std::lock_guard<std::mutex> lock(mutex);
  allocations()[handle] = allocation;
}

template <typename T>
cudaError_t make(T* made) {
  static std::atomic<uintptr_t> next{1};
  if (fails()) return cudaErrorMemoryAllocation;
  *made = reinterpret_cast<T>(next++);
  return cudaSuccess;
}

thread_local CUcontext context;
thread_local int current_device = 0;

}  // namespace
}  // namespace fake_driver

using namespace fake_driver;

// ---- The driver.

CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr,
                             unsigned long long) {
  if (fails()) return CUDA_ERROR_OUT_OF_MEMORY;
  void* reserved =
      mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = reinterpret_cast<CUdeviceptr>(reserved);
  return CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  munmap(at(address), bytes);
  return CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes,
                     const CUmemAllocationProp* properties, unsigned long long) {
  const int device = properties->location.id;
  const auto size = static_cast<int64_t>(bytes);
  if (fails() || used[device] + size > room[device]) return CUDA_ERROR_OUT_OF_MEMORY;
  const int file = memfd_create("device memory", MFD_CLOEXEC);
  if (file < 0) return CUDA_ERROR_OUT_OF_MEMORY;
  if (ftruncate(file, size) != 0) {
    close(file);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  used[device] += size;
  *handle = static_cast<CUmemGenericAllocationHandle>(file);
  keep(*handle, {device, size});
  return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t, CUmemGenericAllocationHandle handle,
                  unsigned long long) {
  if (fails() || mmap(at(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED,
                      static_cast<int>(handle), 0) == MAP_FAILED) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  ++mappings;
  return CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
  --mappings;
  return map_nothing(at(address), bytes) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = allocations().find(handle);
    if (found == allocations().end()) std::abort();  // released twice
    if (found->second.device >= 0) used[found->second.device] -= found->second.bytes;
    allocations().erase(found);
  }
  close(static_cast<int>(handle));
  --handles;
  return CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc*, size_t) {
  if (fails()) return CUDA_ERROR_OUT_OF_MEMORY;
  return mprotect(at(address), bytes, PROT_READ | PROT_WRITE) == 0 ? CUDA_SUCCESS
                                                                   : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemExportToShareableHandle(void* out, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType, unsigned long long) {
  if (fails()) return CUDA_ERROR_OUT_OF_MEMORY;
  const int file = fcntl(static_cast<int>(handle), F_DUPFD_CLOEXEC, 0);
  if (file < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  *static_cast<int*>(out) = file;
  return CUDA_SUCCESS;
}
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* in,
                                        CUmemAllocationHandleType) {
  if (fails()) return CUDA_ERROR_OUT_OF_MEMORY;
  const int file = fcntl(static_cast<int>(reinterpret_cast<intptr_t>(in)), F_DUPFD_CLOEXEC, 0);
  if (file < 0) return CUDA_ERROR_INVALID_VALUE;
  *handle = static_cast<CUmemGenericAllocationHandle>(file);
  keep(*handle, {-1, 0});
  return CUDA_SUCCESS;
}
CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*,
                                       CUmemAllocationGranularity_flags) {
  *bytes = size_t{2} << 20;
  return driver_result();
}
CUresult cuCtxGetCurrent(CUcontext* current) {
  *current = context;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext current) {
  context = current;
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "another error";
  return CUDA_SUCCESS;
}

// ---- The runtime.

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** address, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
#define MOE_A2A_ENTRY(name)              \
  {                                      \
    #name, reinterpret_cast<void*>(name) \
  }
  static const std::map<std::string, void*> entries = {
      MOE_A2A_ENTRY(cuMemAddressReserve),
      MOE_A2A_ENTRY(cuMemAddressFree),
      MOE_A2A_ENTRY(cuMemCreate),
      MOE_A2A_ENTRY(cuMemMap),
      MOE_A2A_ENTRY(cuMemUnmap),
      MOE_A2A_ENTRY(cuMemRelease),
      MOE_A2A_ENTRY(cuMemSetAccess),
      MOE_A2A_ENTRY(cuMemExportToShareableHandle),
      MOE_A2A_ENTRY(cuMemImportFromShareableHandle),
      MOE_A2A_ENTRY(cuMemGetAllocationGranularity),
      MOE_A2A_ENTRY(cuCtxGetCurrent),
      MOE_A2A_ENTRY(cuCtxSetCurrent),
      MOE_A2A_ENTRY(cuGetErrorString)};
#undef MOE_A2A_ENTRY
  const auto entry = entries.find(symbol);
  if (entry == entries.end()) return cudaErrorUnknown;
  *address = entry->second;
  *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "out of memory";
}
cudaError_t cudaSetDevice(int device) {
  current_device = device;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = static_cast<size_t>(room[current_device]);
  *free = *total - static_cast<size_t>(used[current_device]);
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  usleep(static_cast<useconds_t>(std::rand() % 200));
  while (are_busy) usleep(1000);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 132;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return make(stream); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  return make(stream);
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return result(); }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return result(); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return make(event); }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return result(); }
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  if (fails()) return cudaErrorMemoryAllocation;
  *memory = std::calloc(1, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  if (fails()) return cudaErrorMemoryAllocation;
  std::memset(to, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t) {
  if (fails()) return cudaErrorMemoryAllocation;
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}

// ---- Functions for tests that load a library which contains this driver.

#define MOE_A2A_CONTROL extern "C" __attribute__((visibility("default")))
MOE_A2A_CONTROL void fake_set_room(int device, int64_t bytes) { room[device] = bytes; }
MOE_A2A_CONTROL int64_t fake_used_bytes(int device) { return used[device]; }
MOE_A2A_CONTROL int fake_allocations() { return handles + mappings; }
MOE_A2A_CONTROL void fake_fail_after(long calls) { calls_until_failure = calls; }
MOE_A2A_CONTROL void fake_be_busy(bool busy) { are_busy = busy; }
#undef MOE_A2A_CONTROL

// ---- The kernels, which do nothing.

namespace moe_a2a {
namespace {

template <typename Params>
cudaError_t launch(const Params*, int, cudaStream_t) {
  ++launches;
  return result();
}

template <typename... Params>
constexpr std::tuple<Launcher<Params>...> launchers(const std::tuple<Launcher<Params>...>*) {
  return {Launcher<Params>{result, launch<Params>}...};
}

constexpr Kernels kKernels = {launchers(static_cast<decltype(Kernels::launchers)*>(nullptr))};

}  // namespace

const Kernels& DirectKernels() { return kKernels; }
const Kernels& ColocatedKernels() { return kKernels; }

cudaError_t LoadFillSlots() { return result(); }
Problem LaunchFillSlots(const FillSlots&, cudaStream_t) { return ProblemOf(result(), "launching"); }
cudaError_t LoadChoose() { return result(); }
Problem LaunchChoose(const Choose&, cudaStream_t) { return ProblemOf(result(), "launching"); }

}  // namespace moe_a2a
