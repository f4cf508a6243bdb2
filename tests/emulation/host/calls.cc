// The package's calls as custom-call targets of XLA on CPU, over the fake driver. No kernel runs.
// `call_report` returns NaN after a failure, as a kernel would. XLA on CPU passes no stream and no
// ordinal, so these handlers are not those of the package, but use the package's CallState.
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdlib>
#include <limits>
#include <new>

#include "fake_driver.h"
#include "ffi/attributes.h"
#include "ffi/call_state.h"
#include "ffi/errors.h"
#include "ffi/targets.h"

namespace {

using namespace moe_a2a;

constexpr int32_t kOrdinal = 0;

std::atomic<long> allocations{0};

Workspace& WorkspaceOf(const ffi::Dictionary& attributes) {
  CallAttributes call;
  DecodeAttributes(attributes, &call);
  return Workspace::Get(call.topology, call.workspace_kind);
}

ffi::Error Execute(ffi::RunId run, CallState* state, ffi::RemainingArgs operands,
                   ffi::RemainingRets outputs) {
  Problem problem = state->Initialize(kOrdinal);
  if (problem.empty()) {
    problem = state->Execute({/*stream=*/nullptr, kOrdinal, run.run_id, false, operands, outputs});
  }
  return ToError(problem);
}

ffi::Error Report(CallState* state, ffi::Dictionary attributes,
                  ffi::Result<ffi::BufferR0<ffi::F32>> result) {
  if (Problem p = state->Initialize(kOrdinal); !p.empty()) return ToError(p);
  const bool has_failed = !WorkspaceOf(attributes).Failure().empty();
  *result->typed_data() = has_failed ? std::numeric_limits<float>::quiet_NaN() : 1;
  return ffi::Error::Success();
}

// Writes the record of a timeout.
ffi::Error Fail(ffi::Dictionary attributes, ffi::Result<ffi::BufferR0<ffi::F32>>) {
  RankView view = {};
  if (Problem p = WorkspaceOf(attributes).View(kOrdinal, &view); !p.empty()) return ToError(p);
  view.error->operation = static_cast<uint32_t>(Operation::kDispatch);
  view.error->phase = static_cast<uint32_t>(Phase::kReceiveChunk);
  view.error->kind = static_cast<uint32_t>(ErrorKind::kTimeout);
  return ffi::Error::Success();
}

ffi::Error Close(ffi::Dictionary attributes, ffi::Result<ffi::BufferR0<ffi::F32>>) {
  return ToError(WorkspaceOf(attributes).Close(1'000'000'000));
}

auto Scalar() { return ffi::Ffi::Bind().Attrs().Ret<ffi::BufferR0<ffi::F32>>(); }

}  // namespace

void* operator new(size_t bytes) {
  ++allocations;
  if (void* memory = std::malloc(bytes)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

XLA_FFI_DEFINE_HANDLER_SYMBOL(call_execute, Execute,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::State<CallState>>()
                                  .RemainingArgs()
                                  .RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    call_report, Report,
    ffi::Ffi::Bind().Ctx<ffi::State<CallState>>().Attrs().Ret<ffi::BufferR0<ffi::F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(call_fail, Fail, Scalar());
XLA_FFI_DEFINE_HANDLER_SYMBOL(call_close, Close, Scalar());

extern "C" {

int num_targets() { return static_cast<int>(Targets().size()); }
const char* target_name(int i) { return Targets()[i].name.c_str(); }
Handler* target_instantiate(int i) { return Targets()[i].instantiate; }
void* state_type_id() { return StateOfTargets().id; }
const void* state_type_info() { return StateOfTargets().info; }

void add_devices(int count) {
  for (int i = 0; i < count; ++i) AddDevice(i, {0, i});
}

void set_room(int device, int64_t bytes) { fake_driver::room[device] = bytes; }
int64_t used_bytes(int device) { return fake_driver::used[device]; }
long num_launches() { return fake_driver::launches; }
long num_allocations() { return allocations; }
}
