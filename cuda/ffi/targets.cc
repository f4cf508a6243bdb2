// The handlers that XLA calls, and their table.
#include "ffi/targets.h"

#include <cuda_runtime_api.h>

#include <initializer_list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "calls/why_not.h"
#include "ffi/attributes.h"
#include "ffi/call_state.h"
#include "ffi/call_state_of.h"
#include "ffi/done.h"
#include "ffi/errors.h"
#include "xla/ffi/api/ffi.h"

namespace moe_a2a {
namespace {

// Makes the state of a call and opens its workspace.
template <typename Make>
ffi::ErrorOr<std::unique_ptr<CallState>> Load(const ffi::Dictionary& attributes, const Make& make) {
  auto common = DecodeAttributes(attributes);
  if (!common) return ffi::Unexpected(common.error());
  std::unique_ptr<CallState> state = make(std::move(*common));
  if (state == nullptr) return ffi::Unexpected(LacksAttribute());
  if (ffi::Error error = state->Load(); error.failure()) return ffi::Unexpected(error);
  return state;
}

template <typename Call>
ffi::ErrorOr<std::unique_ptr<CallState>> LoadCall(ffi::Dictionary attributes) {
  return Load(attributes, [&](CallAttributes common) -> std::unique_ptr<CallState> {
    Call call = {};
    if (!call.Read(AttributeReader(attributes))) return nullptr;
    return std::make_unique<CallStateOf<Call>>(std::move(common), std::move(call));
  });
}

ffi::ErrorOr<std::unique_ptr<CallState>> LoadDone(ffi::Dictionary attributes) {
  return Load(attributes,
              [](CallAttributes common) { return std::make_unique<Done>(std::move(common)); });
}

template <auto kLoad>
XLA_FFI_Error* InstantiateHandler(XLA_FFI_CallFrame* frame) {
  static const auto* handler = ffi::Ffi::BindInstantiate().Attrs().To(kLoad).release();
  return handler->Call(frame);
}

ffi::Error Initialize(int32_t ordinal, CallState* state) { return state->Initialize(ordinal); }

XLA_FFI_Error* InitializeHandler(XLA_FFI_CallFrame* frame) {
  static const auto* handler = ffi::Ffi::BindInitialize()
                                   .Ctx<ffi::DeviceOrdinal>()
                                   .Ctx<ffi::State<CallState>>()
                                   .To(Initialize)
                                   .release();
  return handler->Call(frame);
}

template <bool kMayBeCaptured>
ffi::Error Execute(cudaStream_t stream, int32_t ordinal, ffi::RunId run, CallState* state,
                   ffi::RemainingArgs operands, ffi::RemainingRets outputs) {
  return state->Execute({stream, ordinal, run.run_id, kMayBeCaptured, operands, outputs});
}

template <bool kMayBeCaptured>
auto MakeExecuteHandler(std::initializer_list<ffi::Traits> traits) {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Ctx<ffi::DeviceOrdinal>()
      .Ctx<ffi::RunId>()
      .Ctx<ffi::State<CallState>>()
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

// Adds the targets of a call. A whole call has a second target, with the suffix "_in_graph", which
// may be captured in a CUDA graph. Start and done are not captured, because a graph must join each
// fork that it contains, and because the host must see every start.
template <typename Call>
void AddTargets(std::vector<Target>& targets) {
  const std::string name = Call::kTarget;
  Handler* load = InstantiateHandler<LoadCall<Call>>;
  targets.push_back({name, load, InitializeHandler, ExecuteHandler});
  targets.push_back({name + "_in_graph", load, InitializeHandler, ExecuteInGraphHandler});
  if (!Call::kHasHalves) return;
  targets.push_back({name + "_start", load, InitializeHandler, ExecuteHandler});
  targets.push_back(
      {name + "_done", InstantiateHandler<LoadDone>, InitializeHandler, ExecuteHandler});
}

std::vector<Target> MakeTargets() {
  std::vector<Target> targets;
  for_each(ExchangeCalls{}, [&](auto call) { AddTargets<typename decltype(call)::type>(targets); });
  AddProductTargets(targets);
  return targets;
}

}  // namespace

const std::vector<Target>& Targets() {
  static const auto* targets = new std::vector<Target>(MakeTargets());
  return *targets;
}

StateType StateOfTargets() { return {"moe_a2a_exchange", &CallState::id, &CallState::info}; }

}  // namespace moe_a2a
