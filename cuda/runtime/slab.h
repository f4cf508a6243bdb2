// One device's slab: an address range that never moves, backed by memory as shapes need it. The devices of
// one process see each other's slabs at the same addresses; another process maps the same memory at
// addresses of its own.
#ifndef MOE_A2A_RUNTIME_SLAB_H_
#define MOE_A2A_RUNTIME_SLAB_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/handoff.h"
#include "runtime/problem.h"

namespace moe_a2a {

// `readers` below are ordinals of this process's devices, which may load from and store to a slab.
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
  // Backs the header and the first `slot_bytes` of every ring half. Never moves or unmaps anything.
  virtual Problem Grow(int64_t slot_bytes) = 0;
  // Bytes of memory that back the addresses, in the driver's pages.
  virtual int64_t mapped_bytes() const = 0;
  // The allocations of that memory without the first `first`, for another process. The slab must be shared.
  virtual Problem Share(size_t first, std::vector<Piece>* pieces) = 0;
};

// The slab of a device of another process of this host.
class PeerSlab : public Slab {
 public:
  // Maps more allocations of the slab.
  virtual Problem Map(const std::vector<Piece>& pieces) = 0;
  virtual size_t num_pieces() const = 0;
  // Returns true if the header and the first `slot_bytes` of every ring half are mapped.
  virtual bool holds(int64_t slot_bytes) const = 0;
};

// Returns an empty problem if the readers can reach the memory of a device: each has peer access.
Problem CheckAccess(int ordinal, const std::vector<int>& readers);

// `is_shared`: with other processes.
Problem OpenOwnSlab(int ordinal, const std::vector<int>& readers, bool is_shared,
                    std::unique_ptr<OwnSlab>* slab);

Problem OpenPeerSlab(const std::vector<int>& readers, std::unique_ptr<PeerSlab>* slab);

}  // namespace moe_a2a

#endif  // MOE_A2A_RUNTIME_SLAB_H_
