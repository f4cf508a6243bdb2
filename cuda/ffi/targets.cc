// The handlers that XLA calls, and their table.
#include "ffi/targets.h"

#include <cuda_runtime_api.h>

#include <initializer_list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "calls/combine.h"
#include "calls/dispatch.h"
#include "calls/format_dispatch.h"
#include "calls/route.h"
#include "calls/routed_dispatch.h"
#include "calls/weighted_dispatch.h"
#include "ffi/attributes.h"
#include "ffi/done.h"
#include "ffi/errors.h"
#include "ffi/exchange.h"
#include "ffi/exchange_of.h"
#ifdef MOE_A2A_GROUPED_GEMM
#include "ffi/grouped_gemm.h"
#endif
#include "xla/ffi/api/ffi.h"

namespace moe_a2a {
namespace {

// Makes the state of a call and opens its workspace.
template <typename Make>
ffi::ErrorOr<std::unique_ptr<Exchange>> Load(const ffi::Dictionary& attributes, const Make& make) {
  auto common = DecodeAttributes(attributes);
  if (!common) return ffi::Unexpected(common.error());
  std::unique_ptr<Exchange> exchange = make(std::move(*common));
  if (exchange == nullptr) return ffi::Unexpected(LacksAttribute());
  if (ffi::Error error = exchange->Load(); error.failure()) return ffi::Unexpected(error);
  return exchange;
}

template <typename Call>
ffi::ErrorOr<std::unique_ptr<Exchange>> LoadExchange(ffi::Dictionary attributes) {
  return Load(attributes, [&](CallAttributes common) -> std::unique_ptr<Exchange> {
    Call call = {};
    if (!call.Read(AttributeReader(attributes))) return nullptr;
    return std::make_unique<ExchangeOf<Call>>(std::move(common), std::move(call));
  });
}

ffi::ErrorOr<std::unique_ptr<Exchange>> LoadDone(ffi::Dictionary attributes) {
  return Load(attributes,
              [](CallAttributes common) { return std::make_unique<Done>(std::move(common)); });
}

template <auto kLoad>
XLA_FFI_Error* InstantiateHandler(XLA_FFI_CallFrame* frame) {
  static const auto* handler = ffi::Ffi::BindInstantiate().Attrs().To(kLoad).release();
  return handler->Call(frame);
}

ffi::Error Initialize(int32_t ordinal, Exchange* exchange) { return exchange->Initialize(ordinal); }

XLA_FFI_Error* InitializeHandler(XLA_FFI_CallFrame* frame) {
  static const auto* handler = ffi::Ffi::BindInitialize()
                                   .Ctx<ffi::DeviceOrdinal>()
                                   .Ctx<ffi::State<Exchange>>()
                                   .To(Initialize)
                                   .release();
  return handler->Call(frame);
}

template <bool kMayBeCaptured>
ffi::Error Execute(cudaStream_t stream, int32_t ordinal, ffi::RunId run, Exchange* exchange,
                   ffi::RemainingArgs operands, ffi::RemainingRets outputs) {
  return exchange->Execute({stream, ordinal, run.run_id, kMayBeCaptured, operands, outputs});
}

template <bool kMayBeCaptured>
auto MakeExecuteHandler(std::initializer_list<ffi::Traits> traits) {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Ctx<ffi::DeviceOrdinal>()
      .Ctx<ffi::RunId>()
      .Ctx<ffi::State<Exchange>>()
      .RemainingArgs()
      .RemainingRets()
      .To(Execute<kMayBeCaptured>, traits)
      .release();
}

XLA_FFI_Error* ExecuteHandler(XLA_FFI_CallFrame* frame) {
  static const auto* handler = MakeExecuteHandler<false>({});
  return handler->Call(frame);
}

XLA_FFI_Error* ExecuteInGraphHandler(XLA_FFI_CallFrame* frame) {
  static const auto* handler = MakeExecuteHandler<true>({ffi::Traits::kCmdBufferCompatible});
  return handler->Call(frame);
}

// A target. `has_graph_variant`: a second target, with the suffix "_in_graph", may be captured in a CUDA graph.
struct Row {
  const char* name;
  Handler* instantiate;
  bool has_graph_variant;
};

// Start and done are not captured: a graph must join each fork that it contains, and the host must see every start.
constexpr Row kRows[] = {
    {"moe_a2a_route", InstantiateHandler<LoadExchange<RouteCall>>, true},
    {"moe_a2a_dispatch", InstantiateHandler<LoadExchange<DispatchCall>>, true},
    {"moe_a2a_dispatch_start", InstantiateHandler<LoadExchange<DispatchCall>>, false},
    {"moe_a2a_dispatch_done", InstantiateHandler<LoadDone>, false},
    {"moe_a2a_format_dispatch", InstantiateHandler<LoadExchange<FormatDispatchCall>>, true},
    {"moe_a2a_routed_dispatch", InstantiateHandler<LoadExchange<RoutedDispatchCall>>, true},
    {"moe_a2a_weighted_dispatch", InstantiateHandler<LoadExchange<WeightedDispatchCall>>, true},
    {"moe_a2a_combine", InstantiateHandler<LoadExchange<CombineCall>>, true},
    {"moe_a2a_combine_start", InstantiateHandler<LoadExchange<CombineCall>>, false},
    {"moe_a2a_combine_done", InstantiateHandler<LoadDone>, false},
};

std::vector<Target> MakeTargets() {
  std::vector<Target> targets;
  for (const auto& [name, instantiate, has_graph_variant] : kRows) {
    targets.push_back({name, instantiate, InitializeHandler, ExecuteHandler});
    if (!has_graph_variant) continue;
    targets.push_back(
        {std::string(name) + "_in_graph", instantiate, InitializeHandler, ExecuteInGraphHandler});
  }
#ifdef MOE_A2A_GROUPED_GEMM
  for (const auto& [name, execute] : {std::pair{"moe_a2a_grouped_gemm", moe_a2a_grouped_gemm},
                                      {"moe_a2a_dot_act", moe_a2a_dot_act},
                                      {"moe_a2a_act_dot_grad", moe_a2a_act_dot_grad}}) {
    targets.push_back({name, nullptr, moe_a2a_grouped_gemm_initialize, execute});
  }
#endif
  return targets;
}

}  // namespace

const std::vector<Target>& Targets() {
  static const auto* targets = new std::vector<Target>(MakeTargets());
  return *targets;
}

StateType StateOfTargets() { return {"moe_a2a_exchange", &Exchange::id, &Exchange::info}; }

}  // namespace moe_a2a
