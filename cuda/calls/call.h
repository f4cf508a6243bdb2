// Calls of exchanges. Each call is a struct that is derived from ExchangeCall. Its members are the
// attributes, in the order in which Read() names them. It has
//
//   kTarget                        the target of its custom calls
//   Read(read)                     calls read(name, &member) for each attribute; returns false if
//                                  one is missing
//   Describe(context, args, results, &params)
//                                  returns a problem, or sets all parameters; `params` are zeros
//                                  before. The problem is Unsupported() if it is a limit of the
//                                  kernels. Otherwise the arrays do not fit each other or the
//                                  attributes.
//   ZoneBytes(params)              returns the bytes of one source's landing zone
//
// Describe() runs when a program is lowered (calls/why_not.h), and once for each call when the
// program runs. It lists the addresses among the parameters (CallContext::Bind), which a handler
// replaces at each execution. One Describe() serves all ranks that share a GPU.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "calls/array.h"
#include "kernels/grid.h"
#include "kernels/launch.h"
#include "params.h"
#include "runtime/problem.h"

namespace moe_a2a {

struct Binding {
  const void* member;  // of the parameters, with the address of an array
  size_t array;        // Array::index
};

// The call as its first rank on the device sees it.
struct CallContext {
  RankView view;      // its signature covers all that does not depend on the call's arrays
  bool is_colocated;  // true: all ranks share the device and the launch
  int64_t num_sms;    // blocks that a launch may have for each rank
  std::vector<Binding>* bindings = nullptr;  // the list of Bind(), or null

  // Sets a member of the parameters to the address of an array, and lists the member.
  template <typename T>
  void Bind(T** member, const Array& array) const {
    *member = static_cast<T*>(array.data);
    if (bindings != nullptr) bindings->push_back({member, array.index});
  }

  void BindFill(FailureFill* fill, const Array& result) const {
    fill->bytes = result.bytes;
    fill->byte = result.type.nan;
    Bind(&fill->data, result);
  }
};

// Copies parameters of Describe(), with the address address_of(i) for the array with index i.
template <typename Params, typename AddressOf>
void CopyParams(const Params& from, const std::vector<Binding>& bindings,
                const AddressOf& address_of, Params* to) {
  std::memcpy(static_cast<void*>(to), &from, sizeof(Params));
  for (const Binding& binding : bindings) {
    const auto offset =
        static_cast<const char*>(binding.member) - reinterpret_cast<const char*>(&from);
    const void* const address = address_of(binding.array);
    std::memcpy(reinterpret_cast<char*>(to) + offset, &address, sizeof(address));
  }
}

// `kOperation`: the name in error messages. `kHasHalves`: the call also has a start and a done.
template <typename KernelParams, Operation kName, bool kIsSplittable = false>
struct ExchangeCall {
  using Params = KernelParams;
  static constexpr Operation kOperation = kName;
  static constexpr bool kHasHalves = kIsSplittable;

  static int64_t ZoneBytes(const Params& p) { return exchange_of(p).zone_bytes; }
};

template <typename Call, typename Reader>
Problem ReadAttributes(const Reader& read, Call* call) {
  const char* last = "";
  const auto read_next = [&](const char* name, auto* value) {
    last = name;
    return read(name, value);
  };
  if (call->Read(read_next)) return {};
  return "the attribute " + std::string(last) + " is missing or has another type";
}

// Mixes a value into a hash (the finalizer of splitmix64, by Steele, Lea and Flood).
inline void Mix(uint64_t& hash, uint64_t value) {
  hash += value + 0x9E3779B97F4A7C15;
  hash = (hash ^ (hash >> 30)) * 0xBF58476D1CE4E5B9;
  hash = (hash ^ (hash >> 27)) * 0x94D049BB133111EB;
  hash ^= hash >> 31;
}

// Returns the bytes of a ring half: the zones of all sources. A single rank uses no zone.
template <typename Call>
int64_t HalfBytes(const typename Call::Params& params) {
  const int64_t num_ranks = view_of(params).num_ranks;
  return num_ranks > 1 ? num_ranks * Call::ZoneBytes(params) : 0;
}

// Adds an array to a zone, and its row size to the signature. Returns the array's offset.
inline int64_t TakeZone(int64_t& zone_bytes, int64_t num_slots, int64_t row_bytes, RankView& view) {
  Mix(view.signature, row_bytes);
  const int64_t offset = zone_bytes;
  zone_bytes += array_bytes(num_slots, row_bytes);
  return offset;
}

}  // namespace moe_a2a
