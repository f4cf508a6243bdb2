// The state of one call of a program: what does not change between its executions.
//
// XLA makes a state when it loads the program, keeps it as long as the program, and passes it to every later stage. One
// state serves all devices of the process, and threads that execute the program at the same time. So nothing in it changes
// after it is published, and it has a Site for each device, which the first execution there makes: a call's arrays and
// device are not known before.
//
// A Site stays right when the workspace is closed and opened again, because a workspace keeps its addresses for the life
// of the process (runtime/workspace.h). Whether it is open is asked at every call.
#ifndef MOE_A2A_FFI_EXCHANGE_H_
#define MOE_A2A_FFI_EXCHANGE_H_

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

// The state of a call on one device that does not change between executions.
struct Site {
  virtual ~Site() = default;

  Topology topology;
  Workspace* workspace = nullptr;
  const Kernels* kernels = nullptr;
  SideStream* side = nullptr;   // null for a whole exchange
  int64_t ranks_of_device = 1;  // more than one: all ranks share the device and the launch
#ifdef MOE_A2A_TEST_HOOKS
  bool is_uncapped = false;
#endif
};

class Exchange {
 public:
  // XLA assigns this number when Python registers the type.
  static ffi::TypeId id;
  static const ffi::TypeInfo info;

  virtual ~Exchange() = default;

  // Reserves the workspace when a program is loaded, before any of its calls runs anywhere. Ranks on one device
  // learn which one it is when the program runs, and need not wait for each other: Initialize() reserves.
  ffi::Error Load();

  // XLA calls this before every execution, also of those that replay a CUDA graph and so never come to
  // Execute(): a closed workspace opens again, and a failure raises.
  ffi::Error Initialize(int32_t ordinal);

  // Launches the exchange, or joins it. After the first execution on a device it allocates nothing and takes no lock of
  // the whole process.
  ffi::Error Execute(const Execution& execution);

 protected:
  explicit Exchange(CallAttributes attributes) : attributes_(std::move(attributes)) {}

  const CallAttributes& attributes() const { return attributes_; }

 private:
  // Adds to `site` what its members here do not hold.
  virtual ffi::ErrorOr<std::unique_ptr<const Site>> MakeSite(const Execution& execution,
                                                             const Site& site) const = 0;

  virtual ffi::Error Run(const Execution& execution, const Site& site) const = 0;

  ffi::Error ExecuteAt(const Execution& execution, const Site* site, SideStream** side);
  // Opens or grows the workspace, and reports an earlier failure, if the call is to raise it. Otherwise the kernels of
  // the failed group run: they end at once, with NaN.
  ffi::Error Prepare(Workspace& workspace) const;

  const CallAttributes attributes_;
  PerDevice<Site> sites_;
};

// Returns the view of the first rank of `ordinal`. Its signature holds what all calls have in common.
ffi::ErrorOr<RankView> ViewOf(const CallAttributes& attributes, const Site& site,
                              Operation operation, int32_t ordinal);

// Returns the blocks that a launch may have for each rank on a device: as many as the call asks for, and no more than
// the device has multiprocessors for.
ffi::ErrorOr<int64_t> BlocksOfRank(const CallAttributes& attributes, const Site& site,
                                   int32_t ordinal);

}  // namespace moe_a2a

#endif  // MOE_A2A_FFI_EXCHANGE_H_
