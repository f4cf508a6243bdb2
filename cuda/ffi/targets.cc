// The handlers that XLA calls, and their table.
#include "ffi/targets.h"

#include <cuda_runtime_api.h>

#include <memory>
#include <utility>

#include "calls/why_not.h"
#include "ffi/attributes.h"
#include "ffi/call_state.h"
#include "ffi/call_state_of.h"
#include "ffi/errors.h"
#include "xla/ffi/api/ffi.h"

namespace moe_a2a {
namespace {

using NewState = std::unique_ptr<CallState>;

template <typename Call>
Problem MakeState(const ffi::Dictionary& attributes, CallAttributes common, NewState* made) {
  Call call = {};
  if (!call.Read(ReaderOf(attributes))) return LacksAttribute();
  *made = std::make_unique<CallStateOf<Call>>(std::move(common), std::move(call));
  return {};
}

Problem MakeDone(const ffi::Dictionary&, CallAttributes common, NewState* made) {
  *made = std::make_unique<Done>(std::move(common));
  return {};
}

template <auto kMake>
ffi::ErrorOr<NewState> Load(ffi::Dictionary attributes) {
  CallAttributes common;
  NewState state;
  Problem problem = DecodeAttributes(attributes, &common);
  if (problem.empty()) problem = kMake(attributes, std::move(common), &state);
  if (problem.empty()) problem = state->Load();
  if (problem.empty()) return state;
  return ffi::Unexpected(ToError(problem));
}

template <auto kMake>
XLA_FFI_Error* InstantiateHandler(XLA_FFI_CallFrame* frame) {
  static const auto* handler = ffi::Ffi::BindInstantiate().Attrs().To(Load<kMake>).release();
  return handler->Call(frame);
}

XLA_FFI_Error* InitializeHandler(XLA_FFI_CallFrame* frame) {
  static const auto* handler =
      ffi::Ffi::BindInitialize()
          .Ctx<ffi::DeviceOrdinal>()
          .Ctx<ffi::State<CallState>>()
          .To([](int32_t ordinal, CallState* state) { return ToError(state->Initialize(ordinal)); })
          .release();
  return handler->Call(frame);
}

template <bool kMayBeCaptured>
ffi::Error Execute(cudaStream_t stream, int32_t ordinal, ffi::RunId run, CallState* state,
                   ffi::RemainingArgs operands, ffi::RemainingRets outputs) {
  return ToError(state->Execute({stream, ordinal, run.run_id, kMayBeCaptured, operands, outputs}));
}

template <bool kMayBeCaptured>
XLA_FFI_Error* ExecuteHandler(XLA_FFI_CallFrame* frame) {
  static const auto* handler =
      MakeHandler<kMayBeCaptured>(ffi::Ffi::Bind()
                                      .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                      .Ctx<ffi::DeviceOrdinal>()
                                      .Ctx<ffi::RunId>()
                                      .Ctx<ffi::State<CallState>>()
                                      .RemainingArgs()
                                      .RemainingRets(),
                                  Execute<kMayBeCaptured>);
  return handler->Call(frame);
}

// A CUDA graph may capture only the target with the suffix "_in_graph". It must not capture a
// start, because it would have to capture the done too, and because the host must see every start.
template <typename Call>
void AddTargets(std::vector<Target>& targets) {
  const std::string name = Call::kTarget;
  Handler* load = InstantiateHandler<MakeState<Call>>;
  targets.push_back({name, load, InitializeHandler, ExecuteHandler<false>});
  targets.push_back({name + "_in_graph", load, InitializeHandler, ExecuteHandler<true>});
  if (!Call::kHasHalves) return;
  targets.push_back({name + "_start", load, InitializeHandler, ExecuteHandler<false>});
  targets.push_back(
      {name + "_done", InstantiateHandler<MakeDone>, InitializeHandler, ExecuteHandler<false>});
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
