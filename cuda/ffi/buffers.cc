#include "ffi/buffers.h"

#include <sstream>
#include <string>

namespace moe_a2a {
namespace {

DataType TypeOf(ffi::DataType type) {
  switch (type) {  // the types of products, which are described at each execution
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

template <typename Buffers>
ffi::ErrorOr<Arrays> Decode(const Buffers& buffers, int64_t ranks_of_device, Alignment alignment) {
  Arrays decoded;
  decoded.reserve(buffers.size());
  for (size_t i = 0; i < buffers.size(); ++i) {
    auto any = buffers.template get<ffi::AnyBuffer>(i);
    if (!any) return ffi::Unexpected(any.error());
    const ffi::AnyBuffer buffer = BufferOf(*any);
    auto dimensions = buffer.dimensions();
    if (ranks_of_device > 1) {
      if (dimensions.size() == 0 || dimensions[0] != ranks_of_device) {
        return ffi::Unexpected(Invalid("every array of a call with " +
                                       std::to_string(ranks_of_device) +
                                       " ranks on one GPU must have a leading axis of that size; "
                                       "array " +
                                       std::to_string(i) + " has none"));
      }
      dimensions = {dimensions.begin() + 1, dimensions.size() - 1};
    }
    Array& array = decoded.emplace_back();
    array.type = TypeOf(buffer.element_type());
    array.dimensions = {dimensions.begin(), dimensions.size()};
    array.bytes = static_cast<int64_t>(buffer.size_bytes()) / ranks_of_device;
    array.data = buffer.untyped_data();
    if (alignment == Alignment::kOfThisExecution) {
      array.address_bits = reinterpret_cast<uintptr_t>(array.data);
    }
    if (ranks_of_device > 1) array.address_bits |= array.bytes;
  }
  return decoded;
}

}  // namespace

ffi::ErrorOr<Arrays> DecodeArrays(const ffi::RemainingArgs& buffers, int64_t ranks_of_device,
                                  Alignment alignment) {
  return Decode(buffers, ranks_of_device, alignment);
}

ffi::ErrorOr<Arrays> DecodeArrays(const ffi::RemainingRets& buffers, int64_t ranks_of_device,
                                  Alignment alignment) {
  return Decode(buffers, ranks_of_device, alignment);
}

template <typename Buffers>
bool AddressList::ReadBuffers(const Buffers& buffers) {
  if (buffers.size() > kMost) return false;
  count_ = buffers.size();
  for (size_t i = 0; i < count_; ++i) {
    const auto any = buffers.template get<ffi::AnyBuffer>(i);
    if (!any) return false;
    list_[i] = static_cast<char*>(BufferOf(*any).untyped_data());
    bits_ |= reinterpret_cast<uintptr_t>(list_[i]);
  }
  return true;
}

bool AddressList::Read(const ffi::RemainingArgs& buffers) { return ReadBuffers(buffers); }
bool AddressList::Read(const ffi::RemainingRets& buffers) { return ReadBuffers(buffers); }

}  // namespace moe_a2a
