// Describes arrays for the hardware that copies boxes (TMA).
#pragma once

#include <cuda.h>

#include <cstdint>

#include "runtime/problem.h"

namespace moe_a2a::gemm {

struct TensorMap {
  int element_bytes;  // 1, 2 or 4
  const void* data;
  int64_t columns;
  // Ragged: rows of groups (gemm/form.h). Other arrays are [planes, rows, columns].
  bool is_ragged;
  int64_t rows, planes;
  int box_columns, box_rows;
  int64_t row_elements = 0;  // row stride; 0: the number of columns
};

// Boxes with rows of 128 bytes are swizzled.
Problem EncodeTensorMap(const TensorMap& map, CUtensorMap* encoded);

}  // namespace moe_a2a::gemm
