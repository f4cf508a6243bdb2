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
  // Backs the header and the first `slot_bytes` of every ring slot. Never moves or unmaps anything.
  virtual Problem Grow(int64_t slot_bytes) = 0;
  // Bytes of memory behind the addresses, in the driver's pages.
  virtual int64_t mapped_bytes() const = 0;
  // The pieces of that memory, the first `first` left out, for another process. Of a shared slab.
  virtual Problem Share(size_t first, std::vector<Piece>* pieces) = 0;
};

// The slab of a device of another process of this host.
class PeerSlab : public Slab {
 public:
  // Maps more pieces of it.
  virtual Problem Map(const std::vector<Piece>& pieces) = 0;
  virtual size_t num_pieces() const = 0;
  // Whether the header and the first `slot_bytes` of every ring slot are here.
  virtual bool holds(int64_t slot_bytes) const = 0;
};

// Whether the readers can reach the memory of a device: each has peer access.
Problem CheckAccess(int ordinal, const std::vector<int>& readers);

// `is_shared`: with other processes.
Problem OpenOwnSlab(int ordinal, const std::vector<int>& readers, bool is_shared,
                    std::unique_ptr<OwnSlab>* slab);

Problem OpenPeerSlab(const std::vector<int>& readers, std::unique_ptr<PeerSlab>* slab);

}  // namespace moe_a2a

#endif  // MOE_A2A_RUNTIME_SLAB_H_
