// The state of a call whose operation is described in cuda/calls.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "calls/array.h"
#include "calls/call.h"
#include "ffi/attributes.h"
#include "ffi/buffers.h"
#include "ffi/call_state.h"
#include "ffi/errors.h"
#include "kernels/grid.h"
#include "runtime/slice.h"

namespace moe_a2a {

// Launches a whole exchange on XLA's stream, or a split exchange on the side stream.
template <typename Launcher>
ffi::Error Start(const Execution& execution, const DeviceState& state, Addresses args,
                 Addresses results, const Launcher& launch) {
  if (state.side == nullptr) return ToError(launch(execution.stream));
  cudaStream_t side;
  if (Problem p = state.side->Fork(execution.stream, execution.run, &side); !p.empty()) {
    return ToError(p);
  }
  if (const cudaError_t error = launch(side); error != cudaSuccess) return ToError(error);
  return ToError(state.side->Started(execution.run, args, results));
}

template <typename Call>
class CallStateOf final : public CallState {
 public:
  using Params = typename Call::Params;

  CallStateOf(CallAttributes attributes, Call call)
      : CallState(std::move(attributes)), call_(std::move(call)) {}

 private:
  struct LaunchState final : DeviceState {
    explicit LaunchState(const DeviceState& state) : DeviceState(state) {
      // Even padding bytes must be equal on all ranks that share a device (device/ranks.cuh).
      std::memset(static_cast<void*>(&params), 0, sizeof(params));
    }

    Params params;  // of the first rank, without addresses
    int blocks;
    bool has_run;  // whether the view has the id of the execution
    std::vector<int64_t> arg_bytes, result_bytes;
    size_t
        name;  // index of the result that identifies a launch; without one, the number of results
  };

  ffi::ErrorOr<std::unique_ptr<const DeviceState>> MakeDeviceState(
      const Execution& execution, const DeviceState& state) const override {
    auto made = MakeLaunchState(execution, state, Alignment::kVector);
    if (!made) return ffi::Unexpected(made.error());
    return std::unique_ptr<const DeviceState>(std::move(*made));
  }

  ffi::ErrorOr<std::unique_ptr<LaunchState>> MakeLaunchState(const Execution& execution,
                                                             const DeviceState& state,
                                                             Alignment alignment) const {
    auto view = ViewOf(attributes(), state, Call::kOperation, execution.ordinal);
    if (!view) return ffi::Unexpected(view.error());
    auto num_sms = BlocksOfRank(attributes(), state, execution.ordinal);
    if (!num_sms) return ffi::Unexpected(num_sms.error());
    auto args = DecodeArrays(execution.operands, state.ranks_of_device, alignment);
    if (!args) return ffi::Unexpected(args.error());
    auto results = DecodeArrays(execution.outputs, state.ranks_of_device, alignment);
    if (!results) return ffi::Unexpected(results.error());
    auto made = std::make_unique<LaunchState>(state);
    for (const Array& array : *args) made->arg_bytes.push_back(array.bytes);
    for (const Array& array : *results) made->result_bytes.push_back(array.bytes);
    made->name = std::find_if(results->begin(), results->end(),
                              [](const Array& array) { return array.bytes > 0; }) -
                 results->begin();
    Params& params = made->params;
    const bool is_colocated = state.ranks_of_device > 1;
    if (const Problem p =
            call_.Describe({*view, is_colocated, *num_sms}, {args->data(), args->size()},
                           {results->data(), results->size()}, &params);
        !p.empty()) {
      return ffi::Unexpected(Invalid(p));
    }
    if (const int64_t bytes = HalfBytes<Call>(params); bytes > attributes().half_bytes) {
      return ffi::Unexpected(Internal("the landing zone needs " + std::to_string(bytes) +
                                      " bytes; the lowering reserved " +
                                      std::to_string(attributes().half_bytes)));
    }
    made->blocks = grid_of(params, *num_sms).blocks;
    // Each process numbers its executions independently.
    made->has_run = !state.workspace->spans_processes();
    return made;
  }

  ffi::Error Run(const Execution& execution, const DeviceState& any_state) const override {
    const auto& state = static_cast<const LaunchState&>(any_state);
    AddressList args, results;
    if (!args.Read(execution.operands) || !results.Read(execution.outputs)) {
      return Internal(
          "an operand or a result of the call is not an array, or the call has too many");
    }
    if ((args.bits() | results.bits()) % kVectorBytes == 0) {
      return Launch(execution, state, args, results);
    }
    // XLA aligns what it allocates, but a slice of an array may begin at any address.
    auto unaligned = MakeLaunchState(execution, state, Alignment::kOfThisExecution);
    return unaligned ? Launch(execution, **unaligned, args, results) : unaligned.error();
  }

  ffi::Error Launch(const Execution& execution, const LaunchState& state, const AddressList& args,
                    const AddressList& results) const {
    Params ranks[2];
    std::memcpy(static_cast<void*>(ranks), &state.params, sizeof(Params));
    view_in(ranks[0]).run = state.has_run && !IsCaptured(execution) ? execution.run : 0;
    Point(state, args.addresses(), results.addresses(), ranks[0]);
    if (state.ranks_of_device > 1) {
      std::memcpy(static_cast<void*>(&ranks[1]), ranks, sizeof(Params));
      ++view_in(ranks[1]).rank;
      ++view_in(ranks[1]).error;
      Point(state, AddressList(args, state.arg_bytes).addresses(),
            AddressList(results, state.result_bytes).addresses(), ranks[1]);
    }
    return Start(execution, state, args.addresses(), results.addresses(), [&](cudaStream_t stream) {
      return state.kernels->launch(ranks, state.blocks, stream);
    });
  }

  void Point(const LaunchState& state, Addresses args, Addresses results, Params& params) const {
    call_.Point(args, results, &params);
    // Launches that overlap have different results, so the address of a result identifies a launch.
    const bool has_name = state.name < results.size();
    view_in(params).launch = has_name ? reinterpret_cast<uint64_t>(results[state.name]) : 1;
  }

  static RankView& view_in(Params& params) { return const_cast<RankView&>(view_of(params)); }

  // An execution has the same id on all devices, so kernels detect two threads that interleave
  // their programs. A captured call has no id, because a replay has the arguments of the capture.
  // The id travels next to the signature and is not part of it, because XLA decides on each device
  // whether to replay.
  static bool IsCaptured(const Execution& execution) {
    if (!execution.may_be_captured) return false;
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    cudaStreamIsCapturing(execution.stream, &status);
    return status != cudaStreamCaptureStatusNone;
  }

  const Call call_;
};

}  // namespace moe_a2a
