// The operands and results of an execution, as XLA passes them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "calls/array.h"
#include "calls/routing.h"
#include "ffi/errors.h"
#include "runtime/slice.h"
#include "xla/ffi/api/ffi.h"

namespace moe_a2a {

// The alignment of decoded arrays: 16 bytes, as in most executions, or the alignment of the
// addresses of this execution.
enum class Alignment { kVector, kOfThisExecution };

// Returns the buffer of an operand or of a result.
inline ffi::AnyBuffer BufferOf(ffi::AnyBuffer buffer) { return buffer; }
inline ffi::AnyBuffer BufferOf(ffi::Result<ffi::AnyBuffer> buffer) { return *buffer; }

// Returns the operands or results of the first rank of a call. Their dimensions belong to XLA and
// last as long as the execution. Ranks that share a device have common buffers, with a leading axis
// of ranks.
ffi::ErrorOr<Arrays> DecodeArrays(const ffi::RemainingArgs& buffers, int64_t ranks_of_device,
                                  Alignment alignment);
ffi::ErrorOr<Arrays> DecodeArrays(const ffi::RemainingRets& buffers, int64_t ranks_of_device,
                                  Alignment alignment);

// The addresses of the operands or results of one execution.
class AddressList {
 public:
  AddressList() = default;
  // Makes the addresses of the next rank of the device. `bytes`: the size of each array.
  AddressList(const AddressList& first, const std::vector<int64_t>& bytes) : count_(first.count_) {
    for (size_t i = 0; i < count_; ++i) list_[i] = first.list_[i] + bytes[i];
  }

  // Returns false if an argument is not a buffer, or if a call cannot have this number of buffers.
  bool Read(const ffi::RemainingArgs& buffers);
  bool Read(const ffi::RemainingRets& buffers);

  Addresses addresses() const { return {list_, count_}; }
  // Returns the bitwise or of all addresses.
  uintptr_t bits() const { return bits_; }

 private:
  template <typename Buffers>
  bool ReadBuffers(const Buffers& buffers);

  static constexpr size_t kMost = 64;
  // A done has the most operands of all calls: the operands and the results of its start.
  static_assert(kMost >= 2 * kMaxArrays + 1 + kNumRoutingArrays + kMaxArrays);
  static_assert(kMost >= kNumPlanArrays + kMaxArrays);

  char* list_[kMost];
  size_t count_ = 0;
  uintptr_t bits_ = 0;
};

}  // namespace moe_a2a
