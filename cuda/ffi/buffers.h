// The operands and results of an execution, as XLA passes them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <sstream>
#include <string>

#include "calls/array.h"
#include "calls/routing.h"
#include "ffi/errors.h"
#include "runtime/slice.h"
#include "xla/ffi/api/ffi.h"

namespace moe_a2a {

// Whether arrays count as aligned to 16 bytes, or as aligned as this execution's addresses.
enum class Alignment { kVector, kOfThisExecution };

inline ffi::AnyBuffer BufferOf(ffi::AnyBuffer buffer) { return buffer; }
inline ffi::AnyBuffer BufferOf(ffi::Result<ffi::AnyBuffer> buffer) { return *buffer; }

inline DataType TypeOf(ffi::DataType type) {
  switch (type) {  // The stream below is slow, and each execution of a product calls this.
    case ffi::DataType::BF16: return kBFloat16;
    case ffi::DataType::F16: return kFloat16;
    case ffi::DataType::F32: return kFloat32;
    case ffi::DataType::S32: return kInt32;
    case ffi::DataType::F8E4M3FN: return kFp8;
    default: break;
  }
  std::ostringstream name;
  name << static_cast<XLA_FFI_DataType>(type);
  return TypeNamed(name.str());
}

// Decodes operands or results of the device's first rank. XLA owns the dimensions. If ranks share
// the device, buffers have a leading axis of ranks. `first_index` is the first Array::index.
template <typename Buffers>
Problem DecodeArrays(const Buffers& buffers, size_t first_index, int64_t ranks_of_device,
                     Alignment alignment, Arrays* decoded) {
  decoded->reserve(buffers.size());
  for (size_t i = 0; i < buffers.size(); ++i) {
    auto any = buffers.template get<ffi::AnyBuffer>(i);
    if (!any) return Invalid(any.error().message());
    const ffi::AnyBuffer buffer = BufferOf(*any);
    auto dimensions = buffer.dimensions();
    if (ranks_of_device > 1) {
      if (dimensions.size() == 0 || dimensions[0] != ranks_of_device) {
        return Invalid("every array of a call with ", ranks_of_device,
                       " ranks on one GPU must have a leading axis of that size; array ", i,
                       " has none");
      }
      dimensions = {dimensions.begin() + 1, dimensions.size() - 1};
    }
    Array& array = decoded->emplace_back();
    array.type = TypeOf(buffer.element_type());
    array.dimensions = {dimensions.begin(), dimensions.size()};
    array.bytes = static_cast<int64_t>(buffer.size_bytes()) / ranks_of_device;
    array.data = buffer.untyped_data();
    if (alignment == Alignment::kOfThisExecution) {
      array.address_bits = reinterpret_cast<uintptr_t>(array.data);
    }
    if (ranks_of_device > 1) array.address_bits |= array.bytes;
    array.index = first_index + i;
  }
  return {};
}

// The addresses of the operands and then the results of one execution.
class AddressList {
 public:
  // Returns false if an argument is not an array, or if there are too many.
  template <typename Buffers>
  bool Read(const Buffers& buffers) {
    for (size_t i = 0; i < buffers.size(); ++i) {
      const auto any = buffers.template get<ffi::AnyBuffer>(i);
      if (!any || count_ == kMost) return false;
      list_[count_] = static_cast<char*>(BufferOf(*any).untyped_data());
      bits_ |= reinterpret_cast<uintptr_t>(list_[count_++]);
    }
    return true;
  }

  Addresses addresses() const { return {list_, count_}; }
  uintptr_t bits() const { return bits_; }  // the bitwise or of all addresses

 private:
  static constexpr size_t kMost = 96;
  // A done has the most arrays of all calls: its start's operands, and the results twice.
  static_assert(kMost >= 2 * kMaxArrays + 1 + kNumRoutingArrays + 2 * kMaxArrays);

  char* list_[kMost];
  size_t count_ = 0;
  uintptr_t bits_ = 0;
};

}  // namespace moe_a2a
