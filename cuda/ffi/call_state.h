// The state of a call of a program: everything that does not change between executions.
//
// XLA makes a state when it loads the program, keeps the state as long as the program, and passes
// the state to every later stage. All devices of the process, and all threads that execute the
// program, share one state, so published parts of the state never change. The state has a
// DeviceState for each device. The first execution on a device makes its DeviceState, because a
// call's arrays and device are not known earlier.
//
// A DeviceState stays valid when the workspace is closed and opened again, because a workspace
// keeps its addresses for the life of the process (runtime/workspace.h). Every call checks whether
// the workspace is open.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "ffi/attributes.h"
#include "ffi/errors.h"
#include "kernels/launch.h"
#include "runtime/per_device.h"
#include "runtime/workspace.h"
#include "xla/ffi/api/ffi.h"

namespace moe_a2a {

// One execution of a call.
struct Execution {
  cudaStream_t stream;
  int32_t ordinal;
  int64_t run;           // the id of the program's execution
  bool may_be_captured;  // in a CUDA graph
  const ffi::RemainingArgs& operands;
  const ffi::RemainingRets& outputs;
};

// The part of a call's state that belongs to one device.
struct DeviceState {
  virtual ~DeviceState() = default;

  Topology topology;
  Workspace* workspace = nullptr;
  const Kernels* kernels = nullptr;
  SideStream* side = nullptr;   // null for a whole exchange
  int64_t ranks_of_device = 1;  // if more than one, all ranks share the device and the launch
#ifdef MOE_A2A_TEST_HOOKS
  bool is_uncapped = false;
#endif
};

class CallState {
 public:
  // XLA assigns this number when Python registers the type.
  static ffi::TypeId id;
  static const ffi::TypeInfo info;

  virtual ~CallState() = default;

  // Reserves the workspace when a program is loaded, before any of its calls runs on any device. If
  // all ranks share a device, Initialize() reserves the workspace, because the device is known only
  // when the program runs.
  ffi::Error Load();

  // Opens a closed workspace again, and reports a failure. XLA calls this before every execution,
  // including executions that replay a CUDA graph and never call Execute().
  ffi::Error Initialize(int32_t ordinal);

  // Launches the exchange, or joins a split exchange. After the first execution on a device,
  // Execute() does not allocate and takes no process-wide lock.
  ffi::Error Execute(const Execution& execution);

 protected:
  explicit CallState(CallAttributes attributes) : attributes_(std::move(attributes)) {}

  const CallAttributes& attributes() const { return attributes_; }

 private:
  // Returns a copy of `state` with the members of the subclass.
  virtual ffi::ErrorOr<std::unique_ptr<const DeviceState>> MakeDeviceState(
      const Execution& execution, const DeviceState& state) const = 0;

  virtual ffi::Error Run(const Execution& execution, const DeviceState& state) const = 0;

  ffi::Error ExecuteAt(const Execution& execution, const DeviceState* state, SideStream** side);
  // Opens or grows the workspace. Reports an earlier failure if the call has `raise_failures`;
  // otherwise the kernels run, and return NaN at once.
  ffi::Error Prepare(Workspace& workspace) const;

  const CallAttributes attributes_;
  PerDevice<DeviceState> states_;
};

// Returns the view of the first rank of device `ordinal`. Its signature covers the attributes that
// all calls have.
ffi::ErrorOr<RankView> ViewOf(const CallAttributes& attributes, const DeviceState& state,
                              Operation operation, int32_t ordinal);

// Returns how many blocks a launch may have for each rank of a device: the number that the call
// requests, limited by the device's multiprocessors.
ffi::ErrorOr<int64_t> BlocksOfRank(const CallAttributes& attributes, const DeviceState& state,
                                   int32_t ordinal);

}  // namespace moe_a2a
