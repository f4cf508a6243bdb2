// The slab of a device: a range of fixed addresses, with as much memory as the shapes so far need.
// A slab has the same addresses on all devices of a process, but not in different processes.
//
// Virtual memory of the driver can grow at fixed addresses, unlike memory of cudaMalloc. If the
// process that owns a slab ends, other processes can still write to the slab without a fault.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "runtime/driver.h"
#include "runtime/handoff.h"
#include "runtime/problem.h"

namespace moe_a2a {

class Slab {
 public:
  Slab(const Slab&) = delete;

  // Reserves the addresses.
  Problem Open();
  char* base() const { return reinterpret_cast<char*>(base_); }
  // Unmaps all memory, and keeps the addresses.
  Problem Release();

 protected:
  struct Mapped {
    int64_t offset, bytes;
    CUmemGenericAllocationHandle handle;
  };

  // `name` is for messages. `readers`: this process's devices that access the slab.
  Slab(std::string name, std::vector<int> readers)
      : name_(std::move(name)), readers_(std::move(readers)) {}
  ~Slab();

  // Takes ownership of the handle. On failure, nothing is mapped.
  Problem MapAt(int64_t offset, int64_t bytes, CUmemGenericAllocationHandle handle);
  // Returns how many bytes are mapped from `offset` on without a gap, at most `most`.
  int64_t mapped_from(int64_t offset, int64_t most) const;
  Problem Check(CUresult result, const std::string& doing) const;

  const Driver* const driver_ = GetDriver();
  const std::string name_;
  const std::vector<int> readers_;
  std::vector<Mapped> mapped_;

 private:
  CUdeviceptr base_ = 0;
};

class OwnSlab : public Slab {
 public:
  // If `is_shared`, other processes can map the slab.
  OwnSlab(int ordinal, std::vector<int> readers, bool is_shared);

  Problem Open();
  // Maps memory for the header and the first `half_bytes` of every ring half. Moves nothing.
  Problem Grow(int64_t half_bytes);
  int64_t mapped_bytes() const;
  // Appends the slab's allocations from index `first` on. `is_shared` must be true.
  Problem Share(size_t first, std::vector<Allocation>* allocations);

 private:
  // Maps memory for the first `wanted` bytes of a range. Does nothing on failure.
  Problem BackUpTo(int64_t offset, int64_t range, int64_t wanted);
  std::string FreeMemory() const;

  CUmemAllocationProp properties_ = {};
  size_t granularity_ = 0;
};

// The slab of a device of another process of this host.
class PeerSlab : public Slab {
 public:
  explicit PeerSlab(std::vector<int> readers) : Slab("of another process", std::move(readers)) {}

  Problem Map(const std::vector<Allocation>& allocations);
  size_t num_allocations() const { return mapped_.size(); }
  // Returns true if the header and the first `half_bytes` of every ring half are mapped.
  bool holds(int64_t half_bytes) const;
};

// Returns a problem if a reader has no peer access to the memory of device `ordinal`.
Problem CheckAccess(int ordinal, const std::vector<int>& readers);

}  // namespace moe_a2a
