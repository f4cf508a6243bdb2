// Slabs use the driver's virtual memory management. Unlike memory of cudaMalloc and its IPC
// handles, a slab can grow at fixed addresses. If the owner of a slab ends, other processes'
// mappings stay valid: writes to the memory of a dead peer have no effect and do not fault.
#include "runtime/slab.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>
#include <utility>

#include "layout.h"
#include "runtime/driver.h"

namespace moe_a2a {
namespace {

constexpr CUmemAllocationHandleType kShared = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

// The address range of a slab, and the memory that is mapped there.
class Addresses {
 public:
  Addresses(const Driver& driver, std::string name, std::vector<int> readers)
      : driver_(driver), name_(std::move(name)), readers_(std::move(readers)) {}

  ~Addresses() {
    Unmap();
    if (base_ != 0) driver_.address_free(base_, kSlabAddressBytes);
  }

  Problem Check(CUresult result, const std::string& doing) const {
    if (result == CUDA_SUCCESS) return {};
    const char* text = nullptr;
    driver_.error_string(result, &text);
    return {"workspace " + name_ + ": " + doing + ": " +
                (text != nullptr ? text : "unknown driver error"),
            result == CUDA_ERROR_OUT_OF_MEMORY};
  }

  Problem Reserve() {
    return Check(driver_.address_reserve(&base_, kSlabAddressBytes, 0, 0, 0),
                 "reserving address space");
  }

  char* base() const { return reinterpret_cast<char*>(base_); }

  // Takes ownership of the handle. If it fails, no mapping has changed.
  Problem Map(int64_t offset, int64_t bytes, CUmemGenericAllocationHandle handle) {
    if (Problem p = Check(driver_.map(base_ + offset, bytes, 0, handle, 0), "mapping");
        !p.empty()) {
      driver_.release(handle);
      return p;
    }
    std::vector<CUmemAccessDesc> access;
    for (int reader : readers_) {
      access.push_back({{CU_MEM_LOCATION_TYPE_DEVICE, reader}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE});
    }
    if (Problem p = Check(driver_.set_access(base_ + offset, bytes, access.data(), access.size()),
                          "giving the devices of this process access");
        !p.empty()) {
      driver_.unmap(base_ + offset, bytes);
      driver_.release(handle);
      return p;
    }
    mapped_.push_back({offset, bytes, handle});
    return {};
  }

  Problem Unmap() {
    Problem first;
    for (const Mapped& m : mapped_) {
      Problem p = Check(driver_.unmap(base_ + m.offset, m.bytes), "unmapping");
      if (p.empty()) p = Check(driver_.release(m.handle), "releasing memory");
      if (first.empty()) first = p;
    }
    mapped_.clear();
    return first;
  }

  struct Mapped {
    int64_t offset, bytes;
    CUmemGenericAllocationHandle handle;
  };
  const std::vector<Mapped>& mapped() const { return mapped_; }

  // Returns how many bytes of the range of `most` bytes at `offset` are mapped before the first
  // gap.
  int64_t mapped_from(int64_t offset, int64_t most) const {
    int64_t end = offset, before;
    do {
      before = end;
      for (const Mapped& m : mapped_) {
        if (m.offset <= end) end = std::max(end, m.offset + m.bytes);
      }
    } while (end > before);  // the allocations have any order
    return std::min(end - offset, most);
  }

 private:
  const Driver& driver_;
  const std::string name_;
  const std::vector<int> readers_;
  CUdeviceptr base_ = 0;
  std::vector<Mapped> mapped_;
};

class DriverOwnSlab : public OwnSlab {
 public:
  DriverOwnSlab(const Driver& driver, int ordinal, std::vector<int> readers, bool is_shared)
      : driver_(driver),
        addresses_(driver, "on device " + std::to_string(ordinal), std::move(readers)) {
    properties_.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties_.location = {CU_MEM_LOCATION_TYPE_DEVICE, ordinal};
    if (is_shared) properties_.requestedHandleTypes = kShared;
  }

  Problem Open() {
    if (Problem p = addresses_.Check(
            driver_.granularity(&granularity_, &properties_, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
            "asking for the allocation granularity");
        !p.empty()) {
      return p;
    }
    if (kHeaderBytes % granularity_ != 0) {
      return "the driver's allocation granularity must divide the workspace's header; got " +
             std::to_string(granularity_) + " bytes";
    }
    return addresses_.Reserve();
  }

  char* base() const override { return addresses_.base(); }

  Problem Grow(int64_t half_bytes) override {
    const int64_t wanted = round_up(half_bytes, granularity_);
    if (wanted > kHalfStride) {
      return "landing zones must be at most " + std::to_string(kHalfStride) + " bytes; got " +
             std::to_string(half_bytes) + ". Use fewer tokens per exchange";
    }
    if (Problem p = BackUpTo(0, kHeaderBytes, kHeaderBytes); !p.empty()) return p;
    for (int half = 0; half < kRingDepth; ++half) {
      if (Problem p = BackUpTo(half_offset(half), kHalfStride, wanted); !p.empty()) return p;
    }
    return {};
  }

  int64_t mapped_bytes() const override {
    int64_t bytes = 0;
    for (const auto& m : addresses_.mapped()) bytes += m.bytes;
    return bytes;
  }

  Problem Share(size_t first, std::vector<Allocation>* allocations) override {
    for (size_t i = first; i < addresses_.mapped().size(); ++i) {
      const auto& m = addresses_.mapped()[i];
      int fd = -1;
      if (Problem p = addresses_.Check(driver_.export_handle(&fd, m.handle, kShared, 0),
                                       "sharing it with another process");
          !p.empty()) {
        return p;
      }
      allocations->push_back({m.offset, m.bytes, Descriptor(fd)});
    }
    return {};
  }

  Problem Release() override { return addresses_.Unmap(); }

 private:
  // Allocates memory for the first `wanted` bytes of a range. If it fails, nothing has changed, so
  // a smaller shape may succeed.
  Problem BackUpTo(int64_t offset, int64_t range, int64_t wanted) {
    const int64_t backed = addresses_.mapped_from(offset, range);
    if (wanted <= backed) return {};
    const int64_t bytes = wanted - backed;
    CUmemGenericAllocationHandle handle;
    if (Problem p = addresses_.Check(driver_.create(&handle, bytes, &properties_, 0),
                                     "allocating " + std::to_string(bytes) + " bytes");
        !p.empty()) {
      if (p.lacks_memory) p += FreeMemory();
      return p;
    }
    return addresses_.Map(offset + backed, bytes, handle);
  }

  // Returns a sentence about the device's free memory, for a message.
  std::string FreeMemory() const {
    size_t free = 0, total = 0;
    if (cudaSetDevice(properties_.location.id) != cudaSuccess ||
        cudaMemGetInfo(&free, &total) != cudaSuccess) {
      cudaGetLastError();
      return {};
    }
    return "; " + std::to_string(free) + " of " + std::to_string(total) +
           " bytes of the device are free. XLA's pool may hold the rest "
           "(XLA_PYTHON_CLIENT_MEM_FRACTION)";
  }

  const Driver& driver_;
  CUmemAllocationProp properties_ = {};
  size_t granularity_ = 0;
  Addresses addresses_;
};

class DriverPeerSlab : public PeerSlab {
 public:
  DriverPeerSlab(const Driver& driver, std::vector<int> readers)
      : driver_(driver), addresses_(driver, "of another process", std::move(readers)) {}

  Problem Open() { return addresses_.Reserve(); }

  char* base() const override { return addresses_.base(); }

  Problem Map(const std::vector<Allocation>& allocations) override {
    for (const Allocation& allocation : allocations) {
      if (allocation.offset < 0 || allocation.bytes <= 0 ||
          allocation.bytes > kSlabAddressBytes - allocation.offset) {
        return "another process has sent memory for an unknown address; it may run another version";
      }
      CUmemGenericAllocationHandle handle;
      void* fd = reinterpret_cast<void*>(static_cast<intptr_t>(allocation.memory.get()));
      if (Problem p =
              addresses_.Check(driver_.import_handle(&handle, fd, kShared), "importing memory");
          !p.empty()) {
        return p;
      }
      if (Problem p = addresses_.Map(allocation.offset, allocation.bytes, handle); !p.empty())
        return p;
    }
    return {};
  }

  size_t num_allocations() const override { return addresses_.mapped().size(); }

  bool holds(int64_t half_bytes) const override {
    bool all = addresses_.mapped_from(0, kHeaderBytes) >= kHeaderBytes;
    for (int half = 0; half < kRingDepth; ++half) {
      all = all && addresses_.mapped_from(half_offset(half), kHalfStride) >= half_bytes;
    }
    return all;
  }

  Problem Release() override { return addresses_.Unmap(); }

 private:
  const Driver& driver_;
  Addresses addresses_;
};

}  // namespace

Problem CheckAccess(int ordinal, const std::vector<int>& readers) {
  for (int reader : readers) {
    int reachable = reader == ordinal;
    if (!reachable && cudaDeviceCanAccessPeer(&reachable, reader, ordinal) != cudaSuccess) {
      cudaGetLastError();
    }
    if (!reachable) {
      return "device " + std::to_string(reader) + " cannot access the memory of device " +
             std::to_string(ordinal) + " (no peer access between them)";
    }
  }
  return {};
}

Problem OpenOwnSlab(int ordinal, const std::vector<int>& readers, bool is_shared,
                    std::unique_ptr<OwnSlab>* slab) {
  const Driver* driver = GetDriver();
  if (driver == nullptr) return "the CUDA driver has no virtual memory management";
  if (Problem p = CheckAccess(ordinal, readers); !p.empty()) return p;
  auto own = std::make_unique<DriverOwnSlab>(*driver, ordinal, readers, is_shared);
  if (Problem p = own->Open(); !p.empty()) return p;
  *slab = std::move(own);
  return {};
}

Problem OpenPeerSlab(const std::vector<int>& readers, std::unique_ptr<PeerSlab>* slab) {
  const Driver* driver = GetDriver();
  if (driver == nullptr) return "the CUDA driver has no virtual memory management";
  auto peer = std::make_unique<DriverPeerSlab>(*driver, readers);
  if (Problem p = peer->Open(); !p.empty()) return p;
  *slab = std::move(peer);
  return {};
}

}  // namespace moe_a2a
