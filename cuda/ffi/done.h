// The done of a split exchange. Operands: the operands of its start, then the results of its start.
// The results of the done are the results of the start (aliased).
#pragma once

#include <algorithm>
#include <memory>
#include <utility>

#include "ffi/buffers.h"
#include "ffi/call_state.h"

namespace moe_a2a {

class Done final : public CallState {
 public:
  explicit Done(CallAttributes attributes) : CallState(std::move(attributes)) {}

 private:
  ffi::ErrorOr<std::unique_ptr<const DeviceState>> MakeDeviceState(
      const Execution& execution, const DeviceState& state) const override {
    auto view = ViewOf(attributes(), state, Operation::kDispatch, execution.ordinal);
    if (!view) return ffi::Unexpected(view.error());
    return std::make_unique<const DeviceState>(state);
  }

  ffi::Error Run(const Execution& execution, const DeviceState& state) const override {
    AddressList list_of_args, list_of_results;
    const bool is_read =
        list_of_args.Read(execution.operands) && list_of_results.Read(execution.outputs);
    const Addresses args = list_of_args.addresses(), results = list_of_results.addresses();
    if (!is_read || state.side == nullptr || args.size() < results.size()) {
      return Invalid("done needs the operands and the results of the start of a split exchange");
    }
    if (!std::equal(results.begin(), results.end(), args.end() - results.size())) {
      return Internal(
          "XLA has moved the results of a start before its done. Call start and done in the same "
          "function");
    }
    return ToError(state.side->Join(execution.stream, execution.run, args));
  }
};

}  // namespace moe_a2a
