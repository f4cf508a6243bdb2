#include "runtime/slab.h"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "layout.h"

namespace moe_a2a {

constexpr CUmemAllocationHandleType kShared = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

Slab::~Slab() {
  Release();
  if (base_ != 0) driver_->cuMemAddressFree(base_, kSlabAddressBytes);
}

Problem Slab::Check(CUresult result, const std::string& doing) const {
  if (result == CUDA_SUCCESS) return {};
  const char* text = nullptr;
  driver_->cuGetErrorString(result, &text);
  return {"workspace " + name_ + ": " + doing + ": " +
              (text != nullptr ? text : "unknown driver error"),
          result == CUDA_ERROR_OUT_OF_MEMORY};
}

Problem Slab::Open() {
  if (driver_ == nullptr) return "the CUDA driver has no virtual memory management";
  return Check(driver_->cuMemAddressReserve(&base_, kSlabAddressBytes, 0, 0, 0),
               "reserving address space");
}

Problem Slab::MapAt(int64_t offset, int64_t bytes, CUmemGenericAllocationHandle handle) {
  std::vector<CUmemAccessDesc> access;
  for (int reader : readers_) {
    access.push_back({{CU_MEM_LOCATION_TYPE_DEVICE, reader}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE});
  }
  const CUdeviceptr at = base_ + offset;
  Problem p = Check(driver_->cuMemMap(at, bytes, 0, handle, 0), "mapping");
  if (p.empty()) {
    p = Check(driver_->cuMemSetAccess(at, bytes, access.data(), access.size()),
              "giving the devices of this process access");
    if (!p.empty()) driver_->cuMemUnmap(at, bytes);
  }
  if (p.empty()) mapped_.push_back({offset, bytes, handle});
  if (!p.empty()) driver_->cuMemRelease(handle);
  return p;
}

Problem Slab::Release() {
  Problem first;
  for (const Mapped& m : mapped_) {
    Problem p = Check(driver_->cuMemUnmap(base_ + m.offset, m.bytes), "unmapping");
    if (p.empty()) p = Check(driver_->cuMemRelease(m.handle), "releasing memory");
    if (first.empty()) first = p;
  }
  mapped_.clear();
  return first;
}

int64_t Slab::mapped_from(int64_t offset, int64_t most) const {
  int64_t end = offset, before;
  do {
    before = end;
    for (const Mapped& m : mapped_) {
      if (m.offset <= end) end = std::max(end, m.offset + m.bytes);
    }
  } while (end > before);  // in passes, because allocations are in any order
  return std::min(end - offset, most);
}

OwnSlab::OwnSlab(int ordinal, std::vector<int> readers, bool is_shared)
    : Slab(Concat("on device ", ordinal), std::move(readers)) {
  properties_.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties_.location = {CU_MEM_LOCATION_TYPE_DEVICE, ordinal};
  if (is_shared) properties_.requestedHandleTypes = kShared;
}

Problem OwnSlab::Open() {
  MOE_A2A_TRY(CheckAccess(properties_.location.id, readers_));
  MOE_A2A_TRY(Slab::Open());
  MOE_A2A_TRY(Check(driver_->cuMemGetAllocationGranularity(&granularity_, &properties_,
                                                           CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
                    "asking for the allocation granularity"));
  if (kHeaderBytes % granularity_ == 0) return {};
  return Concat("the driver's allocation granularity must divide the workspace's header; got ",
                granularity_, " bytes");
}

Problem OwnSlab::Grow(int64_t half_bytes) {
  const int64_t wanted = round_up(half_bytes, granularity_);
  if (wanted > kHalfStride) {
    return Concat("landing zones must be at most ", kHalfStride, " bytes; got ", half_bytes,
                  ". Use fewer tokens per exchange");
  }
  MOE_A2A_TRY(BackUpTo(0, kHeaderBytes, kHeaderBytes));
  for (int half = 0; half < kRingDepth; ++half) {
    MOE_A2A_TRY(BackUpTo(half_offset(half), kHalfStride, wanted));
  }
  return {};
}

int64_t OwnSlab::mapped_bytes() const {
  int64_t bytes = 0;
  for (const Mapped& m : mapped_) bytes += m.bytes;
  return bytes;
}

Problem OwnSlab::Share(size_t first, std::vector<Allocation>* allocations) {
  for (size_t i = first; i < mapped_.size(); ++i) {
    const Mapped& m = mapped_[i];
    int fd = -1;
    MOE_A2A_TRY(Check(driver_->cuMemExportToShareableHandle(&fd, m.handle, kShared, 0),
                      "sharing it with another process"));
    allocations->push_back({m.offset, m.bytes, Descriptor(fd)});
  }
  return {};
}

Problem OwnSlab::BackUpTo(int64_t offset, int64_t range, int64_t wanted) {
  const int64_t backed = mapped_from(offset, range);
  if (wanted <= backed) return {};
  const int64_t bytes = wanted - backed;
  CUmemGenericAllocationHandle handle;
  if (Problem p = Check(driver_->cuMemCreate(&handle, bytes, &properties_, 0),
                        Concat("allocating ", bytes, " bytes"));
      !p.empty()) {
    if (p.lacks_memory) p += FreeMemory();
    return p;
  }
  return MapAt(offset + backed, bytes, handle);
}

std::string OwnSlab::FreeMemory() const {
  size_t free = 0, total = 0;
  if (cudaSetDevice(properties_.location.id) != cudaSuccess ||
      cudaMemGetInfo(&free, &total) != cudaSuccess) {
    cudaGetLastError();
    return {};
  }
  return Concat("; ", free, " of ", total,
                " bytes of the device are free. XLA's pool may hold the rest "
                "(XLA_PYTHON_CLIENT_MEM_FRACTION)");
}

Problem PeerSlab::Map(const std::vector<Allocation>& allocations) {
  for (const Allocation& allocation : allocations) {
    if (allocation.offset < 0 || allocation.bytes <= 0 ||
        allocation.bytes > kSlabAddressBytes - allocation.offset) {
      return "another process has sent memory for an unknown address; it may run another version";
    }
    CUmemGenericAllocationHandle handle;
    void* fd = reinterpret_cast<void*>(static_cast<intptr_t>(allocation.memory.get()));
    MOE_A2A_TRY(
        Check(driver_->cuMemImportFromShareableHandle(&handle, fd, kShared), "importing memory"));
    MOE_A2A_TRY(MapAt(allocation.offset, allocation.bytes, handle));
  }
  return {};
}

bool PeerSlab::holds(int64_t half_bytes) const {
  bool all = mapped_from(0, kHeaderBytes) >= kHeaderBytes;
  for (int half = 0; half < kRingDepth; ++half) {
    all = all && mapped_from(half_offset(half), kHalfStride) >= half_bytes;
  }
  return all;
}

Problem CheckAccess(int ordinal, const std::vector<int>& readers) {
  for (int reader : readers) {
    int reachable = reader == ordinal;
    if (!reachable && cudaDeviceCanAccessPeer(&reachable, reader, ordinal) != cudaSuccess) {
      cudaGetLastError();
    }
    if (!reachable) {
      return Concat("device ", reader, " cannot access the memory of device ", ordinal,
                    " (no peer access between them)");
    }
  }
  return {};
}

}  // namespace moe_a2a
