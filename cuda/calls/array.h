// The operands and results of a call, and checks of their shapes. The checks are necessary because
// an exported program can pass any arrays, and kernels index an array by sizes of other arrays.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <initializer_list>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "layout.h"
#include "params.h"
#include "runtime/problem.h"
#include "runtime/slice.h"

namespace moe_a2a {

struct DataType {
  std::string name;  // XLA's name of the type
  int64_t bytes;     // of an element; 0 if several elements share a byte
  uint8_t nan;       // NaN is this byte repeated; 0 if the type has no NaN

  bool operator==(const DataType& other) const { return name == other.name; }
  bool operator!=(const DataType& other) const { return name != other.name; }
};

inline const DataType kBool = {"PRED", 1, 0};
inline const DataType kInt32 = {"S32", 4, 0};
inline const DataType kFloat32 = {"F32", 4, 0xFF};
inline const DataType kFloat16 = {"F16", 2, 0xFF};
inline const DataType kBFloat16 = {"BF16", 2, 0xFF};
inline const DataType kFp8 = {"F8E4M3FN", 1, 0xFF};

// The first number in XLA's name of a type is the number of bits; PRED has 8. Names of
// floating-point types begin with F, BF or C. In FNUZ types, only 0x80 is NaN.
inline DataType TypeNamed(std::string name) {
  const size_t digits = name.find_first_of("0123456789");
  const int64_t bits = digits == std::string::npos ? 8 : std::atoi(&name[digits]);
  const bool is_float = name.find_first_of("FBC") == 0;
  const bool has_one_nan = name.size() > 4 && name.compare(name.size() - 4, 4, "FNUZ") == 0;
  const uint8_t nan = !is_float ? 0 : has_one_nan ? 0x80 : 0xFF;
  return {std::move(name), bits / 8, nan};
}

// Returns false if the kernels cannot sum this type.
inline bool ToElementType(const DataType& type, ElementType* element) {
  const bool is_bfloat16 = type == kBFloat16, is_float16 = type == kFloat16;
  *element = is_bfloat16  ? ElementType::kBFloat16
             : is_float16 ? ElementType::kFloat16
                          : ElementType::kFloat32;
  return is_bfloat16 || is_float16 || type == kFloat32;
}

struct Array {
  DataType type;
  Slice<const int64_t> dimensions;
  int64_t bytes;
  void* data = nullptr;  // on the device's first rank; null during lowering
  // The bitwise or of the array's addresses on all ranks of the device. It tells their alignment,
  // so it is 0 if they are assumed to be aligned.
  uintptr_t address_bits = 0;
  size_t index = 0;  // in the list of the call's operands and then its results
};
using Arrays = std::vector<Array>;

using ArraySlice = Slice<const Array>;

inline int64_t NumElements(const Array& array, size_t first_axis) {
  int64_t elements = 1;
  for (size_t i = first_axis; i < array.dimensions.size(); ++i) elements *= array.dimensions[i];
  return elements;
}

// Returns how many bytes the kernels can load or store at once in all rows of these arrays.
inline int32_t Width(int64_t row_bytes, std::initializer_list<const Array*> arrays) {
  uintptr_t bits = static_cast<uintptr_t>(row_bytes);
  for (const Array* array : arrays) bits |= array->address_bits;
  return bits % 16 == 0 ? 16 : bits % 4 == 0 ? 4 : bits % 2 == 0 ? 2 : 1;
}

using Axes = std::initializer_list<int64_t>;

template <typename Sizes>
std::string ToString(const DataType& type, const Sizes& axes) {
  std::string text = type.name + "[";
  const char* separator = "";
  for (int64_t axis : axes) {
    text += Concat(separator, axis);
    separator = ",";
  }
  return text + "]";
}

inline std::string ToString(const Array& array) { return ToString(array.type, array.dimensions); }

inline Problem CheckShape(const Array& array, const char* name, const DataType& type, Axes axes) {
  if (array.type == type &&
      std::equal(axes.begin(), axes.end(), array.dimensions.begin(), array.dimensions.end())) {
    return {};
  }
  return std::string(name) + " must be " + ToString(type, axes) + "; got " + ToString(array);
}

// Checks that `axes` are an array's leading axes, and that an element has whole bytes.
inline Problem CheckLead(const Array& array, const char* name, Axes axes) {
  if (array.type.bytes == 0) {
    return Unsupported(std::string(name) + " must have elements of whole bytes; got " +
                       ToString(array));
  }
  if (array.dimensions.size() >= axes.size() &&
      std::equal(axes.begin(), axes.end(), array.dimensions.begin())) {
    return {};
  }
  return std::string(name) + " must have the leading axes " + ToString(array.type, axes) +
         "; got " + ToString(array);
}

// Checks that `axes` are an array's leading axes, and that the other axes have `item_bytes` bytes.
inline Problem CheckItems(const Array& array, const char* name, Axes axes, int64_t item_bytes) {
  MOE_A2A_TRY(CheckLead(array, name, axes));
  const int64_t items = std::accumulate(axes.begin(), axes.end(), int64_t{1}, std::multiplies<>());
  if (array.bytes == items * item_bytes) return {};
  return Concat(name, " must have ", item_bytes, " bytes after the axes ",
                ToString(array.type, axes), "; got ", ToString(array));
}

inline Problem FirstOf(std::initializer_list<Problem> problems) {
  for (const Problem& problem : problems) {
    if (!problem.empty()) return problem;
  }
  return {};
}

}  // namespace moe_a2a
