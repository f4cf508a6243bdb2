// The handlers over the fake driver, as targets that XLA calls on CPU: what a program is told when it is loaded and
// before it runs. No kernel runs; a call fills its result as the kernels of a group do.
#include <cuda_runtime_api.h>

#include <limits>

#include "fake_driver.h"
#include "ffi/handlers.cc"

namespace {

using namespace moe_a2a;

Workspace& WorkspaceOf(const ffi::Dictionary& attributes) {
  const auto call = DecodeAttributes(attributes);
  return Workspace::Get(call->topology, call->ring);
}

// On CPU XLA runs no stage between loading and execution, so the stage before each execution comes here too.
ffi::Error Execute(ffi::Dictionary attributes, ffi::Result<ffi::BufferR0<ffi::F32>> result) {
  if (ffi::Error error = Initialize(/*ordinal=*/0, attributes); error.failure()) return error;
  const bool has_failed = !WorkspaceOf(attributes).Failure().empty();
  *result->typed_data() = has_failed ? std::numeric_limits<float>::quiet_NaN() : 1;
  return ffi::Error::Success();
}

// Leaves the state of a kernel whose wait has timed out.
ffi::Error Fail(ffi::Dictionary attributes, ffi::Result<ffi::BufferR0<ffi::F32>>) {
  RankView view = {};
  if (Problem p = WorkspaceOf(attributes).View(/*ordinal=*/0, &view); !p.empty())
    return Internal(p);
  view.error->operation = static_cast<uint32_t>(Operation::kDispatch);
  view.error->phase = static_cast<uint32_t>(Phase::kReceiveChunk);
  view.error->kind = static_cast<uint32_t>(ErrorKind::kTimeout);
  return ffi::Error::Success();
}

ffi::Error Close(ffi::Dictionary attributes, ffi::Result<ffi::BufferR0<ffi::F32>>) {
  return ToError(WorkspaceOf(attributes).Close(1'000'000'000));
}

constexpr auto kBinding = [] { return ffi::Ffi::Bind().Attrs().Ret<ffi::BufferR0<ffi::F32>>(); };

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(call_execute, Execute, kBinding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(call_fail, Fail, kBinding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(call_close, Close, kBinding());

extern "C" {

void add_devices(int count) {
  for (int i = 0; i < count; ++i) AddDevice(i, {0, i});
}

void set_room(int device, int64_t bytes) { fake_driver::room[device] = bytes; }
int64_t used_bytes(int device) { return fake_driver::used[device]; }
}
