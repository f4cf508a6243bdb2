#include "gemm/grouped_gemm.h"

#include <algorithm>

#include "device/ptx.cuh"
#include "gemm/launch.cuh"

namespace moe_a2a {
namespace {

using Elements = Types<__nv_bfloat16, __half>;

using gemm::Epilogue;

// Calls body(product, epilogue, Type<element>, Type<form>) for every kernel, to load it or to
// launch it.
template <typename Body>
void each_kernel(Body&& body) {
  const auto of = [&](GroupedProduct product, auto epilogues, auto form_of) {
    for_each(Elements{}, [&](auto element) {
      for_each(epilogues, [&](auto epilogue) {
        body(product, decltype(epilogue)::value, element, form_of(epilogue));
      });
    });
  };
  constexpr Constants<Epilogue::kStore> kPlain;
  constexpr Constants<Epilogue::kStore, Epilogue::kActivate, Epilogue::kActivateGated> kForward;
  constexpr Constants<Epilogue::kStore, Epilogue::kDerive, Epilogue::kDeriveGated> kTransposed;
  of(GroupedProduct::kForward, kForward,
     [](auto e) { return Type<gemm::Forward<decltype(e)::value>>{}; });
  of(GroupedProduct::kForwardFew, kForward,
     [](auto e) { return Type<gemm::ForwardFew<decltype(e)::value>>{}; });
  of(GroupedProduct::kTransposed, kTransposed,
     [](auto e) { return Type<gemm::Transposed<decltype(e)::value>>{}; });
  of(GroupedProduct::kWeightGradient, kPlain,
     [](auto e) { return Type<gemm::WeightGradient<decltype(e)::value>>{}; });
  // In slices of columns.
  of(GroupedProduct::kForward, kPlain,
     [](auto e) { return Type<gemm::Forward<decltype(e)::value, true>>{}; });
  of(GroupedProduct::kTransposed, kPlain,
     [](auto e) { return Type<gemm::Transposed<decltype(e)::value, true>>{}; });
}

// How many clusters a launch of a product in slices has.
int num_clusters(int num_sms) { return std::max(1, num_sms / Tuning::kForward.blocks); }
static_assert(Tuning::kForward.blocks == Tuning::kTransposed.blocks &&
              Tuning::kForward.m == Tuning::kTransposed.m &&
              Tuning::kForward.n == Tuning::kTransposed.n);

// One thread.
__global__ void wait_for_start(const uint32_t* next_tile, uint32_t clusters, int64_t timeout_ns) {
  const uint64_t start = global_time_ns();
  while (load_acquire_gpu(next_tile) < clusters) {
    if (static_cast<int64_t>(global_time_ns() - start) > timeout_ns) return;
    __nanosleep(200);
  }
}

Epilogue EpilogueOf(const GroupedGemm& gemm) {
  if (gemm.activated == nullptr) return Epilogue::kStore;
  const bool is_gated = gemm.activated->is_gated;
  if (gemm.product == GroupedProduct::kTransposed) {
    return is_gated ? Epilogue::kDeriveGated : Epilogue::kDerive;
  }
  return is_gated ? Epilogue::kActivateGated : Epilogue::kActivate;
}

}  // namespace

cudaError_t LoadGroupedGemm() {
  cudaError_t error = cudaSuccess;
  each_kernel([&](GroupedProduct, Epilogue, auto element, auto form) {
    if (error != cudaSuccess) return;
    error = gemm::Load<typename decltype(element)::type, typename decltype(form)::type>();
  });
  // Loading a kernel while others wait for it could wait for them.
  cudaFuncAttributes attributes;
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, wait_for_start);
  return error;
}

Problem LaunchGroupedGemm(const GroupedGemm& gemm, cudaStream_t stream) {
  const bool is_empty =
      gemm.product == GroupedProduct::kWeightGradient ? gemm.num_weights == 0 : gemm.num_rows == 0;
  if (is_empty || gemm.num_groups == 0) return "";
  Problem problem = "grouped_dot has no kernel for this product and element type";
  const Epilogue wanted = EpilogueOf(gemm);
  each_kernel([&](GroupedProduct product, Epilogue epilogue, auto element, auto form) {
    using T = typename decltype(element)::type;
    using F = typename decltype(form)::type;
    if (gemm.product != product || wanted != epilogue || gemm.type != Element<T>::kType) return;
    if (F::kIsSliced != (gemm.slices != nullptr)) return;
    problem = gemm::Launch<T, F>(gemm, stream);
  });
  return problem;
}

Problem LaunchWaitForStart(const GroupedGemm& gemm, int64_t timeout_ns, cudaStream_t stream) {
  wait_for_start<<<1, 1, 0, stream>>>(reinterpret_cast<uint32_t*>(gemm.counter),
                                      num_clusters(gemm.num_sms), timeout_ns);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? "" : cudaGetErrorString(error);
}

}  // namespace moe_a2a
