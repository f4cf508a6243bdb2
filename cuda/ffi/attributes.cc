#include "ffi/attributes.h"

#include <string>

#include "ffi/errors.h"
#include "runtime/devices.h"

namespace moe_a2a {

ffi::Error LacksAttribute() {
  return Invalid(
      "the call lacks an attribute. Another version of jax_moe_a2a lowered it; lower it again");
}

ffi::ErrorOr<CallAttributes> DecodeAttributes(const ffi::Dictionary& attributes) {
  CallAttributes call;
  ffi::Span<const int64_t> devices;
  int64_t num_ranks, workspace_kind;
  const AttributeReader read(attributes);
  if (!read("devices", &devices) || !read("num_ranks", &num_ranks) ||
      !read("workspace_kind", &workspace_kind) || !read("num_sms", &call.num_sms) ||
      !read("timeout_ns", &call.timeout_ns) || !read("first_timeout_ns", &call.first_timeout_ns) ||
      !read("half_bytes", &call.half_bytes) || !read("scopes", &call.scopes) ||
      !read("raise_failures", &call.raise_failures)) {
    return ffi::Unexpected(LacksAttribute());
  }
  if (num_ranks < 1 || num_ranks > kMaxRanks || devices.size() % num_ranks != 0) {
    return ffi::Unexpected(Invalid("num_ranks must divide the devices and be at most " +
                                   std::to_string(kMaxRanks) + "; got " +
                                   std::to_string(num_ranks)));
  }
  call.topology.devices.assign(devices.begin(), devices.end());
  call.topology.num_ranks = static_cast<int>(num_ranks);
  call.workspace_kind = static_cast<WorkspaceKind>(workspace_kind);
  return call;
}

ffi::Error SetDevice(int32_t ordinal, Topology* topology) {
  if (!topology->devices.empty()) return ffi::Error::Success();
  int64_t id;
  if (!FindOwnDevice(ordinal, &id)) {
    return Invalid("the program runs on GPU " + std::to_string(ordinal) +
                   ", which jax_moe_a2a does not know in this process; read the "
                   "path of a jax_moe_a2a.Group over this GPU before the program");
  }
  topology->devices.assign(topology->num_ranks, id);
  return ffi::Error::Success();
}

}  // namespace moe_a2a
