// The options of every dispatch, and payload arrays that a dispatch moves as bytes.
#pragma once

#include <cstdint>

#include "calls/array.h"
#include "calls/call.h"

namespace moe_a2a {

struct DispatchOptions {
  int64_t num_choice_arrays;
  bool leaves_tail;

  template <typename Reader>
  bool Read(Reader&& read) {
    return read("num_choice_arrays", &num_choice_arrays) && read("leaves_tail", &leaves_tail);
  }

  void Describe(DispatchParams& p) const { p.leaves_tail = leaves_tail; }
};

// Describes one payload array for each result. The last `num_choice_arrays` arrays have one entry
// per choice.
inline Problem DescribePayload(ArraySlice args, ArraySlice results, int64_t num_choice_arrays,
                               DispatchParams& p) {
  if (args.size() != results.size() || num_choice_arrays < 0 ||
      num_choice_arrays > static_cast<int64_t>(results.size())) {
    return "a dispatch needs one result for each payload array, choice arrays included; got " +
           std::to_string(args.size()) + " payload arrays, " + std::to_string(results.size()) +
           " results and " + std::to_string(num_choice_arrays) + " choice arrays";
  }
  if (results.size() > kMaxArrays) {
    return Unsupported("a dispatch moves at most " + std::to_string(kMaxArrays) + " arrays; got " +
                       std::to_string(results.size()));
  }
  const RoutingView& routing = p.routing;
  p.num_arrays = static_cast<int32_t>(results.size());
  for (int i = 0; i < p.num_arrays; ++i) {
    const Array &in = args[i], &out = results[i];
    const bool per_choice = i >= p.num_arrays - num_choice_arrays;
    MOE_A2A_TRY(per_choice ? CheckLead(in, "a choice array", {routing.num_tokens, routing.top_k})
                           : CheckLead(in, "a payload array", {routing.num_tokens}));
    MovedArray& array = p.arrays[i];
    array.row_bytes = NumElements(in, 1) * in.type.bytes;
    array.choice_bytes = per_choice ? NumElements(in, 2) * in.type.bytes : 0;
    const int64_t moved_bytes = per_choice ? array.choice_bytes : array.row_bytes;
    MOE_A2A_TRY(CheckItems(out, "rows", {routing.capacity}, moved_bytes));
    array.width = Width(moved_bytes, {&in, &out});
    array.zone_offset = TakeZone(p.zone_bytes, routing.num_tokens, array.row_bytes, p.view);
    p.fills[i] = FillOf(out);
  }
  return {};
}

inline void PointPayload(Addresses args, Addresses results, DispatchParams& p) {
  for (int i = 0; i < p.num_arrays; ++i) {
    p.arrays[i].in = args[i];
    p.arrays[i].out = results[i];
    p.fills[i].data = results[i];
  }
}

}  // namespace moe_a2a
