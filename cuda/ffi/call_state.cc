#include "ffi/call_state.h"

#include <algorithm>
#include <string>

#include "calls/call.h"
#include "kernels/grid.h"
#include "runtime/cuda_error.h"
#include "runtime/devices.h"

namespace moe_a2a {

ffi::TypeId CallState::id = XLA_FFI_UNKNOWN_TYPE_ID;
const ffi::TypeInfo CallState::info = ffi::MakeTypeInfo<CallState>();

Problem CallState::Load() {
  if (attributes_.is_on_one_device()) return {};
  return Workspace::Get(attributes_.topology, attributes_.workspace_kind)
      .Reserve(attributes_.half_bytes, attributes_.timeout_ns);
}

Problem CallState::FindWorkspace(int32_t ordinal, Workspace** workspace) const {
  if (const DeviceState* state = states_.Find(ordinal)) {
    *workspace = &state->workspace;
    return {};
  }
  Topology topology = attributes_.topology;
  if (attributes_.is_on_one_device()) {
    int64_t id;
    if (!FindOwnDevice(ordinal, &id)) {
      return Invalid("the program runs on GPU ", ordinal,
                     ", which jax_moe_a2a does not know in this process; read the path of a "
                     "jax_moe_a2a.Group over this GPU before the program");
    }
    topology.devices.assign(topology.num_ranks, id);
  }
  *workspace = &Workspace::Get(topology, attributes_.workspace_kind);
  return {};
}

Problem CallState::Initialize(int32_t ordinal) {
  Workspace* workspace;
  MOE_A2A_TRY(FindWorkspace(ordinal, &workspace));
  return Prepare(*workspace);
}

Problem CallState::Prepare(Workspace& workspace) const {
  MOE_A2A_TRY(workspace.Reserve(attributes_.half_bytes, attributes_.timeout_ns));
  if (!attributes_.raise_failures) return {};
  const std::string failure = workspace.Failure();
  if (failure.empty()) return {};
  return failure + ". The group stays stopped until group.close() is called.";
}

Problem CallState::Execute(const Execution& execution) {
  Workspace* workspace;
  MOE_A2A_TRY(FindWorkspace(execution.ordinal, &workspace));
  Problem problem = Prepare(*workspace);
  if (problem.empty()) problem = ExecuteIn(*workspace, execution);
  if (problem.empty()) return {};
  // After an error, XLA reuses memory of this execution for later work of its stream. The stream
  // must therefore wait for all work of the side stream.
  if (SideStream* side = workspace->Side(execution.ordinal)) side->JoinAll(execution.stream);
  return problem;
}

Problem CallState::ExecuteIn(Workspace& workspace, const Execution& execution) {
  const DeviceState* state = states_.Find(execution.ordinal);
#ifdef MOE_A2A_TEST_HOOKS
  // A state contains the limit on the blocks, which a test may have changed.
  if (state != nullptr && state->is_uncapped != workspace.is_uncapped()) state = nullptr;
#endif
  if (state == nullptr) {
    std::unique_ptr<const DeviceState> made;
    MOE_A2A_TRY(MakeDeviceState(execution, workspace, &made));
    state = states_.Publish(execution.ordinal, std::move(made));
  }
  return Run(execution, *state);
}

Problem CallState::SetView(const Workspace& workspace, Operation operation, int32_t ordinal,
                           RankView* view) const {
  if (Problem p = workspace.View(ordinal, view); !p.empty()) return Invalid(p);
  view->timeout_ns = attributes_.timeout_ns;
  view->first_timeout_ns = attributes_.first_timeout_ns;
  view->operation = operation;
  Mix(view->signature, kProtocolVersion);
  for (int64_t device : workspace.topology().devices) Mix(view->signature, device);
  Mix(view->signature, attributes_.workspace_kind, operation, attributes_.half_bytes,
      attributes_.scopes);
  return {};
}

Problem CallState::SetBlocksOfRank(const Workspace& workspace, int32_t ordinal,
                                   int64_t* num_blocks) const {
  const int64_t num_ranks = attributes_.topology.num_ranks, num_sms = attributes_.num_sms;
  const bool is_split = moe_a2a::is_split(attributes_.workspace_kind);
  const bool is_shared = workspace.topology().is_colocated();
  int sms = 0;
  MOE_A2A_TRY(ProblemOf(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, ordinal),
                        "asking for the device's multiprocessors"));
  if (num_sms < 1) return Invalid("num_sms must be at least 1; got ", num_sms);
  int64_t most =
      is_shared ? colocated_blocks(num_ranks, sms, is_split) : launch_blocks(num_ranks, sms);
#ifdef MOE_A2A_TEST_HOOKS
  if (!is_shared || workspace.is_uncapped()) most = num_sms;
#endif
  *num_blocks = std::min(most, num_sms);
  if (most > 0) return {};
  const std::string gpu = Concat("GPU ", ordinal, " has ", sms);
  if (!is_shared) {
    return Invalid("an exchange of several ranks needs two multiprocessors or more; " + gpu +
                   ". Use implementation='portable'");
  }
  return Invalid(num_ranks, " ranks on one GPU need ", num_ranks,
                 (is_split ? " multiprocessors for whole and as many for split exchanges; "
                           : " multiprocessors; "),
                 gpu, ". Use fewer ranks per GPU");
}

}  // namespace moe_a2a
