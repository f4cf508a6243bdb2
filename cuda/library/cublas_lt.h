// The functions of cuBLASLt 13 that this package calls. GetCublasLt() looks them up in the library
// that JAX has loaded. Toolkits before CUDA 13.2 do not declare the grouped functions.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace moe_a2a {

struct CublasLt {
  // Values of the library's enumerations. The comments name the enumerations.
  static constexpr int kOk = 0;                              // cublasStatus_t
  static constexpr int kFloat = 0, kHalf = 2, kBFloat = 14;  // cudaDataType_t
  static constexpr int kComputeFloat = 68;                   // cublasComputeType_t
  static constexpr int32_t kTransposed = 1;                  // cublasOperation_t
  static constexpr int32_t kDevicePointers = 1;              // cublasLtPointerMode_t
  enum Attribute : int { kPointerMode = 2, kTransposeA = 3, kTransposeB = 4, kSms = 15 };
  enum Preference : int { kWorkspace = 1, kMeanReduction = 13, kMeanRows = 14, kMeanColumns = 15 };

  // Describes a product, a layout or a preference. The library uses at most 256 bytes.
  struct Object {
    uint64_t data[64];
  };
  struct Algorithm {
    uint64_t data[8];
  };
  struct Heuristic {
    Algorithm algorithm;
    size_t workspace_bytes;
    int status;
    float waves;
    int reserved[4];
  };

  size_t (*version)();
  int (*create)(void** handle);
  int (*init_description)(Object* made, size_t bytes, int compute, int scale);
  int (*set_description)(Object* description, int attribute, const void* value, size_t bytes);
  // Matrices are column-major. `rows`, `columns` and `strides` are int32 [groups] in device memory.
  int (*init_layout)(Object* made, size_t bytes, int type, int groups, const void* rows,
                     const void* columns, const void* strides);
  int (*init_preference)(Object* made, size_t bytes);
  int (*set_preference)(Object* preference, int attribute, const void* value, size_t bytes);
  int (*find)(void* handle, const Object* description, const Object* a, const Object* b,
              const Object* c, const Object* d, const Object* preference, int wanted,
              Heuristic* found, int* num_found);
  // `a`, `b`, `c` and `d`: arrays of pointers in device memory.
  int (*multiply)(void* handle, const Object* description, const void* alpha, const void* a,
                  const Object* a_layout, const void* b, const Object* b_layout, const void* beta,
                  const void* c, const Object* c_layout, void* d, const Object* d_layout,
                  const Algorithm* algorithm, void* workspace, size_t workspace_bytes,
                  cudaStream_t stream);
};

// Returns null if the process has no cuBLASLt 13 with grouped products.
const CublasLt* GetCublasLt();

// Returns the version as 10,000 * major + 100 * minor + patch, or 0 if GetCublasLt() returns null.
int64_t CublasLtVersion();

}  // namespace moe_a2a
