// The state of a call whose operation is described in cuda/calls.
#ifndef MOE_A2A_FFI_EXCHANGE_OF_H_
#define MOE_A2A_FFI_EXCHANGE_OF_H_

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
#include "ffi/errors.h"
#include "ffi/exchange.h"
#include "kernels/grid.h"
#include "runtime/slice.h"

namespace moe_a2a {

// Launches a whole exchange on XLA's stream, or a split exchange on the side stream.
template <typename Launcher>
ffi::Error Start(const Execution& execution, const Site& site, Addresses args, Addresses results,
                 const Launcher& launch) {
  if (site.side == nullptr) return ToError(launch(execution.stream));
  cudaStream_t side;
  if (Problem p = site.side->Fork(execution.stream, execution.run, &side); !p.empty()) {
    return ToError(p);
  }
  if (const cudaError_t error = launch(side); error != cudaSuccess) return ToError(error);
  return ToError(site.side->Started(execution.run, args, results));
}

template <typename Call>
class ExchangeOf final : public Exchange {
 public:
  using Params = typename Call::Params;

  ExchangeOf(CallAttributes attributes, Call call)
      : Exchange(std::move(attributes)), call_(std::move(call)) {}

 private:
  struct CallSite final : Site {
    explicit CallSite(const Site& site) : Site(site) {
      // Padding bytes, too, must be equal on all ranks that share a device (device/ranks.cuh).
      std::memset(static_cast<void*>(&params), 0, sizeof(params));
    }

    Params params;  // of the first rank, without addresses
    int blocks;
    bool has_run;  // the view has the id of the execution
    std::vector<int64_t> arg_bytes, result_bytes;
    size_t name;  // index of the result that identifies a launch; no result: their number
  };

  ffi::ErrorOr<std::unique_ptr<const Site>> MakeSite(const Execution& execution,
                                                     const Site& site) const override {
    auto made = MakeCallSite(execution, site, Alignment::kVector);
    if (!made) return ffi::Unexpected(made.error());
    return std::unique_ptr<const Site>(std::move(*made));
  }

  ffi::ErrorOr<std::unique_ptr<CallSite>> MakeCallSite(const Execution& execution, const Site& site,
                                                       Alignment alignment) const {
    auto view = ViewOf(attributes(), site, Call::kOperation, execution.ordinal);
    if (!view) return ffi::Unexpected(view.error());
    auto num_sms = BlocksOfRank(attributes(), site, execution.ordinal);
    if (!num_sms) return ffi::Unexpected(num_sms.error());
    auto args = DecodeArrays(execution.operands, site.ranks_of_device, alignment);
    if (!args) return ffi::Unexpected(args.error());
    auto results = DecodeArrays(execution.outputs, site.ranks_of_device, alignment);
    if (!results) return ffi::Unexpected(results.error());
    auto made = std::make_unique<CallSite>(site);
    for (const Array& array : *args) made->arg_bytes.push_back(array.bytes);
    for (const Array& array : *results) made->result_bytes.push_back(array.bytes);
    made->name = std::find_if(results->begin(), results->end(),
                              [](const Array& array) { return array.bytes > 0; }) -
                 results->begin();
    Params& params = made->params;
    if (const Problem p =
            call_.Describe({*view, site.topology.is_wide(), *num_sms}, {args->data(), args->size()},
                           {results->data(), results->size()}, &params);
        !p.empty()) {
      return ffi::Unexpected(Invalid(p));
    }
    // A single rank has only its own tokens, which never enter a zone.
    const int64_t num_ranks = view->num_ranks, bytes = Call::ZoneBytes(params) * num_ranks;
    if (num_ranks > 1 && bytes > attributes().slot_bytes) {
      return ffi::Unexpected(Internal("the landing zone needs " + std::to_string(bytes) +
                                      " bytes; the lowering reserved " +
                                      std::to_string(attributes().slot_bytes)));
    }
    made->blocks = grid_of(params, *num_sms).blocks;
    // Each process numbers its executions independently.
    made->has_run = !site.workspace->spans_processes();
    return made;
  }

  ffi::Error Run(const Execution& execution, const Site& any_site) const override {
    const auto& site = static_cast<const CallSite&>(any_site);
    AddressList args, results;
    if (!args.Read(execution.operands) || !results.Read(execution.outputs)) {
      return Internal(
          "an operand or a result of the call is not an array, or the call has too many");
    }
    if ((args.bits() | results.bits()) % kVectorBytes == 0) {
      return Launch(execution, site, args, results);
    }
    // XLA aligns what it allocates, but a slice of an array may begin at any address.
    auto unaligned = MakeCallSite(execution, site, Alignment::kOfThisExecution);
    return unaligned ? Launch(execution, **unaligned, args, results) : unaligned.error();
  }

  ffi::Error Launch(const Execution& execution, const CallSite& site, const AddressList& args,
                    const AddressList& results) const {
    Params ranks[2];
    std::memcpy(static_cast<void*>(ranks), &site.params, sizeof(Params));
    view_in(ranks[0]).run = site.has_run && !IsCaptured(execution) ? execution.run : 0;
    Point(site, args.addresses(), results.addresses(), ranks[0]);
    if (site.ranks_of_device > 1) {
      std::memcpy(static_cast<void*>(&ranks[1]), ranks, sizeof(Params));
      ++view_in(ranks[1]).rank;
      ++view_in(ranks[1]).error;
      Point(site, AddressList(args, site.arg_bytes).addresses(),
            AddressList(results, site.result_bytes).addresses(), ranks[1]);
    }
    return Start(execution, site, args.addresses(), results.addresses(), [&](cudaStream_t stream) {
      return Call::Launch(*site.kernels, ranks, site.blocks, stream);
    });
  }

  void Point(const CallSite& site, Addresses args, Addresses results, Params& params) const {
    call_.Point(args, results, &params);
    // Launches that overlap have different results, so the address of a result identifies a launch.
    const bool has_name = site.name < results.size();
    view_in(params).launch = has_name ? reinterpret_cast<uint64_t>(results[site.name]) : 1;
  }

  static RankView& view_in(Params& params) { return const_cast<RankView&>(view_of(params)); }

  // An execution has the same id on all devices. So kernels notice two threads that interleave their programs. A
  // captured call has no id, because a replay has the arguments of the capture. XLA decides on each device whether to
  // replay. So the id travels next to the signature and is not part of it.
  static bool IsCaptured(const Execution& execution) {
    if (!execution.may_be_captured) return false;
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    cudaStreamIsCapturing(execution.stream, &status);
    return status != cudaStreamCaptureStatusNone;
  }

  const Call call_;
};

}  // namespace moe_a2a

#endif  // MOE_A2A_FFI_EXCHANGE_OF_H_
