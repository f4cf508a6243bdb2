// The handlers of the kernel that plans placements (placement/fill_slots.h): operands experts and
// rows, int32 [B, R, L]; results experts and rows, int32 [B, R, L + S].
#include <algorithm>
#include <atomic>
#include <cstdint>

#include "ffi/errors.h"
#include "layout.h"
#include "placement/fill_slots.h"
#include "runtime/driver.h"

namespace moe_a2a {
namespace {

using Array = ffi::BufferR3<ffi::S32>;

// Loads the kernel, once for each device, because it cannot be loaded while a graph is captured.
ffi::Error Initialize(int32_t ordinal, ffi::Dictionary) {
  static std::atomic<uint64_t> loaded{0};
  const uint64_t device = ordinal < 64 ? uint64_t{1} << ordinal : 0;
  if ((loaded & device) != 0) return ffi::Error::Success();
  const DeviceScope scope;
  cudaError_t error = cudaSetDevice(ordinal);
  if (error == cudaSuccess) error = LoadFillSlots();
  if (error == cudaSuccess) loaded |= device;
  return ToError(error);
}

ffi::Error Run(cudaStream_t stream, int64_t most, int64_t min_rows, Array experts, Array rows,
               ffi::Result<Array> slot_experts, ffi::Result<Array> slot_rows) {
  const auto own = experts.dimensions(), all = slot_experts->dimensions();
  const int64_t ranks = own[1], local = own[2];
  const auto are_equal = [](const auto& a, const auto& b, size_t axes) {
    return std::equal(a.begin(), a.begin() + axes, b.begin());
  };
  if (!are_equal(rows.dimensions(), own, 3) || !are_equal(slot_rows->dimensions(), all, 3) ||
      !are_equal(own, all, 2) || ranks < 1 || ranks > kMaxRanks || local < 1 ||
      local > kMaxPlannedExperts / ranks || all[2] < local || most < 1 || min_rows < 1) {
    return Invalid("fill_slots got arrays that do not fit: lower the program again");
  }
  if (own[0] == 0) return ffi::Error::Success();
  FillSlots call = {};
  call.experts = experts.typed_data();
  call.rows = rows.typed_data();
  call.slot_experts = slot_experts->typed_data();
  call.slot_rows = slot_rows->typed_data();
  call.batch = static_cast<int32_t>(own[0]);
  call.num_ranks = static_cast<int32_t>(ranks);
  call.num_local = static_cast<int32_t>(local);
  call.spare = static_cast<int32_t>(all[2] - local);
  call.most = static_cast<int32_t>(most);
  call.min_rows = min_rows;
  return ToError(LaunchFillSlots(call, stream));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_a2a_fill_slots_initialize, Initialize,
                              ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_a2a_fill_slots, Run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Attr<int64_t>("most")
                                  .Attr<int64_t>("min_rows")
                                  .Arg<Array>()
                                  .Arg<Array>()
                                  .Ret<Array>()
                                  .Ret<Array>(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace moe_a2a
