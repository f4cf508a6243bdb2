#include <cuda.h>
#include <cuda_runtime_api.h>

#include "layout.h"
#include "runtime/slab.h"

namespace moe_a2a {
namespace {

// The driver's functions, found at run time: the package loads where there is no driver.
struct Driver {
  decltype(&cuMemAddressReserve) address_reserve = nullptr;
  decltype(&cuMemAddressFree) address_free = nullptr;
  decltype(&cuMemCreate) create = nullptr;
  decltype(&cuMemMap) map = nullptr;
  decltype(&cuMemUnmap) unmap = nullptr;
  decltype(&cuMemRelease) release = nullptr;
  decltype(&cuMemSetAccess) set_access = nullptr;
  decltype(&cuMemGetAllocationGranularity) granularity = nullptr;
  decltype(&cuGetErrorString) error_string = nullptr;
};

template <typename Function>
bool Find(const char* symbol, Function* function) {
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
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) return false;
  *function = reinterpret_cast<Function>(address);
  return true;
}

const Driver* GetDriver() {
  static const Driver* driver = []() -> const Driver* {
    static Driver d;
    const bool found = Find("cuMemAddressReserve", &d.address_reserve) &&
                       Find("cuMemAddressFree", &d.address_free) &&
                       Find("cuMemCreate", &d.create) && Find("cuMemMap", &d.map) &&
                       Find("cuMemUnmap", &d.unmap) && Find("cuMemRelease", &d.release) &&
                       Find("cuMemSetAccess", &d.set_access) &&
                       Find("cuMemGetAllocationGranularity", &d.granularity) &&
                       Find("cuGetErrorString", &d.error_string);
    return found ? &d : nullptr;
  }();
  return driver;
}

class LocalSlab : public Slab {
 public:
  LocalSlab(const Driver& driver, int ordinal, std::vector<int> readers)
      : driver_(driver), ordinal_(ordinal), readers_(std::move(readers)) {
    properties_.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties_.location = {CU_MEM_LOCATION_TYPE_DEVICE, ordinal};
  }

  ~LocalSlab() override {
    Release();
    if (base_ != 0) driver_.address_free(base_, kSlabAddressBytes);
  }

  Problem Open() {
    if (Problem p = Check(
            driver_.granularity(&granularity_, &properties_, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
            "asking for the allocation granularity");
        !p.empty()) {
      return p;
    }
    if (kHeaderBytes % granularity_ != 0) {
      return "the driver maps memory in pieces of " + std::to_string(granularity_) +
             " bytes, which do not divide the workspace's header";
    }
    return Check(driver_.address_reserve(&base_, kSlabAddressBytes, granularity_, 0, 0),
                 "reserving address space");
  }

  char* base() const override { return reinterpret_cast<char*>(base_); }

  Problem Grow(int64_t slot_bytes) override {
    const int64_t wanted = round_up(slot_bytes, granularity_);
    if (wanted > kSlotStride) {
      return "an exchange needs " + std::to_string(slot_bytes) +
             " bytes of landing zone; at most " + std::to_string(kSlotStride) + " are possible";
    }
    if (Problem p = BackUpTo(0, kHeaderBytes, &header_bytes_); !p.empty()) return p;
    for (int slot = 0; slot < kRingDepth; ++slot) {
      if (Problem p = BackUpTo(slot_offset(slot), wanted, &slot_bytes_[slot]); !p.empty()) return p;
    }
    return {};
  }

  int64_t mapped_bytes() const override {
    int64_t bytes = 0;
    for (const Backing& b : backings_) bytes += b.bytes;
    return bytes;
  }

  Problem Release() override {
    Problem first;
    for (const Backing& b : backings_) {
      Problem p = Check(driver_.unmap(base_ + b.offset, b.bytes), "unmapping");
      if (p.empty()) p = Check(driver_.release(b.handle), "releasing memory");
      if (first.empty()) first = p;
    }
    backings_.clear();
    header_bytes_ = 0;
    for (int64_t& bytes : slot_bytes_) bytes = 0;
    return first;
  }

 private:
  struct Backing {
    int64_t offset, bytes;
    CUmemGenericAllocationHandle handle;
  };

  Problem Check(CUresult result, const char* doing) const {
    if (result == CUDA_SUCCESS) return {};
    const char* text = nullptr;
    driver_.error_string(result, &text);
    return std::string("workspace on device ") + std::to_string(ordinal_) + ": " + doing + ": " +
           (text != nullptr ? text : "unknown driver error");
  }

  // Backs a range that `backed` bytes of are backed already. On failure nothing has changed, so that a
  // smaller shape can still be tried.
  Problem BackUpTo(int64_t offset, int64_t wanted, int64_t* backed) {
    if (wanted <= *backed) return {};
    offset += *backed;
    const int64_t bytes = wanted - *backed;
    CUmemGenericAllocationHandle handle;
    if (Problem p = Check(driver_.create(&handle, bytes, &properties_, 0),
                          ("allocating " + std::to_string(bytes) + " bytes").c_str());
        !p.empty()) {
      return p;
    }
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
                          "giving the peers access");
        !p.empty()) {
      driver_.unmap(base_ + offset, bytes);
      driver_.release(handle);
      return p;
    }
    backings_.push_back({offset, bytes, handle});
    *backed = wanted;
    return {};
  }

  const Driver& driver_;
  const int ordinal_;
  const std::vector<int> readers_;
  CUmemAllocationProp properties_ = {};
  size_t granularity_ = 0;
  CUdeviceptr base_ = 0;
  int64_t header_bytes_ = 0;
  int64_t slot_bytes_[kRingDepth] = {};
  std::vector<Backing> backings_;
};

}  // namespace

Problem CheckLocalAccess(int ordinal, const std::vector<int>& readers) {
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

Problem OpenLocalSlab(int ordinal, const std::vector<int>& readers, std::unique_ptr<Slab>* slab) {
  const Driver* driver = GetDriver();
  if (driver == nullptr) return "the CUDA driver has no virtual memory management";
  if (Problem p = CheckLocalAccess(ordinal, readers); !p.empty()) return p;
  auto local = std::make_unique<LocalSlab>(*driver, ordinal, readers);
  if (Problem p = local->Open(); !p.empty()) return p;
  *slab = std::move(local);
  return {};
}

}  // namespace moe_a2a
