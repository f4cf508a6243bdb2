// The attributes that every call has. jax_moe_a2a/_src/exchange/lowering.py writes them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include "layout.h"
#include "runtime/workspace.h"
#include "xla/ffi/api/ffi.h"

namespace moe_a2a {

struct CallAttributes {
  Topology topology;
  WorkspaceKind workspace_kind;
  int64_t num_sms;
  int64_t timeout_ns;
  int64_t first_timeout_ns;
  int64_t half_bytes;   // of the landing zones of all sources
  bool raise_failures;  // false: a failure shows only in the outputs
  int64_t scopes;       // a hash of the name scopes around the call in the program

  // Returns true if all ranks are on the device that runs the call, so that the call names no
  // device.
  bool is_on_one_device() const { return topology.devices.empty(); }
};

// Reads attributes into variables. Returns false if an attribute is missing or has another type.
class AttributeReader {
 public:
  explicit AttributeReader(const xla::ffi::Dictionary& attributes) : attributes_(attributes) {}

  template <typename T>
  bool operator()(const char* name, T* value) const {
    using Found = std::conditional_t<std::is_same_v<T, std::string>, std::string_view, T>;
    const auto found = attributes_.get<Found>(name);
    if (found) *value = *found;
    return found.has_value();
  }

 private:
  const xla::ffi::Dictionary& attributes_;
};

// Returns the error of a call that lacks an attribute.
xla::ffi::Error LacksAttribute();

xla::ffi::ErrorOr<CallAttributes> DecodeAttributes(const xla::ffi::Dictionary& attributes);

// Sets the device of every rank to `ordinal` if the call names no device.
xla::ffi::Error SetDevice(int32_t ordinal, Topology* topology);

}  // namespace moe_a2a
