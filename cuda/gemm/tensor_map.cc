#include "gemm/tensor_map.h"

#include "gemm/form.h"
#include "runtime/driver.h"

namespace moe_a2a::gemm {

Problem EncodeTensorMap(const TensorMap& map, CUtensorMap* encoded) {
  const Driver* driver = GetDriver();
  if (driver == nullptr) return "the CUDA driver is too old";
  const uint64_t row_bytes = map.columns * 2;
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
  const CUresult result = driver->encode_tensor_map(
      encoded,
      map.type == ElementType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                         : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
      4, const_cast<void*>(map.data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      map.box_columns == kBoxElements ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return "";
  const char* why = nullptr;
  driver->error_string(result, &why);
  return std::string("cuTensorMapEncodeTiled: ") + (why == nullptr ? "unknown error" : why);
}

}  // namespace moe_a2a::gemm
