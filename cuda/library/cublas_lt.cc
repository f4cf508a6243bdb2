#include "library/cublas_lt.h"

#include <dlfcn.h>

#include <atomic>
#include <memory>
#include <type_traits>

namespace moe_a2a {
namespace {

constexpr const char* kName = "libcublasLt.so.13";

const CublasLt* Load() {
  // JAX loads the library by its path, and dlopen() then finds the loaded library by its name.
  void* library = dlopen(kName, RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) library = dlopen(kName, RTLD_LAZY);
  if (library == nullptr) return nullptr;
  auto found = std::make_unique<CublasLt>();
  bool has_all = true;
  const auto find = [&](const char* name, auto& function) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    has_all = has_all && function != nullptr;
  };
  find("cublasLtGetVersion", found->version);
  find("cublasLtCreate", found->create);
  find("cublasLtMatmulDescInit_internal", found->init_description);
  find("cublasLtMatmulDescSetAttribute", found->set_description);
  find("cublasLtGroupedMatrixLayoutInit_internal", found->init_layout);
  find("cublasLtMatmulPreferenceInit_internal", found->init_preference);
  find("cublasLtMatmulPreferenceSetAttribute", found->set_preference);
  find("cublasLtMatmulAlgoGetHeuristic", found->find);
  find("cublasLtMatmul", found->multiply);
  return has_all ? found.release() : nullptr;
}

}  // namespace

const CublasLt* GetCublasLt() {
  static std::atomic<const CublasLt*> functions{nullptr};
  // Look for the library again if earlier calls found none, because JAX may load it later.
  if (functions == nullptr) functions = Load();
  return functions;
}

int64_t CublasLtVersion() {
  const CublasLt* library = GetCublasLt();
  return library == nullptr ? 0 : static_cast<int64_t>(library->version());
}

}  // namespace moe_a2a
