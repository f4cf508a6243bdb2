// The operands and results of an execution, as XLA passes them.
#ifndef MOE_A2A_FFI_BUFFERS_H_
#define MOE_A2A_FFI_BUFFERS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "calls/array.h"
#include "calls/routing.h"
#include "ffi/errors.h"
#include "runtime/slice.h"
#include "xla/ffi/api/ffi.h"

namespace moe_a2a {

// Where the arrays of a call lie: at multiples of 16 bytes, as in most executions, or where this execution has them.
enum class Alignment { kVector, kOfThisExecution };

// Returns the operands or results of a call, of its first rank. Ranks that share a device have a common buffer with a
// leading axis of ranks.
ffi::ErrorOr<Arrays> DecodeArrays(const ffi::RemainingArgs& buffers, int64_t ranks_of_device,
                                  Alignment alignment);
ffi::ErrorOr<Arrays> DecodeArrays(const ffi::RemainingRets& buffers, int64_t ranks_of_device,
                                  Alignment alignment);

// The addresses of the operands or results of one execution.
class AddressList {
 public:
  AddressList() = default;
  // The same arrays of the next rank. `bytes` are those of each array.
  AddressList(const AddressList& first, const std::vector<int64_t>& bytes) : count_(first.count_) {
    for (size_t i = 0; i < count_; ++i) list_[i] = first.list_[i] + bytes[i];
  }

  // Returns False if a buffer is none, or if there are more than a call can have.
  bool Read(const ffi::RemainingArgs& buffers);
  bool Read(const ffi::RemainingRets& buffers);

  Addresses addresses() const { return {list_, count_}; }
  // Returns the bits of all addresses.
  uintptr_t bits() const { return bits_; }

 private:
  template <typename Buffers>
  bool ReadBuffers(const Buffers& buffers);

  static constexpr size_t kMost = 64;
  // A done has the most: the operands of its start and the results.
  static_assert(kMost >= 2 * kMaxArrays + 1 + kNumRoutingArrays + kMaxArrays);
  static_assert(kMost >= kNumPlanArrays + kMaxArrays);

  char* list_[kMost];
  size_t count_ = 0;
  uintptr_t bits_ = 0;
};

}  // namespace moe_a2a

#endif  // MOE_A2A_FFI_BUFFERS_H_
