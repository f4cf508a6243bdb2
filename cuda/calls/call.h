// Calls of exchanges. A call is a struct that is derived from ExchangeCall. The members of the
// struct are the call's attributes. The struct also has:
//
//   kTarget       the target of the call's XLA custom calls
//   Read(read)    calls read(name, &member) for each attribute; returns false if one is missing
//   Describe(context, args, results, &params)
//                 sets all parameters, which are zeros before. Returns Unsupported() if the call
//                 exceeds a limit of the kernels. Returns another problem if the arrays do not fit
//                 each other or the attributes.
//
// Describe() runs when a program is lowered (calls/why_not.h), and once for each call when the
// program runs. Describe() binds each address (CallContext::Bind()), because handlers replace
// addresses at each execution. For ranks that share a GPU, Describe() runs once.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <variant>
#include <vector>

#include "calls/array.h"
#include "kernels/grid.h"
#include "kernels/launch.h"
#include "params.h"
#include "runtime/problem.h"

namespace moe_a2a {

using AttributePointer = std::variant<int64_t*, bool*, float*, std::string*>;
// Stores the attribute `name` in `value`. Returns false if it is missing or has another type.
using AttributeReader = std::function<bool(const char* name, AttributePointer value)>;

struct Binding {
  const void* member;  // a pointer among the parameters
  size_t array;        // Array::index
};

// The device of a call. If ranks share the device, `view` is the first rank's.
struct CallContext {
  RankView view;                             // its signature does not cover the call's arrays yet
  bool is_colocated;                         // true: all ranks share the device and the launch
  int64_t num_sms;                           // limits the blocks of each rank
  std::vector<Binding>* bindings = nullptr;  // Bind() appends to this list unless it is null

  // Sets a member of the parameters to the address of `array`, and appends it to `bindings`.
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

// Copies the parameters. Each bound member of the copy becomes address_of(index of its array).
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

template <typename KernelParams, Operation kName, bool kIsSplittable = false>
struct ExchangeCall {
  using Params = KernelParams;
  static constexpr Operation kOperation = kName;     // in error messages
  static constexpr bool kHasHalves = kIsSplittable;  // the call can be split into start and done

  static int64_t ZoneBytes(const Params& p) { return exchange_of(p).zone_bytes; }
};

template <typename Call>
Problem ReadAttributes(const AttributeReader& read, Call* call) {
  const char* last = "";
  const auto read_next = [&](const char* name, AttributePointer value) {
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
template <typename... Values>
void Mix(uint64_t& hash, Values... values) {
  (Mix(hash, static_cast<uint64_t>(values)), ...);
}

// Returns the bytes of all sources' landing zones, or 0 for a single rank, which needs no zone.
template <typename Call>
int64_t HalfBytes(const typename Call::Params& params) {
  const int64_t num_ranks = view_of(params).num_ranks;
  return num_ranks > 1 ? num_ranks * Call::ZoneBytes(params) : 0;
}

// Appends an array to a zone, and its row size to the signature. Returns the array's offset.
inline int64_t TakeZone(int64_t& zone_bytes, int64_t num_slots, int64_t row_bytes, RankView& view) {
  Mix(view.signature, row_bytes);
  const int64_t offset = zone_bytes;
  zone_bytes += array_bytes(num_slots, row_bytes);
  return offset;
}

}  // namespace moe_a2a
