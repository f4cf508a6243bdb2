// Computes a grouped product with cuBLASLt. The library's matrices are column-major, so it reads an
// array [rows, columns] as the transpose, whose first size and stride are `columns`. Therefore
// operands change places: the library's a is operand b.
#include "library/library_gemm.h"

#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>

#include "library/cublas_lt.h"
#include "runtime/cuda_error.h"

namespace moe_a2a {
namespace {

// The scratch memory has the library's workspace, and then the arrays of GroupArrays.
constexpr int64_t kWorkspaceBytes = int64_t{32} << 20, kElementBytes = 2;
constexpr int64_t kBytesOfGroup = 3 * (sizeof(void*) + sizeof(int32_t));

// The library needs arrays of pointers at multiples of 16 bytes.
int64_t StrideOf(int64_t num_groups) { return (num_groups + 3) / 4 * 4; }

Problem Check(const char* function, int status) {
  if (status == CublasLt::kOk) return {};
  return "cuBLASLt " + std::to_string(CublasLtVersion()) + ": cublasLt" + function +
         " returned status " + std::to_string(status);
}

struct Description {
  CublasLt::Object call, a, b, d;
};

Problem Describe(const CublasLt& library, const GroupedGemm& gemm, int num_sms,
                 const int32_t* dimensions, Description* made) {
  const bool is_gradient = gemm.product == GroupedProduct::kWeightGradient,
             transposes = gemm.product == GroupedProduct::kTransposed;
  MOE_A2A_TRY(
      Check("MatmulDescInit", library.init_description(&made->call, sizeof(made->call),
                                                       CublasLt::kComputeFloat, CublasLt::kFloat)));
  for (const auto& [attribute, value] :
       {std::pair<int, int32_t>{CublasLt::kPointerMode, CublasLt::kDevicePointers},
        {CublasLt::kTransposeA, transposes ? CublasLt::kTransposed : 0},
        {CublasLt::kTransposeB, is_gradient ? CublasLt::kTransposed : 0},
        {CublasLt::kSms, num_sms}}) {
    MOE_A2A_TRY(Check("MatmulDescSetAttribute",
                      library.set_description(&made->call, attribute, &value, sizeof(value))));
  }
  const int32_t *const rows = dimensions, *const k = rows + StrideOf(gemm.num_groups),
                       *const n = k + StrideOf(gemm.num_groups);
  const int type = gemm.type == ElementType::kBFloat16 ? CublasLt::kBFloat : CublasLt::kHalf;
  const auto lay_out = [&](const int32_t* first, const int32_t* second, CublasLt::Object* layout) {
    return Check(
        "GroupedMatrixLayoutInit",
        library.init_layout(layout, sizeof(*layout), type, gemm.num_groups, first, second, first));
  };
  MOE_A2A_TRY(lay_out(n, is_gradient ? rows : k, &made->a));
  MOE_A2A_TRY(lay_out(transposes ? n : k, rows, &made->b));
  return lay_out(transposes ? k : n, is_gradient ? k : rows, &made->d);
}

// Sets `algorithm` to what the library expects to be fastest for groups of `rows` rows.
Problem Find(const CublasLt& library, void* handle, const Description& product,
             const GroupedGemm& gemm, int64_t rows, CublasLt::Algorithm* algorithm) {
  int64_t first = gemm.n, second = rows, reduction = gemm.k;
  if (gemm.product == GroupedProduct::kTransposed) std::swap(first, reduction);
  if (gemm.product == GroupedProduct::kWeightGradient) std::swap(second, reduction);
  CublasLt::Object preference;
  MOE_A2A_TRY(
      Check("MatmulPreferenceInit", library.init_preference(&preference, sizeof(preference))));
  for (const auto& [attribute, value] :
       {std::pair<int, int64_t>{CublasLt::kWorkspace, kWorkspaceBytes},
        {CublasLt::kMeanRows, first},
        {CublasLt::kMeanColumns, second},
        {CublasLt::kMeanReduction, reduction}}) {
    MOE_A2A_TRY(Check("MatmulPreferenceSetAttribute",
                      library.set_preference(&preference, attribute, &value, sizeof(value))));
  }
  CublasLt::Heuristic found = {};
  int num_found = 0;
  MOE_A2A_TRY(Check("MatmulAlgoGetHeuristic",
                    library.find(handle, &product.call, &product.a, &product.b, &product.d,
                                 &product.d, &preference, 1, &found, &num_found)));
  *algorithm = found.algorithm;
  if (num_found > 0) return {};
  return "cuBLASLt " + std::to_string(library.version()) + " has no algorithm for the product";
}

struct Known {
  using Key = std::tuple<int, GroupedProduct, ElementType, int32_t, int64_t, int64_t, int64_t, int>;

  std::mutex mutex;
  std::map<int, void*> handles;
  std::map<Key, CublasLt::Algorithm> algorithms;
};

}  // namespace

int64_t LibraryScratch(int64_t num_groups) {
  return (kWorkspaceBytes + StrideOf(num_groups) * kBytesOfGroup) / int64_t{sizeof(int32_t)} + 2;
}

Problem LaunchLibraryGemm(const LibraryGemm& gemm, int num_sms, cudaStream_t stream) {
  static Known& known = *new Known;  // never destroyed: calls may run at exit
  const CublasLt* library = GetCublasLt();
  if (library == nullptr) {
    return "this process has no cuBLASLt with grouped products. Lower the program again";
  }
  const bool is_gradient = gemm.product == GroupedProduct::kWeightGradient,
             transposes = gemm.product == GroupedProduct::kTransposed;
  const auto data = [](const void* array) { return static_cast<char*>(const_cast<void*>(array)); };
  const auto rows = [&](const void* array, int64_t columns) -> GroupedArray {
    return {data(array), columns * kElementBytes, -1};
  };
  const auto matrices = [&](const void* array) -> GroupedArray {
    return {data(array), gemm.k * gemm.n * kElementBytes, gemm.num_weights, data(gemm.spare)};
  };
  const auto stride = static_cast<int32_t>(StrideOf(gemm.num_groups));
  void** const pointers = reinterpret_cast<void**>(data(gemm.counter) + kWorkspaceBytes);
  auto* const dimensions = reinterpret_cast<int32_t*>(pointers + 3 * stride);
  auto* const factors = reinterpret_cast<float*>(dimensions + 3 * stride);
  const GroupedArray a = is_gradient ? rows(gemm.b, gemm.n) : matrices(gemm.b);
  const GroupedArray b = rows(gemm.a, transposes ? gemm.n : gemm.k);
  const GroupedArray d =
      is_gradient ? matrices(gemm.d) : rows(gemm.d, transposes ? gemm.k : gemm.n);
  const auto k = static_cast<int32_t>(gemm.k), n = static_cast<int32_t>(gemm.n);
  const GroupArrays arrays = {gemm.starts, gemm.sizes, gemm.weights, gemm.num_groups, k,      n,
                              {a, b, d},   stride,     pointers,     dimensions,      factors};
  cudaError_t error = LaunchGroupArrays(arrays, num_sms, stream);
  int device = 0;
  if (error == cudaSuccess) error = cudaGetDevice(&device);
  MOE_A2A_TRY(ProblemOf(error, "launching group_arrays"));

  Description product;
  MOE_A2A_TRY(Describe(*library, gemm, num_sms, dimensions, &product));
  void* handle = nullptr;
  CublasLt::Algorithm algorithm;
  {
    const std::lock_guard<std::mutex> lock(known.mutex);
    void*& of_device = known.handles[device];
    if (of_device == nullptr) MOE_A2A_TRY(Check("Create", library->create(&of_device)));
    handle = of_device;
    const Known::Key key = {device, gemm.product, gemm.type,      gemm.num_groups,
                            gemm.k, gemm.n,       gemm.mean_rows, num_sms};
    auto found = known.algorithms.find(key);
    if (found == known.algorithms.end()) {
      MOE_A2A_TRY(Find(*library, handle, product, gemm, gemm.mean_rows, &algorithm));
      found = known.algorithms.emplace(key, algorithm).first;
    }
    algorithm = found->second;
  }
  void** const of_d = pointers + 2 * stride;
  return Check("Matmul",
               library->multiply(handle, &product.call, factors, pointers, &product.a,
                                 pointers + stride, &product.b, factors + 1, of_d, &product.d, of_d,
                                 &product.d, &algorithm, gemm.counter, kWorkspaceBytes, stream));
}

}  // namespace moe_a2a
