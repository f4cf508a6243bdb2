// Token formats. docs/formats.md defines values and scales; device/format.cuh computes them.
#pragma once

#include <cstdint>
#include <string_view>

#include "layout.h"
#include "lists.h"
#include "tuning.h"

namespace moe_a2a {

enum class TokenFormat : int32_t { kBlockwiseFp8 = 1, kMxFp8 = 2, kNvFp4 = 3 };
constexpr TokenFormat kNoFormat{};  // nothing is encoded

template <TokenFormat F>
struct Format;

template <>
struct Format<TokenFormat::kBlockwiseFp8> {
  static constexpr const char* kName = "BlockwiseFp8";  // in Python
  using Scale = uint32_t;                               // bits of the scale of a group
  static constexpr int kGroup = 128, kValueBits = 8;
};

template <>
struct Format<TokenFormat::kMxFp8> {
  static constexpr const char* kName = "MxFp8";
  using Scale = uint8_t;
  static constexpr int kGroup = 32, kValueBits = 8;
};

template <>
struct Format<TokenFormat::kNvFp4> {
  static constexpr const char* kName = "NvFp4";
  using Scale = uint8_t;
  static constexpr int kGroup = 16, kValueBits = 4;
};

// Kernels compare a format with all of these except the last, which remains if none is equal.
using TokenFormats =
    Constants<TokenFormat::kNvFp4, TokenFormat::kMxFp8, TokenFormat::kBlockwiseFp8>;

// Returns the format of the Python class `name`, or kNoFormat if none exists.
inline TokenFormat format_named(std::string_view name) {
  TokenFormat found = kNoFormat;
  for_each(TokenFormats{}, [&](auto format) {
    if (name == Format<format>::kName) found = format;
  });
  return found;
}

// The numbers of a format, for code that knows the format only at run time.
struct FormatNumbers {
  int group, value_bits, scale_bytes;
};
template <TokenFormat kFirst, TokenFormat... kRest>
MOE_A2A_HOST_DEVICE constexpr FormatNumbers numbers_of(TokenFormat format,
                                                       Constants<kFirst, kRest...>) {
  if constexpr (sizeof...(kRest) > 0) {
    if (format != kFirst) return numbers_of(format, Constants<kRest...>{});
  } else {
    if (format != kFirst) reject_value();
  }
  using F = Format<kFirst>;
  return {F::kGroup, F::kValueBits, sizeof(typename F::Scale)};
}

MOE_A2A_HOST_DEVICE constexpr int group_size(TokenFormat format) {
  return numbers_of(format, TokenFormats{}).group;
}
MOE_A2A_HOST_DEVICE constexpr int value_bits(TokenFormat format) {
  return numbers_of(format, TokenFormats{}).value_bits;
}
constexpr double rows_per_encoded(TokenFormat format) {
  return value_bits(format) == 8 ? Tuning::kRowsPerEncodedFp8 : Tuning::kRowsPerEncodedFp4;
}

// These functions return the bytes of values and of scales in a row of `elements` numbers.
MOE_A2A_HOST_DEVICE constexpr int64_t value_bytes(TokenFormat format, int64_t elements) {
  return elements * value_bits(format) / 8;
}
MOE_A2A_HOST_DEVICE constexpr int64_t scale_bytes(TokenFormat format, int64_t elements) {
  return elements / group_size(format) * numbers_of(format, TokenFormats{}).scale_bytes;
}
// In a slot of combine, a row's values come first, and its scales begin at scales_offset().
MOE_A2A_HOST_DEVICE constexpr int64_t scales_offset(TokenFormat format, int64_t elements) {
  return row_stride(value_bytes(format, elements));
}
MOE_A2A_HOST_DEVICE constexpr int64_t encoded_stride(TokenFormat format, int64_t elements) {
  return scales_offset(format, elements) + row_stride(scale_bytes(format, elements));
}
}  // namespace moe_a2a
