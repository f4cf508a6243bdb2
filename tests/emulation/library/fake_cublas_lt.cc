// Computes grouped products of bfloat16. Accepts only the arguments that cuBLASLt documents for
// grouped products.
#include "fake_cublas_lt.h"

#include <cstdint>
#include <cstring>

#include "library/cublas_lt.h"

extern "C" {
FakeCounts fake_counts = {-1, 0};
}

namespace {

using moe_a2a::CublasLt;

constexpr int kInvalid = 7, kUnsupported = 15;
constexpr uint64_t kAlgorithm = 0x1234;

// Stored in the caller's opaque objects.
struct Object {
  int64_t values[16];
  int type, groups;
  const int32_t *rows, *columns, *strides;
};
static_assert(sizeof(Object) <= sizeof(CublasLt::Object));

bool fails() {
  return fake_counts.calls_until_failure >= 0 && fake_counts.calls_until_failure-- == 0;
}

const Object* object(const void* made) { return static_cast<const Object*>(made); }

int init(void* made, size_t bytes, const Object& value = {}) {
  if (fails() || bytes != sizeof(CublasLt::Object)) return kInvalid;
  std::memset(made, 0xFF, bytes);
  std::memcpy(made, &value, sizeof(value));
  return 0;
}

int set(void* made, int attribute, const void* value, size_t bytes, size_t expected) {
  if (fails() || bytes != expected) return kInvalid;
  int64_t number = 0;
  std::memcpy(&number, value, bytes);
  static_cast<Object*>(made)->values[attribute] = number;
  return 0;
}

float number(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

uint16_t rounded(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

bool is_aligned(const void* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; }

}  // namespace

extern "C" {

size_t cublasLtGetVersion() { return 130405; }

int cublasLtCreate(void** handle) {
  if (fails()) return kInvalid;
  static int one;
  *handle = &one;
  return 0;
}

int cublasLtMatmulDescInit_internal(void* made, size_t bytes, int compute, int scale) {
  if (compute != CublasLt::kComputeFloat || scale != CublasLt::kFloat) return kUnsupported;
  return init(made, bytes);
}
int cublasLtMatmulDescSetAttribute(void* made, int attribute, const void* value, size_t bytes) {
  return set(made, attribute, value, bytes, sizeof(int32_t));
}

int cublasLtGroupedMatrixLayoutInit_internal(void* made, size_t bytes, int type, int groups,
                                             const void* rows, const void* columns,
                                             const void* strides) {
  Object layout = {};
  layout.type = type, layout.groups = groups;
  layout.rows = static_cast<const int32_t*>(rows);
  layout.columns = static_cast<const int32_t*>(columns);
  layout.strides = static_cast<const int32_t*>(strides);
  return init(made, bytes, layout);
}

int cublasLtMatmulPreferenceInit_internal(void* made, size_t bytes) { return init(made, bytes); }
int cublasLtMatmulPreferenceSetAttribute(void* made, int attribute, const void* value,
                                         size_t bytes) {
  return set(made, attribute, value, bytes, sizeof(int64_t));
}

int cublasLtMatmulAlgoGetHeuristic(void*, const void* call, const void* a, const void* b,
                                   const void* c, const void* d, const void* preference, int wanted,
                                   CublasLt::Heuristic* found, int* num_found) {
  if (fails()) return kInvalid;
  ++fake_counts.searches;
  const auto& expected = object(preference)->values;
  if (object(call)->values[CublasLt::kPointerMode] != CublasLt::kDevicePointers || c != d ||
      wanted != 1 || object(a)->type != object(b)->type || object(a)->type != object(d)->type) {
    return kUnsupported;
  }
  *num_found = expected[CublasLt::kMeanRows] > 0 && expected[CublasLt::kMeanColumns] > 0 &&
               expected[CublasLt::kMeanReduction] > 0;
  found->algorithm.data[0] = kAlgorithm;
  return 0;
}

int cublasLtMatmul(void*, const void* call, const void* alpha, const void* a, const void* a_layout,
                   const void* b, const void* b_layout, const void* beta, const void* c,
                   const void* c_layout, void* d, const void* d_layout,
                   const CublasLt::Algorithm* algorithm, void* workspace, size_t bytes,
                   cudaStream_t) {
  if (fails() || algorithm->data[0] != kAlgorithm || c != d || c_layout != d_layout ||
      *static_cast<const float*>(alpha) != 1 || *static_cast<const float*>(beta) != 0 ||
      !is_aligned(a) || !is_aligned(b) || !is_aligned(d) || object(a_layout)->type != 14) {
    return kInvalid;
  }
  std::memset(workspace, 0xFF, bytes);
  const auto& attributes = object(call)->values;
  const bool a_is_turned = attributes[CublasLt::kTransposeA] != 0,
             b_is_turned = attributes[CublasLt::kTransposeB] != 0;
  for (int g = 0; g < object(d_layout)->groups; ++g) {
    const auto at = [g](const void* pointers, const void* layout, bool is_turned, int row,
                        int column) {
      const auto* matrix = static_cast<const uint16_t* const*>(pointers)[g];
      const int first = is_turned ? column : row, second = is_turned ? row : column;
      return number(matrix[first + int64_t{second} * object(layout)->strides[g]]);
    };
    const int rows = object(d_layout)->rows[g], columns = object(d_layout)->columns[g];
    const int reduction = a_is_turned ? object(a_layout)->rows[g] : object(a_layout)->columns[g];
    const int of_b = b_is_turned ? object(b_layout)->columns[g] : object(b_layout)->rows[g];
    if (reduction != of_b) return kInvalid;
    auto* const result = static_cast<uint16_t* const*>(d)[g];
    for (int i = 0; i < rows; ++i) {
      for (int j = 0; j < columns; ++j) {
        float sum = 0;
        for (int k = 0; k < reduction; ++k) {
          sum += at(a, a_layout, a_is_turned, i, k) * at(b, b_layout, b_is_turned, k, j);
        }
        result[i + int64_t{j} * object(d_layout)->strides[g]] = rounded(sum);
      }
    }
  }
  return 0;
}
}
