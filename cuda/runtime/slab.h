// The slab of a device: an address range that never moves, with as much memory as shapes need. All
// devices of a process see a slab at the same addresses. Another process maps the same memory at
// its own addresses.
#ifndef MOE_A2A_RUNTIME_SLAB_H_
#define MOE_A2A_RUNTIME_SLAB_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/handoff.h"
#include "runtime/problem.h"

namespace moe_a2a {

// `readers` below are the ordinals of this process's devices that may load from and store to a
// slab.
class Slab {
 public:
  virtual ~Slab() = default;
  virtual char* base() const = 0;
  // Unmaps all memory and keeps the addresses.
  virtual Problem Release() = 0;
};

// The slab of a device of this process.
class OwnSlab : public Slab {
 public:
  // Allocates memory for the header and the first `half_bytes` of every ring half. Never moves or
  // unmaps anything.
  virtual Problem Grow(int64_t half_bytes) = 0;
  // Returns the bytes of allocated memory, in whole pages of the driver.
  virtual int64_t mapped_bytes() const = 0;
  // Adds the slab's allocations from index `first` on, for another process. The slab must be
  // shared.
  virtual Problem Share(size_t first, std::vector<Allocation>* allocations) = 0;
};

// The slab of a device of another process of this host.
class PeerSlab : public Slab {
 public:
  // Maps more allocations of the slab.
  virtual Problem Map(const std::vector<Allocation>& allocations) = 0;
  virtual size_t num_allocations() const = 0;
  // Returns true if the header and the first `half_bytes` of every ring half are mapped.
  virtual bool holds(int64_t half_bytes) const = 0;
};

// Returns why a reader has no peer access to the memory of a device, or empty.
Problem CheckAccess(int ordinal, const std::vector<int>& readers);

// `is_shared`: other processes can map the slab.
Problem OpenOwnSlab(int ordinal, const std::vector<int>& readers, bool is_shared,
                    std::unique_ptr<OwnSlab>* slab);

Problem OpenPeerSlab(const std::vector<int>& readers, std::unique_ptr<PeerSlab>* slab);

}  // namespace moe_a2a

#endif  // MOE_A2A_RUNTIME_SLAB_H_
