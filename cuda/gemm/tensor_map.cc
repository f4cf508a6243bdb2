#include "gemm/tensor_map.h"

#include <string>

#include "gemm/form.h"
#include "runtime/driver.h"

namespace moe_a2a::gemm {

Problem EncodeTensorMap(const TensorMap& map, CUtensorMap* encoded) {
  static const auto encode =
      reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(FindInDriver("cuTensorMapEncodeTiled"));
  if (encode == nullptr) return "the CUDA driver is too old: it has no cuTensorMapEncodeTiled";
  const uint64_t row_bytes =
      (map.row_elements > 0 ? map.row_elements : map.columns) * map.element_bytes;
  cuuint64_t sizes[] = {uint64_t(map.columns), uint64_t(map.rows), uint64_t(map.planes), 1};
  cuuint64_t strides[] = {row_bytes, row_bytes * map.rows, row_bytes * map.rows};
  if (map.is_ragged) {
    sizes[1] = kRaggedRows;
    sizes[2] = sizes[3] = kRaggedEnds;
    strides[1] = row_bytes;
    strides[2] = kRaggedWrap - row_bytes;
  }
  const cuuint32_t box[] = {cuuint32_t(map.box_columns), cuuint32_t(map.box_rows), 1, 1};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  // Only the type's size matters, because elements outside of the array are zero bytes.
  const CUtensorMapDataType type = map.element_bytes == 1   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                   : map.element_bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                                                            : CU_TENSOR_MAP_DATA_TYPE_UINT32;
  constexpr int kSwizzledBytes = 128;
  const bool is_swizzled = map.box_columns * map.element_bytes == kSwizzledBytes;
  const CUresult result =
      encode(encoded, type, 4, const_cast<void*>(map.data), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE,
             is_swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return "";
  return "cuTensorMapEncodeTiled: error " + std::to_string(result);
}

}  // namespace moe_a2a::gemm
