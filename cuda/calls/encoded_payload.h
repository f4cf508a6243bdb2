// The payload of a dispatch with a token format. Operands: leaves, choice arrays, and optionally
// the scale of each token. Results: values and scales of each leaf, or its decoded rows; choice
// arrays.
#pragma once

#include <cstdint>
#include <string>

#include "calls/array.h"
#include "calls/call.h"
#include "calls/payload.h"

namespace moe_a2a {

// How leaves are quantized. `format` is the name of a class in Python. The global scale of NvFp4 is
// an attribute, or an operand with one scale for each token.
struct EncodedPayload : MovedPayload {
  std::string format;
  int64_t num_leaves;
  bool decode, has_token_scales;
  float global_scale;

  template <typename Reader>
  bool Read(Reader&& read) {
    return MovedPayload::Read(read) && read("format", &format) && read("decode", &decode) &&
           read("num_leaves", &num_leaves) && read("global_scale", &global_scale) &&
           read("has_token_scales", &has_token_scales);
  }

  // Describes the arrays and their encoding. The routing and the view are set.
  template <typename Params>
  Problem Describe(const CallContext& context, ArraySlice args, ArraySlice results,
                   Params& params) const {
    DispatchParams& exchange = params.exchange;
    Encoding& encoding = params.encoding;
    RankView& view = exchange.view;
    encoding.format = format_named(format);
    if (encoding.format == kNoFormat) return "no kernel knows a format '" + format + "'";
    const size_t leaves = num_leaves, choice_arrays = num_choice_arrays;
    if (num_leaves < 0 || num_choice_arrays < 0 ||
        args.size() != leaves + choice_arrays + has_token_scales ||
        results.size() != results_per_leaf() * leaves + choice_arrays) {
      return "a dispatch with a format needs results for each leaf and choice array; got " +
             std::to_string(args.size()) + " arrays and " + std::to_string(results.size()) +
             " results for " + std::to_string(num_leaves) + " leaves and " +
             std::to_string(num_choice_arrays) + " choice arrays";
    }
    if (leaves == 0) return Unsupported("a dispatch with a format needs a leaf");
    if (view.num_ranks == 1) {
      return Unsupported(
          "a dispatch with a format needs two ranks or more, because own tokens use a landing "
          "zone");
    }
    if (2 * leaves + choice_arrays + scales_travel() > kMaxArrays) {
      return Unsupported("a dispatch with a format moves at most " + std::to_string(kMaxArrays) +
                         " arrays: values and scales of a leaf are two");
    }
    exchange.leaves_tail = leaves_tail;
    params.num_results = static_cast<int32_t>(results.size());
    encoding.decode = decode;
    encoding.num_leaves = static_cast<int32_t>(num_leaves);
    encoding.global_scale = global_scale;
    for (int64_t v : {static_cast<int64_t>(encoding.format), int64_t{decode}, num_leaves,
                      int64_t{has_token_scales}}) {
      Mix(view.signature, v);
    }
    const int64_t num_tokens = exchange.routing.num_tokens, capacity = exchange.routing.capacity;
    for (size_t i = 0; i < leaves; ++i) {
      const Array& in = args[i];
      const ArraySlice out = results.from(i * results_per_leaf());
      MOE_A2A_TRY(CheckLead(in, "a payload array", {num_tokens}));
      const int64_t elements = NumElements(in, 1);
      if (!ToElementType(in.type, &encoding.type) || in.type != args[0].type ||
          elements % group_size(encoding.format) != 0) {
        return Unsupported(
            "leaves with a format must have one type (bfloat16, float16 or float32) and whole "
            "groups; got " +
            ToString(in));
      }
      if (decode && out[0].type != in.type) {
        return "decoded rows must have the type of their leaf; got " + ToString(out[0]) + " for " +
               ToString(in);
      }
      MOE_A2A_TRY(FirstOf({CheckAlignment(in), decode ? CheckAlignment(out[0]) : Problem()}));
      const int64_t of_values = value_bytes(encoding.format, elements);
      const int64_t of_scales = scale_bytes(encoding.format, elements);
      MOE_A2A_TRY(decode ? CheckItems(out[0], "decoded rows", {capacity}, elements * in.type.bytes)
                         : FirstOf({CheckItems(out[0], "values of rows", {capacity}, of_values),
                                    CheckItems(out[1], "scales of rows", {capacity}, of_scales)}));
      const int32_t vector = kVectorBytes;
      MovedArray& values =
          AddArray(of_values, 0, decode ? vector : Width(of_values, {&out[0]}), exchange);
      MovedArray& scales =
          AddArray(of_scales, 0, decode ? vector : Width(of_scales, {&out[1]}), exchange);
      context.Bind(&values.in, in);
      context.Bind(&values.out, out[0]);
      if (decode) continue;
      context.Bind(&scales.in, in);
      context.Bind(&scales.out, out[1]);
    }
    for (size_t i = 0; i < choice_arrays; ++i) {
      const Array& out = results[results_per_leaf() * leaves + i];
      MOE_A2A_TRY(AddPlain(context, args[leaves + i], out, /*per_choice=*/true, exchange));
    }
    if (has_token_scales) {
      const Array& token_scales = args[leaves + choice_arrays];
      MOE_A2A_TRY(CheckShape(token_scales, "token scales", kFloat32, {num_tokens}));
      context.Bind(&encoding.token_scales, token_scales);
      if (scales_travel()) {
        context.Bind(&AddArray(sizeof(float), 0, sizeof(float), exchange).in, token_scales);
      }
    }
    for (size_t i = 0; i < results.size(); ++i) context.BindFill(&exchange.fills[i], results[i]);
    return {};
  }

 private:
  static Problem CheckAlignment(const Array& array) {
    const int32_t width = Width(kVectorBytes, {&array});
    if (width == kVectorBytes) return {};
    return Unsupported(
        "leaves with a format, and their decoded rows, must begin at a multiple of " +
        std::to_string(kVectorBytes) + " bytes; " + ToString(array) + " begins at a multiple of " +
        std::to_string(width) +
        ". Pass a copy of the leaf if it is a slice of a larger array or comes from another "
        "framework");
  }

  size_t results_per_leaf() const { return decode ? 1 : 2; }
  bool scales_travel() const { return has_token_scales && decode; }
};

}  // namespace moe_a2a
