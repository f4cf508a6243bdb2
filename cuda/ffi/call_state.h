// The state of a call in a program: all that does not change between executions.
//
// XLA makes a state when it loads the program. All devices of the process and all threads share the
// state, so its parts never change after they are published. The first execution on a device makes
// a DeviceState, because arrays and device are not known earlier. A DeviceState stays valid after
// Close(), because a workspace keeps its addresses.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "ffi/attributes.h"
#include "ffi/errors.h"
#include "runtime/per_device.h"
#include "runtime/workspace.h"
#include "xla/ffi/api/ffi.h"

namespace moe_a2a {

struct Execution {
  cudaStream_t stream;
  int32_t ordinal;
  int64_t run;           // the id of the program's execution
  bool may_be_captured;  // in a CUDA graph
  const ffi::RemainingArgs& operands;
  const ffi::RemainingRets& outputs;
};

struct DeviceState {
  DeviceState(Workspace& workspace, int32_t ordinal)
      : workspace(workspace), side(workspace.Side(ordinal)) {}
  virtual ~DeviceState() = default;

  Workspace& workspace;
  SideStream* const side;  // null for a whole exchange
#ifdef MOE_A2A_TEST_HOOKS
  const bool is_uncapped = workspace.is_uncapped();
#endif
};

class CallState {
 public:
  static ffi::TypeId id;  // XLA assigns the id when Python registers the type
  static const ffi::TypeInfo info;

  virtual ~CallState() = default;

  // Reserves the workspace when a program is loaded, before the program's calls run. If all ranks
  // share a device, the device is not known yet, and Initialize() reserves the workspace.
  Problem Load();

  // Opens a closed workspace again, and reports a failure. XLA calls this before every execution.
  // Before the replay of a CUDA graph, XLA calls only this, not Execute().
  Problem Initialize(int32_t ordinal);

  // Launches the exchange, or joins a split exchange. Only the first execution on a device
  // allocates memory or takes a process-wide lock.
  Problem Execute(const Execution& execution);

 protected:
  explicit CallState(CallAttributes attributes) : attributes_(std::move(attributes)) {}

  // Sets the view of a device's first rank. Its signature does not cover the call's arrays yet.
  Problem SetView(const Workspace& workspace, Operation operation, int32_t ordinal,
                  RankView* view) const;

  // Sets each rank's number of blocks: the call's `num_sms`, but at most what the device can run.
  Problem SetBlocksOfRank(const Workspace& workspace, int32_t ordinal, int64_t* num_blocks) const;

  const CallAttributes attributes_;

 private:
  virtual Problem MakeDeviceState(const Execution& execution, Workspace& workspace,
                                  std::unique_ptr<const DeviceState>* made) const = 0;

  virtual Problem Run(const Execution& execution, const DeviceState& state) const = 0;

  Problem ExecuteIn(Workspace& workspace, const Execution& execution);
  Problem FindWorkspace(int32_t ordinal, Workspace** workspace) const;
  // Opens or grows the workspace. Reports an earlier failure if the call has `raise_failures`.
  Problem Prepare(Workspace& workspace) const;

  PerDevice<DeviceState> states_;
};

}  // namespace moe_a2a
