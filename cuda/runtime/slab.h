// One device's slab: an address range that never moves, backed by memory as shapes need it.
#ifndef MOE_A2A_RUNTIME_SLAB_H_
#define MOE_A2A_RUNTIME_SLAB_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace moe_a2a {

// Empty on success, else what went wrong.
using Problem = std::string;

// Memory of one device that `readers` (device ordinals, its own included) may load from and store to.
// One implementation per transport.
class Slab {
 public:
  virtual ~Slab() = default;
  virtual char* base() const = 0;
  // Backs the header and the first `slot_bytes` of every ring slot. Never moves or unmaps anything.
  virtual Problem Grow(int64_t slot_bytes) = 0;
  // Bytes of memory behind the addresses, in the driver's pages.
  virtual int64_t mapped_bytes() const = 0;
  // Gives the memory back and keeps the addresses.
  virtual Problem Release() = 0;
};

// Whether OpenLocalSlab() can succeed: every reader has peer access.
Problem CheckLocalAccess(int ordinal, const std::vector<int>& readers);

// All ranks in this process: the driver maps one device's memory into the others' address space.
Problem OpenLocalSlab(int ordinal, const std::vector<int>& readers, std::unique_ptr<Slab>* slab);

}  // namespace moe_a2a

#endif  // MOE_A2A_RUNTIME_SLAB_H_
