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

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "calls/array.h"
#include "calls/call.h"
#include "calls/routing.h"
#include "ffi/attributes.h"
#include "ffi/errors.h"
#include "kernels/grid.h"
#include "kernels/launch.h"
#include "runtime/per_device.h"
#include "runtime/slice.h"
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

// What does not change between the executions of a call on one device.
struct Site {
  virtual ~Site() = default;

  Topology topology;
  Workspace* workspace = nullptr;
  const Kernels* kernels = nullptr;
  SideStream* side = nullptr;   // of a split exchange, else null
  int64_t ranks_of_device = 1;  // more than one: all ranks share the device and the launch
#ifdef MOE_A2A_TEST_HOOKS
  bool is_uncapped = false;
#endif
};

class Exchange {
 public:
  // XLA gives the type a number when Python registers it.
  static ffi::TypeId id;
  static const ffi::TypeInfo info;

  virtual ~Exchange() = default;

  // Reserves the workspace when a program is loaded, before any of its calls runs anywhere. Ranks on one device
  // learn which one it is when the program runs, and need not wait for each other: Initialize() reserves.
  ffi::Error Load();

  // XLA calls this before every execution, also of those that replay a CUDA graph and so never come to
  // Execute(): a closed workspace opens again, and a failure raises.
  ffi::Error Initialize(int32_t ordinal);

  // Launches the exchange, or joins it. Where all is as in an earlier execution, it allocates nothing and takes no lock that
  // another call takes.
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

// Where the arrays of a call lie: at multiples of 16 bytes, as in most executions, or where this execution has them.
enum class Alignment { kVector, kOfThisExecution };

// Returns the operands or results of a call, of its first rank. Ranks that share a device have a common buffer with a
// leading axis of ranks.
ffi::ErrorOr<Arrays> DecodeArrays(const ffi::RemainingArgs& buffers, int64_t ranks_of_device,
                                  Alignment alignment);
ffi::ErrorOr<Arrays> DecodeArrays(const ffi::RemainingRets& buffers, int64_t ranks_of_device,
                                  Alignment alignment);

// The addresses of the operands or results of one execution.
class AddressList {
 public:
  AddressList() = default;
  // The same arrays of the next rank. `bytes` are those of each array.
  AddressList(const AddressList& first, const std::vector<int64_t>& bytes) : count_(first.count_) {
    for (size_t i = 0; i < count_; ++i) list_[i] = first.list_[i] + bytes[i];
  }

  // Returns False if a buffer is none, or if there are more than a call can have.
  bool Read(const ffi::RemainingArgs& buffers);
  bool Read(const ffi::RemainingRets& buffers);

  Addresses addresses() const { return {list_, count_}; }
  // Returns the bits of all addresses.
  uintptr_t bits() const { return bits_; }

 private:
  template <typename Buffers>
  bool ReadBuffers(const Buffers& buffers);

  static constexpr size_t kMost = 64;
  // A done has the most: the operands of its start and the results.
  static_assert(kMost >= 2 * kMaxArrays + 1 + kNumRoutingArrays + kMaxArrays);
  static_assert(kMost >= kNumPlanArrays + kMaxArrays);

  char* list_[kMost];
  size_t count_ = 0;
  uintptr_t bits_ = 0;
};

// Launches an exchange: a whole one on XLA's stream, a split one on the side stream, until its done.
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

// An exchange of one of the calls in cuda/calls.
template <typename Call>
class ExchangeOf final : public Exchange {
 public:
  using Params = typename Call::Params;

  ExchangeOf(CallAttributes attributes, Call call)
      : Exchange(std::move(attributes)), call_(std::move(call)) {}

 private:
  struct CallSite final : Site {
    explicit CallSite(const Site& site) : Site(site) {
      // All of their bytes: the padding, too, must be equal on all ranks that share a device (device/ranks.cuh).
      std::memset(static_cast<void*>(&params), 0, sizeof(params));
    }

    Params params;  // of the first rank, without addresses
    int blocks;
    bool has_run;  // its view carries the id of the execution
    std::vector<int64_t> arg_bytes, result_bytes;
    size_t name;  // the result that names a launch; as many as there are results: none does
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
    // A rank alone has own tokens only, which never enter a zone.
    const int64_t num_ranks = view->num_ranks, bytes = Call::ZoneBytes(params) * num_ranks;
    if (num_ranks > 1 && bytes > attributes().slot_bytes) {
      return ffi::Unexpected(Internal("the landing zone needs " + std::to_string(bytes) +
                                      " bytes; the lowering reserved " +
                                      std::to_string(attributes().slot_bytes)));
    }
    made->blocks = grid_of(params, *num_sms).blocks;
    // Other processes number their executions themselves.
    made->has_run = !site.workspace->spans_processes();
    return made;
  }

  ffi::Error Run(const Execution& execution, const Site& any_site) const override {
    const auto& site = static_cast<const CallSite&>(any_site);
    AddressList args, results;
    if (!args.Read(execution.operands) || !results.Read(execution.outputs)) {
      return Internal("an operand or a result of the call is no array");
    }
    if ((args.bits() | results.bits()) % kVectorBytes == 0) {
      return Launch(execution, site, args, results);
    }
    // XLA aligns what it allocates, but a part of an array may lie anywhere.
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
    // Launches that overlap have other results at the same time.
    const bool has_name = site.name < results.size();
    view_in(params).launch = has_name ? reinterpret_cast<uint64_t>(results[site.name]) : 1;
  }

  static RankView& view_in(Params& params) { return const_cast<RankView&>(view_of(params)); }

  // One execution has one id on all devices: two threads that interleave their programs are caught.
  // Not so where XLA replays a captured call, which it decides device by device; hence beside the
  // signature and not in it.
  static bool IsCaptured(const Execution& execution) {
    if (!execution.may_be_captured) return false;
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    cudaStreamIsCapturing(execution.stream, &status);
    return status != cudaStreamCaptureStatusNone;
  }

  const Call call_;
};

}  // namespace moe_a2a

#endif  // MOE_A2A_FFI_EXCHANGE_H_
