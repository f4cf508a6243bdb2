#include "ffi/call_state.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>
#include <utility>

#include "calls/call.h"
#include "kernels/grid.h"

namespace moe_a2a {

ffi::TypeId CallState::id = XLA_FFI_UNKNOWN_TYPE_ID;
const ffi::TypeInfo CallState::info = ffi::MakeTypeInfo<CallState>();

ffi::Error CallState::Load() {
  if (attributes_.is_on_one_device()) return ffi::Error::Success();
  Workspace& workspace = Workspace::Get(attributes_.topology, attributes_.workspace_kind);
  return ToError(workspace.Reserve(attributes_.half_bytes, attributes_.timeout_ns));
}

ffi::Error CallState::Initialize(int32_t ordinal) {
  if (const DeviceState* state = states_.Find(ordinal)) return Prepare(*state->workspace);
  Topology topology = attributes_.topology;
  if (ffi::Error error = SetDevice(ordinal, &topology); error.failure()) return error;
  return Prepare(Workspace::Get(topology, attributes_.workspace_kind));
}

ffi::Error CallState::Prepare(Workspace& workspace) const {
  if (Problem p = workspace.Reserve(attributes_.half_bytes, attributes_.timeout_ns); !p.empty()) {
    return ToError(p);
  }
  if (!attributes_.raise_failures) return ffi::Error::Success();
  const std::string failure = workspace.Failure();
  if (failure.empty()) return ffi::Error::Success();
  return Internal(failure + ". The group stays stopped until group.close() is called.");
}

ffi::Error CallState::Execute(const Execution& execution) {
  const DeviceState* state = states_.Find(execution.ordinal);
  SideStream* side = state != nullptr ? state->side : nullptr;
  ffi::Error error = ExecuteAt(execution, state, &side);
  // After an error, the execution ends, and XLA reuses the memory of the execution in the order of
  // XLA's stream. XLA's stream must therefore wait for all work of the side stream.
  if (error.failure() && side != nullptr) side->JoinAll(execution.stream);
  return error;
}

ffi::Error CallState::ExecuteAt(const Execution& execution, const DeviceState* state,
                                SideStream** side) {
#ifdef MOE_A2A_TEST_HOOKS
  // If a test has switched the limit on the number of blocks, the state is made again, because it
  // depends on this limit.
  if (state != nullptr && state->is_uncapped != state->workspace->is_uncapped()) state = nullptr;
#endif
  if (state != nullptr) {
    ffi::Error error = Prepare(*state->workspace);
    return error.failure() ? error : Run(execution, *state);
  }
  DeviceState first;
  first.topology = attributes_.topology;
  if (ffi::Error error = SetDevice(execution.ordinal, &first.topology); error.failure()) {
    return error;
  }
  Workspace& workspace = Workspace::Get(first.topology, attributes_.workspace_kind);
  ffi::Error error = Prepare(workspace);
  *side = workspace.Side(execution.ordinal);
  if (error.failure()) return error;
  first.workspace = &workspace;
  first.kernels = &workspace.kernels();
  first.side = *side;
  first.ranks_of_device = first.topology.is_colocated() ? first.topology.num_ranks : 1;
#ifdef MOE_A2A_TEST_HOOKS
  first.is_uncapped = workspace.is_uncapped();
#endif
  auto made = MakeDeviceState(execution, first);
  if (!made) return made.error();
  return Run(execution, *states_.Publish(execution.ordinal, std::move(*made)));
}

ffi::ErrorOr<RankView> ViewOf(const CallAttributes& attributes, const DeviceState& state,
                              Operation operation, int32_t ordinal) {
  RankView view = {};
  if (Problem p = state.workspace->View(ordinal, &view); !p.empty()) {
    return ffi::Unexpected(Invalid(p));
  }
  view.timeout_ns = attributes.timeout_ns;
  view.first_timeout_ns = attributes.first_timeout_ns;
  view.operation = operation;
  uint64_t& signature = view.signature;
  Mix(signature, kProtocolVersion);
  for (int64_t device : state.topology.devices) Mix(signature, device);
  Mix(signature, static_cast<uint64_t>(attributes.workspace_kind));
  Mix(signature, static_cast<uint64_t>(operation));
  Mix(signature, attributes.half_bytes);
  Mix(signature, attributes.scopes);
  return view;
}

ffi::ErrorOr<int64_t> BlocksOfRank(const CallAttributes& attributes, const DeviceState& state,
                                   int32_t ordinal) {
  const int64_t num_ranks = state.topology.num_ranks, num_sms = attributes.num_sms;
  const bool is_split = moe_a2a::is_split(attributes.workspace_kind);
  int sms = 0;
  if (const cudaError_t error =
          cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, ordinal);
      error != cudaSuccess) {
    return ffi::Unexpected(Internal(std::string("asking for the device's multiprocessors: ") +
                                    cudaGetErrorString(error)));
  }
  if (num_sms < 1) {
    return ffi::Unexpected(Invalid("num_sms must be at least 1; got " + std::to_string(num_sms)));
  }
#ifdef MOE_A2A_TEST_HOOKS
  // is_uncapped: a test launches more blocks than fit.
  if (state.ranks_of_device == 1 || state.is_uncapped) return num_sms;
#endif
  if (state.ranks_of_device == 1) {
    if (const int64_t most = launch_blocks(num_ranks, sms); most > 0) {
      return std::min(most, num_sms);
    }
    return ffi::Unexpected(
        Invalid("an exchange of several ranks needs two multiprocessors or more; GPU " +
                std::to_string(ordinal) + " has " + std::to_string(sms) +
                ". Use implementation='portable'"));
  }
  const int64_t most = colocated_blocks(num_ranks, sms, is_split);
  if (most > 0) return std::min(most, num_sms);
  return ffi::Unexpected(
      Invalid(std::to_string(num_ranks) + " ranks on one GPU need " + std::to_string(num_ranks) +
              (is_split ? " multiprocessors for whole and as many for split exchanges"
                        : " multiprocessors") +
              "; GPU " + std::to_string(ordinal) + " has " + std::to_string(sms) +
              ". Use fewer ranks per GPU"));
}

}  // namespace moe_a2a
