// The state of a call that cuda/calls describes, and of a done.
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
#include "kernels/grid.h"
#include "kernels/launch.h"
#include "runtime/cuda_error.h"
#include "runtime/slice.h"

namespace moe_a2a {

template <typename Call>
class CallStateOf final : public CallState {
 public:
  using Params = typename Call::Params;

  CallStateOf(CallAttributes attributes, Call call)
      : CallState(std::move(attributes)), call_(std::move(call)) {}

 private:
  struct LaunchState final : DeviceState {
    LaunchState(Workspace& workspace, int32_t ordinal) : DeviceState(workspace, ordinal) {
      // Ranks that share a device must also have equal padding bytes (device/ranks.cuh).
      std::memset(static_cast<void*>(&params), 0, sizeof(params));
    }

    Params params;  // of the first rank
    int blocks;
    bool has_run;                   // true: RankView::run is the id of the execution
    std::vector<int64_t> bytes;     // of each array, per rank
    std::vector<Binding> bindings;  // pointers among `params`
    size_t name;                    // index of the first result with bytes, or number of arrays
  };

  Problem MakeDeviceState(const Execution& execution, Workspace& workspace,
                          std::unique_ptr<const DeviceState>* made) const override {
    auto state = std::make_unique<LaunchState>(workspace, execution.ordinal);
    MOE_A2A_TRY(Describe(execution, Alignment::kVector, state.get()));
    *made = std::move(state);
    return {};
  }

  Problem Describe(const Execution& execution, Alignment alignment, LaunchState* state) const {
    RankView view = {};
    int64_t num_sms;
    Arrays args, results;
    const Workspace& workspace = state->workspace;
    const int64_t num_ranks = workspace.topology().ranks_of_device();
    MOE_A2A_TRY(SetView(workspace, Call::kOperation, execution.ordinal, &view));
    MOE_A2A_TRY(SetBlocksOfRank(workspace, execution.ordinal, &num_sms));
    MOE_A2A_TRY(DecodeArrays(execution.operands, 0, num_ranks, alignment, &args));
    MOE_A2A_TRY(DecodeArrays(execution.outputs, args.size(), num_ranks, alignment, &results));
    for (const Array& array : args) state->bytes.push_back(array.bytes);
    for (const Array& array : results) state->bytes.push_back(array.bytes);
    state->name = std::find_if(state->bytes.begin() + args.size(), state->bytes.end(),
                               [](int64_t bytes) { return bytes > 0; }) -
                  state->bytes.begin();
    Params& params = state->params;
    if (const Problem p =
            call_.Describe({view, num_ranks > 1, num_sms, &state->bindings},
                           {args.data(), args.size()}, {results.data(), results.size()}, &params);
        !p.empty()) {
      return Invalid(p);
    }
    if (const int64_t bytes = HalfBytes<Call>(params); bytes > attributes_.half_bytes) {
      return Concat("the landing zone needs ", bytes, " bytes; the lowering reserved ",
                    attributes_.half_bytes);
    }
    state->blocks = grid_of(params, num_sms).blocks;
    state->has_run = !workspace.spans_processes();  // ids of executions are per process
    return {};
  }

  Problem Run(const Execution& execution, const DeviceState& any_state) const override {
    const auto& state = static_cast<const LaunchState&>(any_state);
    AddressList arrays;
    if (!arrays.Read(execution.operands) || !arrays.Read(execution.outputs)) {
      return "an operand or a result of the call is not an array, or the call has too many";
    }
    if (arrays.bits() % kVectorBytes == 0) return Launch(execution, state, arrays.addresses());
    // XLA aligns its allocations, but a slice of an array may begin at any address.
    LaunchState unaligned(state.workspace, execution.ordinal);
    MOE_A2A_TRY(Describe(execution, Alignment::kOfThisExecution, &unaligned));
    return Launch(execution, unaligned, arrays.addresses());
  }

  Problem Launch(const Execution& execution, const LaunchState& state, Addresses arrays) const {
    Params ranks[2];
    const int64_t run = state.has_run && !IsCaptured(execution) ? execution.run : 0;
    const int num_ranks = std::min(state.workspace.topology().ranks_of_device(), 2);
    for (int i = 0; i < num_ranks; ++i) {
      const auto address_of = [&](size_t array) { return arrays[array] + i * state.bytes[array]; };
      CopyParams(state.params, state.bindings, address_of, &ranks[i]);
      RankView& view = exchange_of(ranks[i]).view;
      view.rank += i;
      view.error += i;
      view.run = run;
      // A result's address identifies the launch, because overlapping launches share no result.
      view.launch =
          state.name < arrays.size() ? reinterpret_cast<uint64_t>(address_of(state.name)) : 1;
    }
    cudaStream_t stream = execution.stream;
    if (state.side != nullptr) MOE_A2A_TRY(state.side->Fork(stream, execution.run, &stream));
    MOE_A2A_TRY(ProblemOf(state.workspace.kernels().launch(ranks, state.blocks, stream),
                          "launching a kernel"));
    return state.side == nullptr ? Problem() : state.side->Started(execution.run, arrays);
  }

  // A captured call has no id, because all its replays would have equal ids (docs/protocol.md, 9).
  static bool IsCaptured(const Execution& execution) {
    if (!execution.may_be_captured) return false;
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    cudaStreamIsCapturing(execution.stream, &status);
    return status != cudaStreamCaptureStatusNone;
  }

  const Call call_;
};

// The done of a split exchange. Operands: the operands and then the results of the start. Results:
// the results of the start, in the same memory.
class Done final : public CallState {
 public:
  explicit Done(CallAttributes attributes) : CallState(std::move(attributes)) {}

 private:
  Problem MakeDeviceState(const Execution& execution, Workspace& workspace,
                          std::unique_ptr<const DeviceState>* made) const override {
    *made = std::make_unique<const DeviceState>(workspace, execution.ordinal);
    return {};
  }

  Problem Run(const Execution& execution, const DeviceState& state) const override {
    AddressList list;
    const bool is_read = list.Read(execution.operands) && list.Read(execution.outputs);
    const size_t num_results = execution.outputs.size();
    if (!is_read || state.side == nullptr || execution.operands.size() < num_results) {
      return Invalid("done needs the operands and the results of the start of a split exchange");
    }
    const Addresses args = {list.addresses().begin(), execution.operands.size()};
    if (!std::equal(args.end() - num_results, args.end(), args.end())) {
      return "XLA has moved the results of a start before its done. Call start and done in the "
             "same function";
    }
    return state.side->Join(execution.stream, execution.run, args);
  }
};

}  // namespace moe_a2a
