// Payload arrays that a dispatch moves as bytes.
#pragma once

#include <cstdint>

#include "calls/call.h"

namespace moe_a2a {

inline MovedArray& AddArray(int64_t row_bytes, int64_t choice_bytes, int32_t width,
                            DispatchParams& p) {
  MovedArray& array = p.arrays[p.num_arrays++];
  array.row_bytes = row_bytes;
  array.choice_bytes = choice_bytes;
  array.zone_offset = TakeZone(p.zone_bytes, p.routing.num_tokens, row_bytes, p.view);
  array.width = width;
  return array;
}

inline Problem AddPlain(const CallContext& context, const Array& in, const Array& out,
                        bool per_choice, DispatchParams& p) {
  const RoutingView& routing = p.routing;
  MOE_A2A_TRY(per_choice ? CheckLead(in, "a choice array", {routing.num_tokens, routing.top_k})
                         : CheckLead(in, "a payload array", {routing.num_tokens}));
  const int64_t moved_bytes = NumElements(in, per_choice ? 2 : 1) * in.type.bytes;
  MOE_A2A_TRY(CheckItems(out, "rows", {routing.capacity}, moved_bytes));
  MovedArray& array = AddArray(NumElements(in, 1) * in.type.bytes, per_choice ? moved_bytes : 0,
                               Width(moved_bytes, {&in, &out}), p);
  context.Bind(&array.in, in);
  context.Bind(&array.out, out);
  return {};
}

// Operands and results: arrays of tokens, and then `num_choice_arrays` choice arrays.
struct MovedPayload {
  int64_t num_choice_arrays;
  bool leaves_tail;

  bool Read(const AttributeReader& read) {
    return read("num_choice_arrays", &num_choice_arrays) && read("leaves_tail", &leaves_tail);
  }

  // The caller must have set the routing and the view.
  Problem Describe(const CallContext& context, ArraySlice args, ArraySlice results,
                   DispatchParams& p) const {
    if (args.size() != results.size() || num_choice_arrays < 0 ||
        num_choice_arrays > static_cast<int64_t>(results.size())) {
      return Concat(
          "a dispatch needs one result for each payload array, choice arrays included; got ",
          args.size(), " payload arrays, ", results.size(), " results and ", num_choice_arrays,
          " choice arrays");
    }
    if (results.size() > kMaxArrays) {
      return Unsupported("a dispatch moves at most ", kMaxArrays, " arrays; got ", results.size());
    }
    p.leaves_tail = leaves_tail;
    const size_t first_choice_array = results.size() - num_choice_arrays;
    for (size_t i = 0; i < results.size(); ++i) {
      MOE_A2A_TRY(AddPlain(context, args[i], results[i], i >= first_choice_array, p));
      context.BindFill(&p.fills[i], results[i]);
    }
    return {};
  }
};

}  // namespace moe_a2a
