// The payload of a dispatch with a token format. Operands: leaves, choice arrays, and optionally a
// global scale per token. Results: the decoded rows of each leaf (if `decode`), values and scales
// of each leaf (unless the call only decodes), choice arrays.
#pragma once

#include <cstdint>
#include <string>

#include "calls/call.h"
#include "calls/payload.h"

namespace moe_a2a {

struct EncodedPayload : MovedPayload {
  std::string format;  // the name of the format's Python class
  int64_t num_leaves;
  bool decode, keeps_encoded, has_token_scales;
  float global_scale;  // of NvFp4, unless has_token_scales

  bool Read(const AttributeReader& read) {
    return MovedPayload::Read(read) && read("format", &format) && read("decode", &decode) &&
           read("keeps_encoded", &keeps_encoded) && read("num_leaves", &num_leaves) &&
           read("global_scale", &global_scale) && read("has_token_scales", &has_token_scales);
  }

  // The caller must have set the routing and the view.
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
      return Concat("a dispatch with a format needs results for each leaf and choice array; got ",
                    args.size(), " arrays and ", results.size(), " results for ", num_leaves,
                    " leaves and ", num_choice_arrays, " choice arrays");
    }
    if (leaves == 0) return Unsupported("a dispatch with a format needs a leaf");
    if (view.num_ranks == 1) {
      return Unsupported(
          "a dispatch with a format needs two ranks or more, because own tokens use a landing "
          "zone");
    }
    if (2 * leaves + choice_arrays + scales_travel() > kMaxArrays || results.size() > kMaxArrays) {
      return Unsupported("a dispatch with a format moves at most ", kMaxArrays,
                         " arrays, and has at most as many results: values and scales of a leaf "
                         "are two");
    }
    exchange.leaves_tail = leaves_tail;
    params.num_results = static_cast<int32_t>(results.size());
    encoding.decode = decode;
    encoding.num_leaves = static_cast<int32_t>(num_leaves);
    encoding.global_scale = global_scale;
    Mix(view.signature, encoding.format, decode, num_leaves, has_token_scales);
    const int64_t num_tokens = exchange.routing.num_tokens, capacity = exchange.routing.capacity;
    for (size_t i = 0; i < leaves; ++i) {
      const Array& in = args[i];
      MOE_A2A_TRY(CheckLead(in, "a payload array", {num_tokens}));
      const int64_t elements = NumElements(in, 1);
      if (!ToElementType(in.type, &encoding.type) || in.type != args[0].type ||
          elements % group_size(encoding.format) != 0) {
        return Unsupported(
            "leaves with a format must have one type (bfloat16, float16 or float32) and whole "
            "groups; got " +
            ToString(in));
      }
      MOE_A2A_TRY(CheckAlignment(in));
      if (decode) {
        const Array& rows = results[i];
        if (rows.type != in.type) {
          return "decoded rows must have the type of their leaf; got " + ToString(rows) + " for " +
                 ToString(in);
        }
        MOE_A2A_TRY(FirstOf({CheckAlignment(rows), CheckItems(rows, "decoded rows", {capacity},
                                                              elements * in.type.bytes)}));
      }
      const int64_t of_values = value_bytes(encoding.format, elements);
      const int64_t of_scales = scale_bytes(encoding.format, elements);
      MovedArray& values = AddArray(of_values, 0, kVectorBytes, exchange);
      MovedArray& scales = AddArray(of_scales, 0, kVectorBytes, exchange);
      context.Bind(&values.in, in);
      if (decode) context.Bind(&encoding.decoded[i], results[i]);
      if (!has_encoded()) continue;
      const size_t first = (decode ? leaves : 0) + 2 * i;
      const Array &out = results[first], &out_scales = results[first + 1];
      MOE_A2A_TRY(FirstOf({CheckItems(out, "values of rows", {capacity}, of_values),
                           CheckItems(out_scales, "scales of rows", {capacity}, of_scales),
                           decode ? CheckAlignment(out) : Problem()}));
      values.width = Width(of_values, {&out});
      scales.width = Width(of_scales, {&out_scales});
      context.Bind(&values.out, out);
      context.Bind(&scales.out, out_scales);
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
        "leaves with a format, and their decoded rows, must begin at a multiple of ", kVectorBytes,
        " bytes; ", ToString(array), " begins at a multiple of ", width,
        ". Pass a copy of the leaf if it is a slice of a larger array or comes from another "
        "framework");
  }

  bool has_encoded() const { return !decode || keeps_encoded; }
  size_t results_per_leaf() const { return decode + 2 * has_encoded(); }
  bool scales_travel() const { return has_token_scales && decode; }
};

}  // namespace moe_a2a
