// The functions of cuBLASLt that this package calls, found at run time in the library that JAX has
// loaded. The declarations are the package's own, because toolkits before CUDA 13.2 lack the
// grouped ones. They describe major version 13.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace moe_a2a {

struct CublasLt {
  // Values of the library's enumerations.
  static constexpr int kOk = 0;                              // cublasStatus_t
  static constexpr int kFloat = 0, kHalf = 2, kBFloat = 14;  // cudaDataType_t
  static constexpr int kComputeFloat = 68;                   // cublasComputeType_t
  static constexpr int32_t kTransposed = 1;                  // cublasOperation_t
  static constexpr int32_t kDevicePointers = 1;              // cublasLtPointerMode_t
  enum Description : int { kPointerMode = 2, kTransposeA = 3, kTransposeB = 4, kSms = 15 };
  enum Preference : int { kWorkspace = 1, kMeanReduction = 13, kMeanRows = 14, kMeanColumns = 15 };

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
  // Descriptors are pointers. Matrices are in the order of columns.
  using Handle = void*;

  size_t (*version)();
  int (*create)(Handle* handle);
  int (*create_description)(Handle* description, int compute, int scale);
  int (*set_description)(Handle description, int attribute, const void* value, size_t bytes);
  int (*destroy_description)(Handle description);
  // `rows`, `columns` and `strides` are int32 [groups] in device memory.
  int (*create_layout)(Handle* layout, int type, int groups, const void* rows, const void* columns,
                       const void* strides);
  int (*destroy_layout)(Handle layout);
  int (*create_preference)(Handle* preference);
  int (*set_preference)(Handle preference, int attribute, const void* value, size_t bytes);
  int (*destroy_preference)(Handle preference);
  int (*find)(Handle handle, Handle description, Handle a, Handle b, Handle c, Handle d,
              Handle preference, int wanted, Heuristic* found, int* num_found);
  // `a`, `b`, `c` and `d` are arrays of pointers in device memory.
  int (*multiply)(Handle handle, Handle description, const void* alpha, const void* a,
                  Handle a_layout, const void* b, Handle b_layout, const void* beta, const void* c,
                  Handle c_layout, void* d, Handle d_layout, const Algorithm* algorithm,
                  void* workspace, size_t workspace_bytes, cudaStream_t stream);
};

// Returns the functions, or null if the process has no cuBLASLt 13 with grouped products.
const CublasLt* GetCublasLt();

// Returns 10,000 times the major, 100 times the minor and the patch version, or 0 without
// functions.
int64_t CublasLtVersion();

}  // namespace moe_a2a
