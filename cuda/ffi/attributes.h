// The attributes of all exchange calls. jax_moe_a2a/_src/exchange/lowering.py writes them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>

#include "calls/call.h"
#include "ffi/errors.h"
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
  bool raise_failures;  // false: after a failure, kernels still run and write NaN
  int64_t scopes;       // a hash of the named scopes around the call

  // If all ranks share the device that runs the call, the topology has no device ids.
  bool is_on_one_device() const { return topology.devices.empty(); }
};

// Returns false if the attribute is missing or has another type.
template <typename T>
bool ReadAttribute(const ffi::Dictionary& attributes, const char* name, T* value) {
  using Found = std::conditional_t<std::is_same_v<T, std::string>, std::string_view, T>;
  const auto found = attributes.get<Found>(name);
  if (found) *value = *found;
  return found.has_value();
}

inline AttributeReader ReaderOf(const ffi::Dictionary& attributes) {
  return [&attributes](const char* name, AttributePointer value) {
    return std::visit([&](auto* to) { return ReadAttribute(attributes, name, to); }, value);
  };
}

inline Problem LacksAttribute() {
  return Invalid(
      "the call lacks an attribute. Another version of jax_moe_a2a lowered it; lower it again");
}

inline Problem DecodeAttributes(const ffi::Dictionary& attributes, CallAttributes* call) {
  ffi::Span<const int64_t> devices;
  int64_t num_ranks, workspace_kind;
  const AttributeReader read = ReaderOf(attributes);
  if (!ReadAttribute(attributes, "devices", &devices) || !read("num_ranks", &num_ranks) ||
      !read("workspace_kind", &workspace_kind) || !read("num_sms", &call->num_sms) ||
      !read("timeout_ns", &call->timeout_ns) ||
      !read("first_timeout_ns", &call->first_timeout_ns) ||
      !read("half_bytes", &call->half_bytes) || !read("scopes", &call->scopes) ||
      !read("raise_failures", &call->raise_failures)) {
    return LacksAttribute();
  }
  if (num_ranks < 1 || num_ranks > kMaxRanks || devices.size() % num_ranks != 0) {
    return Invalid("num_ranks must divide the devices and be at most ", kMaxRanks, "; got ",
                   num_ranks);
  }
  call->topology.devices.assign(devices.begin(), devices.end());
  call->topology.num_ranks = static_cast<int>(num_ranks);
  call->workspace_kind = static_cast<WorkspaceKind>(workspace_kind);
  return {};
}

}  // namespace moe_a2a
