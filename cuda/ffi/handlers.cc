// XLA's entry points: decode, check, launch. The only file that includes XLA's headers.
#include "ffi/handlers.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <functional>
#include <initializer_list>
#include <limits>
#include <numeric>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "kernels/grid.h"
#include "kernels/launch.h"
#include "layout.h"
#include "runtime/devices.h"
#include "runtime/workspace.h"
#include "xla/ffi/api/ffi.h"

namespace moe_a2a {
namespace {

namespace ffi = xla::ffi;

// What every call carries as attributes; jax_moe_a2a/_src/lowering/custom_call.py writes them.
struct CallAttributes {
  Topology topology;
  Ring ring;
  int64_t num_sms;
  int64_t timeout_ns;
  int64_t first_timeout_ns;
  int64_t slot_bytes;   // of the landing zones of all sources
  bool raise_failures;  // else a failure shows in the outputs only
  int64_t scopes;       // a hash of the names that the program gives to where the call stands

  // Whether all ranks are on the device that runs the call. The call then names no device.
  bool is_on_one_device() const { return topology.devices.empty(); }
};

ffi::Error Invalid(std::string message) {
  return ffi::Error::InvalidArgument("jax_moe_a2a: " + std::move(message));
}

ffi::Error Internal(std::string message) {
  return ffi::Error::Internal("jax_moe_a2a: " + std::move(message));
}

// A lack of memory is what XLA calls it, so that it looks like one of XLA's own.
ffi::Error ToError(const Problem& problem) {
  if (problem.empty()) return ffi::Error::Success();
  if (!problem.lacks_memory) return Internal(problem);
  return ffi::Error(ffi::ErrorCode::kResourceExhausted, "jax_moe_a2a: " + problem);
}

ffi::ErrorOr<CallAttributes> DecodeAttributes(const ffi::Dictionary& attributes) {
  CallAttributes call;
  const auto devices = attributes.get<ffi::Span<const int64_t>>("devices");
  const auto num_ranks = attributes.get<int64_t>("num_ranks");
  const auto p2p_world_size = attributes.get<int64_t>("p2p_world_size");
  const auto ring = attributes.get<int64_t>("ring");
  const auto num_sms = attributes.get<int64_t>("num_sms");
  const auto timeout_ns = attributes.get<int64_t>("timeout_ns");
  const auto first_timeout_ns = attributes.get<int64_t>("first_timeout_ns");
  const auto slot_bytes = attributes.get<int64_t>("slot_bytes");
  const auto scopes = attributes.get<int64_t>("scopes");
  const auto raise_failures = attributes.get<bool>("raise_failures");
  if (!devices || !num_ranks || !p2p_world_size || !ring || !num_sms || !timeout_ns ||
      !first_timeout_ns || !slot_bytes || !scopes || !raise_failures) {
    return ffi::Unexpected(Invalid(
        "the call lacks an attribute. Another version of jax_moe_a2a lowered it; lower it again"));
  }
  call.topology.devices.assign(devices->begin(), devices->end());
  call.topology.num_ranks = static_cast<int>(*num_ranks);
  call.topology.p2p_world_size = static_cast<int>(*p2p_world_size);
  if (*num_ranks < 1 || *num_ranks > kMaxRanks || *p2p_world_size < 1 ||
      devices->size() % *num_ranks != 0) {
    return ffi::Unexpected(Invalid("num_ranks must divide the devices and be at most " +
                                   std::to_string(kMaxRanks) + "; got " +
                                   std::to_string(*num_ranks)));
  }
  call.ring = static_cast<Ring>(*ring);
  call.num_sms = *num_sms;
  call.timeout_ns = *timeout_ns;
  call.first_timeout_ns = *first_timeout_ns;
  call.slot_bytes = *slot_bytes;
  call.scopes = *scopes;
  call.raise_failures = *raise_failures;
  return call;
}

// The same for a call that runs on the device `ordinal`, with the devices of its topology.
ffi::ErrorOr<CallAttributes> DecodeAttributes(const ffi::Dictionary& attributes, int32_t ordinal) {
  auto call = DecodeAttributes(attributes);
  if (!call || !call->is_on_one_device()) return call;
  int64_t id;
  if (!FindOwnDevice(ordinal, &id)) {
    return ffi::Unexpected(Invalid("the program runs on GPU " + std::to_string(ordinal) +
                                   ", which jax_moe_a2a does not know in this process; call "
                                   "jax_moe_a2a.available() before the program"));
  }
  call->topology.devices.assign(call->topology.num_ranks, id);
  return call;
}

// Mixes a value into a hash (the finalizer of splitmix64, by Steele, Lea and Flood).
void Mix(uint64_t& hash, uint64_t value) {
  hash += value + 0x9E3779B97F4A7C15;
  hash = (hash ^ (hash >> 30)) * 0xBF58476D1CE4E5B9;
  hash = (hash ^ (hash >> 27)) * 0x94D049BB133111EB;
  hash ^= hash >> 31;
}

// Opens or grows the workspace, and reports an earlier failure, if the call is to raise it. Otherwise the kernels of
// the failed group run: they end at once, with NaN.
ffi::Error Prepare(const CallAttributes& call) {
  Workspace& workspace = Workspace::Get(call.topology, call.ring);
  if (Problem p = workspace.Reserve(call.slot_bytes, call.timeout_ns); !p.empty()) {
    return ToError(p);
  }
  if (!call.raise_failures) return ffi::Error::Success();
  std::string failure = workspace.Failure();
  if (failure.empty()) return ffi::Error::Success();
  return Internal(failure + ". The group stays stopped until group.close() is called.");
}

// An operand or a result, as one rank has it.
struct Array {
  ffi::DataType type;
  ffi::Span<const int64_t> dimensions;
  char* data;
  int64_t bytes;
  // Bits of the addresses at which the array lies, on any rank of the device: the lowest tells the alignment.
  uintptr_t address_bits;
};
using Arrays = std::vector<Array>;

ffi::AnyBuffer Buffer(ffi::AnyBuffer buffer) { return buffer; }
ffi::AnyBuffer Buffer(ffi::Result<ffi::AnyBuffer> buffer) { return *buffer; }

// The operands or results of a call, of its first rank. Ranks that share a device have a common buffer with a
// leading axis of ranks.
template <typename Buffers>
ffi::ErrorOr<Arrays> Decode(const Buffers& buffers, int64_t ranks_of_device) {
  Arrays decoded;
  decoded.reserve(buffers.size());
  for (size_t i = 0; i < buffers.size(); ++i) {
    auto any = buffers.template get<ffi::AnyBuffer>(i);
    if (!any) return ffi::Unexpected(any.error());
    const ffi::AnyBuffer buffer = Buffer(*any);
    auto dimensions = buffer.dimensions();
    if (ranks_of_device > 1) {
      if (dimensions.size() == 0 || dimensions[0] != ranks_of_device) {
        return ffi::Unexpected(Invalid("every array of a call with " +
                                       std::to_string(ranks_of_device) +
                                       " ranks on one GPU must have a leading axis of that size; "
                                       "array " +
                                       std::to_string(i) + " has none"));
      }
      dimensions = {dimensions.begin() + 1, dimensions.size() - 1};
    }
    const int64_t bytes = static_cast<int64_t>(buffer.size_bytes()) / ranks_of_device;
    uintptr_t address_bits = reinterpret_cast<uintptr_t>(buffer.untyped_data());
    if (ranks_of_device > 1) address_bits |= bytes;
    decoded.push_back({buffer.element_type(), dimensions, static_cast<char*>(buffer.untyped_data()),
                       bytes, address_bits});
  }
  return decoded;
}

// An error ends the execution, and its memory goes to others in the order of XLA's stream: that stream waits
// for all that is still written beside it.
ffi::Error Abandon(SideStream* side, cudaStream_t stream, ffi::Error error) {
  if (side != nullptr) side->JoinAll(stream);
  return error;
}

// A call that is about to be launched, as its first rank on this device sees it.
struct Call {
  RankView view;
  const Kernels* kernels;
  bool is_wide;             // some ranks are beyond the load/store domain
  int64_t ranks_of_device;  // more than one: all ranks share the device and the launch
  SideStream* side;         // of a split exchange, else null
  int64_t run;              // of this execution
  int64_t num_sms;
  int64_t slot_bytes;
  Arrays args, results;

  // Launches that overlap have other results at the same time.
  void name_launch() {
    for (const Array& array : results) {
      if (array.bytes == 0) continue;
      view.launch = reinterpret_cast<uint64_t>(array.data);
      return;
    }
    view.launch = 1;  // nothing that could be damaged
  }

  // The call as the next rank on this device sees it.
  Call next() const {
    Call call = *this;
    ++call.view.rank;
    ++call.view.error;
    for (Arrays* arrays : {&call.args, &call.results}) {
      for (Array& array : *arrays) array.data += array.bytes;
    }
    call.name_launch();
    return call;
  }
};

// The blocks that a launch may have for each of `ranks_of_device` ranks on a device: as many as the call asks for,
// and no more than the device has multiprocessors for.
ffi::ErrorOr<int64_t> BlocksOfRank(int32_t ordinal, const CallAttributes& attributes,
                                   int64_t ranks_of_device) {
  const int64_t num_ranks = attributes.topology.num_ranks, num_sms = attributes.num_sms;
  const bool is_split = moe_a2a::is_split(attributes.ring);
  int sms = 0;
  if (const cudaError_t error =
          cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, ordinal);
      error != cudaSuccess) {
    return ffi::Unexpected(Internal(std::string("asking for the device's multiprocessors: ") +
                                    cudaGetErrorString(error)));
  }
  if (num_sms < 1) {
    return ffi::Unexpected(Invalid("num_sms must be at least 1; got " + std::to_string(num_sms)));
  }
#ifdef MOE_A2A_TEST_HOOKS
  // Tests launch more blocks than there is room for.
  const Workspace& workspace = Workspace::Get(attributes.topology, attributes.ring);
  if (ranks_of_device == 1 || workspace.is_uncapped()) return num_sms;
#endif
  if (ranks_of_device == 1) {
    if (const int64_t most = launch_blocks(num_ranks, sms); most > 0) {
      return std::min(most, num_sms);
    }
    return ffi::Unexpected(
        Invalid("an exchange of several ranks leaves one multiprocessor to others; GPU " +
                std::to_string(ordinal) + " has " + std::to_string(sms) +
                ": use implementation='portable'"));
  }
  const int64_t most = colocated_blocks(num_ranks, sms, is_split);
  if (most > 0) return std::min(most, num_sms);
  return ffi::Unexpected(
      Invalid(std::to_string(num_ranks) + " ranks on one GPU need " + std::to_string(num_ranks) +
              (is_split ? " multiprocessors for whole and as many for split exchanges"
                        : " multiprocessors") +
              "; GPU " + std::to_string(ordinal) + " has " + std::to_string(sms)));
}

// Fills in all, but of the view the shapes' part of the signature.
ffi::ErrorOr<Call> Begin(const ffi::Dictionary& dictionary, Operation operation, int32_t ordinal,
                         ffi::RunId run_id, cudaStream_t stream, const ffi::RemainingArgs& operands,
                         const ffi::RemainingRets& outputs) {
  auto attributes = DecodeAttributes(dictionary, ordinal);
  if (!attributes) return ffi::Unexpected(attributes.error());
  Workspace& workspace = Workspace::Get(attributes->topology, attributes->ring);
  const auto fail = [&](ffi::Error error) {
    return ffi::Unexpected(Abandon(workspace.Side(ordinal), stream, std::move(error)));
  };
  if (ffi::Error error = Prepare(*attributes); error.failure()) return fail(error);
  Call call = {};
  if (Problem p = workspace.View(ordinal, &call.view); !p.empty()) return fail(Invalid(p));
  call.kernels = &workspace.kernels();
  call.is_wide = attributes->topology.is_wide();
  call.side = workspace.Side(ordinal);
  call.run = run_id.run_id;
  call.slot_bytes = attributes->slot_bytes;
  call.ranks_of_device = attributes->topology.is_colocated() ? attributes->topology.num_ranks : 1;
  auto blocks = BlocksOfRank(ordinal, *attributes, call.ranks_of_device);
  if (!blocks) return fail(blocks.error());
  call.num_sms = *blocks;
  call.view.timeout_ns = attributes->timeout_ns;
  call.view.first_timeout_ns = attributes->first_timeout_ns;
  call.view.operation = operation;
  uint64_t& signature = call.view.signature;
  Mix(signature, kProtocolVersion);
  for (int64_t device : attributes->topology.devices) Mix(signature, device);
  Mix(signature, attributes->topology.p2p_world_size);
  Mix(signature, static_cast<uint64_t>(attributes->ring));
  Mix(signature, static_cast<uint64_t>(operation));
  Mix(signature, attributes->slot_bytes);
  Mix(signature, attributes->scopes);
  // One execution has one id on all devices: two threads that interleave their programs are caught.
  // Not so where XLA replays a captured call, which it decides device by device; hence beside the
  // signature and not in it.
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  cudaStreamIsCapturing(stream, &capture);
  // Other processes number their executions themselves.
  if (capture == cudaStreamCaptureStatusNone && !workspace.spans_processes()) {
    call.view.run = run_id.run_id;
  }
  auto args = Decode(operands, call.ranks_of_device);
  if (!args) return fail(args.error());
  auto results = Decode(outputs, call.ranks_of_device);
  if (!results) return fail(results.error());
  call.args = std::move(*args);
  call.results = std::move(*results);
  call.name_launch();
  return call;
}

ffi::Error ToError(cudaError_t error) {
  if (error == cudaSuccess) return ffi::Error::Success();
  return ToError(Problem(std::string("launching a kernel: ") + cudaGetErrorString(error),
                         error == cudaErrorMemoryAllocation));
}

SideStream::Arrays Addresses(const Arrays& arrays) {
  SideStream::Arrays addresses;
  addresses.reserve(arrays.size());
  for (const Array& array : arrays) addresses.push_back(array.data);
  return addresses;
}

// Launches an exchange: a whole one on XLA's stream, a split one beside it until its Done.
template <typename Launcher>
ffi::Error Launch(const Call& call, cudaStream_t stream, const Launcher& launch) {
  if (call.side == nullptr) return ToError(launch(stream));
  cudaStream_t side;
  if (Problem p = call.side->Fork(stream, call.run, &side); !p.empty()) {
    return Abandon(call.side, stream, ToError(p));
  }
  if (const cudaError_t error = launch(side); error != cudaSuccess) {
    return Abandon(call.side, stream, ToError(error));
  }
  SideStream::Arrays arrays = Addresses(call.args);
  for (const void* written : Addresses(call.results)) arrays.push_back(written);
  const Problem p = call.side->Started(call.run, std::move(arrays));
  return p.empty() ? ffi::Error::Success() : Abandon(call.side, stream, ToError(p));
}

template <typename T = void>
T* Data(const Array& array) {
  return reinterpret_cast<T*>(array.data);
}

int64_t Elements(const Array& array, size_t first_axis) {
  int64_t elements = 1;
  for (size_t i = first_axis; i < array.dimensions.size(); ++i) elements *= array.dimensions[i];
  return elements;
}

int64_t Dimension(const Array& array, size_t axis) { return array.dimensions[axis]; }

int64_t ItemBytes(const Array& array) { return static_cast<int64_t>(ffi::ByteWidth(array.type)); }

FailureFill FillOf(const Array& result) {
  uint8_t byte = 0;
  switch (result.type) {
    case ffi::DataType::F8E4M3FNUZ:
    case ffi::DataType::F8E4M3B11FNUZ:
    case ffi::DataType::F8E5M2FNUZ: byte = 0x80; break;
    case ffi::DataType::F8E4M3:
    case ffi::DataType::F8E4M3FN:
    case ffi::DataType::F8E5M2:
    case ffi::DataType::F8E8M0FNU:
    case ffi::DataType::F8E3M4:
    case ffi::DataType::F16:
    case ffi::DataType::BF16:
    case ffi::DataType::F32:
    case ffi::DataType::F64:
    case ffi::DataType::C64:
    case ffi::DataType::C128: byte = 0xFF; break;
    default: break;
  }
  return {result.data, result.bytes, byte};
}

// The widest access that every row of `row_bytes` allows.
int32_t Width(int64_t row_bytes, std::initializer_list<const Array*> arrays) {
  uintptr_t bits = static_cast<uintptr_t>(row_bytes);
  for (const Array* array : arrays) bits |= array->address_bits;
  return bits % 16 == 0 ? 16 : bits % 4 == 0 ? 4 : bits % 2 == 0 ? 2 : 1;
}

// Type and axes of an array, for messages.
template <typename Axes>
std::string Describe(ffi::DataType type, const Axes& axes) {
  std::ostringstream text;
  text << static_cast<XLA_FFI_DataType>(type) << '[';
  const char* separator = "";
  for (int64_t axis : axes) {
    text << separator << axis;
    separator = ",";
  }
  text << ']';
  return text.str();
}

// The kernels index arrays by sizes that they take from others. A program that was exported elsewhere can call
// with any arrays, so each one is checked here.
using Axes = std::initializer_list<int64_t>;

// Checks the type of an array and all of its axes.
ffi::Error CheckShape(const Array& array, const char* name, ffi::DataType type, Axes axes) {
  if (array.type == type &&
      std::equal(axes.begin(), axes.end(), array.dimensions.begin(), array.dimensions.end())) {
    return ffi::Error::Success();
  }
  return Invalid(std::string(name) + " must be " + Describe(type, axes) + "; got " +
                 Describe(array.type, array.dimensions));
}

// Checks the leading axes of an array.
ffi::Error CheckLead(const Array& array, const char* name, Axes axes) {
  if (array.dimensions.size() >= axes.size() &&
      std::equal(axes.begin(), axes.end(), array.dimensions.begin())) {
    return ffi::Error::Success();
  }
  return Invalid(std::string(name) + " must have the leading axes " + Describe(array.type, axes) +
                 "; got " + Describe(array.type, array.dimensions));
}

// Checks the leading axes of an array and the bytes of what is behind them.
ffi::Error CheckItems(const Array& array, const char* name, Axes axes, int64_t item_bytes) {
  if (ffi::Error error = CheckLead(array, name, axes); error.failure()) return error;
  const int64_t items = std::accumulate(axes.begin(), axes.end(), int64_t{1}, std::multiplies<>());
  if (array.bytes == items * item_bytes) return ffi::Error::Success();
  return Invalid(std::string(name) + " must have " + std::to_string(item_bytes) +
                 " bytes behind the axes " + Describe(array.type, axes) + "; got " +
                 Describe(array.type, array.dimensions));
}

// Returns the first of some checks that has failed.
template <typename... Errors>
ffi::Error FirstOf(Errors... errors) {
  ffi::Error first = ffi::Error::Success();
  const auto take = [&](ffi::Error error) {
    if (first.success() && error.failure()) first = std::move(error);
  };
  (take(std::move(errors)), ...);
  return first;
}

constexpr size_t kNumRoutingArrays = 5;

// The routing arrays are the last operands: token_slot, slot_token, choice_rank, slot_rows, row_slot.
ffi::ErrorOr<RoutingView> DecodeRouting(const Arrays& args, const RankView& view) {
  if (args.size() < kNumRoutingArrays)
    return ffi::Unexpected(Invalid("routing arrays are missing"));
  const auto* routing = &args[args.size() - kNumRoutingArrays];
  if (routing[2].dimensions.size() != 2 || routing[4].dimensions.size() != 1) {
    return ffi::Unexpected(Invalid("choice_rank must have two axes and row_slot one; got " +
                                   Describe(routing[2].type, routing[2].dimensions) + " and " +
                                   Describe(routing[4].type, routing[4].dimensions)));
  }
  const int64_t num_tokens = Dimension(routing[2], 0);
  const int64_t top_k = Dimension(routing[2], 1);
  const int64_t capacity = Dimension(routing[4], 0);
  const int64_t num_ranks = view.num_ranks;
  constexpr ffi::DataType kInt32 = ffi::DataType::S32;
  if (ffi::Error error =
          FirstOf(CheckShape(routing[0], "token_slot", kInt32, {num_tokens, num_ranks}),
                  CheckShape(routing[1], "slot_token", kInt32, {num_ranks, num_tokens}),
                  CheckShape(routing[2], "choice_rank", kInt32, {num_tokens, top_k}),
                  CheckShape(routing[3], "slot_rows", kInt32, {num_ranks, num_tokens, top_k}),
                  CheckShape(routing[4], "row_slot", kInt32, {capacity}));
      error.failure()) {
    return ffi::Unexpected(error);
  }
  if (top_k > kMaxTopK) {
    return ffi::Unexpected(Invalid("top_k must be at most " + std::to_string(kMaxTopK) + "; got " +
                                   std::to_string(top_k)));
  }
  if (std::max(num_tokens, capacity) > std::numeric_limits<int32_t>::max()) {
    return ffi::Unexpected(Invalid("tokens and rows must be fewer than 2**31"));
  }
  return RoutingView{Data<const int32_t>(routing[0]), Data<const int32_t>(routing[1]),
                     Data<const int32_t>(routing[2]), Data<const int32_t>(routing[3]),
                     Data<const int32_t>(routing[4]), static_cast<int32_t>(num_tokens),
                     static_cast<int32_t>(top_k),     static_cast<int32_t>(capacity)};
}

void SignShapes(RankView& view, const RoutingView& routing) {
  Mix(view.signature, routing.num_tokens);
  Mix(view.signature, routing.top_k);
  Mix(view.signature, routing.capacity);
}

// Takes the next array of a zone; returns its offset.
int64_t TakeZone(int64_t& zone_bytes, int64_t num_slots, int64_t row_bytes, RankView& view) {
  Mix(view.signature, row_bytes);
  const int64_t offset = zone_bytes;
  zone_bytes += array_bytes(num_slots, row_bytes);
  return offset;
}

// A rank alone has own tokens only, which never enter a zone.
ffi::Error CheckZone(const Call& call, int64_t zone_bytes) {
  if (call.view.num_ranks == 1) return ffi::Error::Success();
  if (zone_bytes * call.view.num_ranks <= call.slot_bytes) return ffi::Error::Success();
  return Internal("the landing zone needs " + std::to_string(zone_bytes * call.view.num_ranks) +
                  " bytes; the lowering reserved " + std::to_string(call.slot_bytes));
}

// Reserves the workspace when a program is loaded, before any of its calls runs anywhere. Ranks on one device
// learn which one it is when the program runs, and need not wait for each other: Initialize() reserves.
ffi::Error Instantiate(ffi::Dictionary attributes) {
  auto call = DecodeAttributes(attributes);
  if (!call) return call.error();
  if (call->is_on_one_device()) return ffi::Error::Success();
  Workspace& workspace = Workspace::Get(call->topology, call->ring);
  return ToError(workspace.Reserve(call->slot_bytes, call->timeout_ns));
}

// XLA calls this before every execution, also of those that replay a CUDA graph and so never come to
// the handlers below: a closed workspace opens again, and a failure raises.
ffi::Error Initialize(int32_t ordinal, ffi::Dictionary attributes) {
  auto call = DecodeAttributes(attributes, ordinal);
  return call ? Prepare(*call) : call.error();
}

// Points the plan to the first kNumPlanArrays results.
void FillPlan(const Arrays& results, RoutePlan* plan) {
  for (int i = 0; i < kNumPlanArrays; ++i) plan->*kPlanArrays[i] = Data<int32_t>(results[i]);
}

ffi::Error FillRoute(const ffi::Dictionary& attributes, const Call& call, RouteParams& p) {
  const auto& args = call.args;
  const auto& results = call.results;
  const auto num_experts = attributes.get<int64_t>("num_experts");
  const auto alignment = attributes.get<int64_t>("alignment");
  const auto tokens_per_chunk = attributes.get<int64_t>("tokens_per_chunk");
  const auto first_choice = attributes.get<int64_t>("first_choice");
  const auto parts = attributes.get<int64_t>("parts");
  if (args.size() != 2 || results.size() != kNumPlanArrays + 3 || !num_experts || !alignment ||
      !tokens_per_chunk || !first_choice || !parts) {
    return Invalid("route needs ids and rank, and returns 14 arrays");
  }
  const auto& ids = args[0];
  const size_t rank = ids.dimensions.size();
  if (rank < 2 || ids.type != ffi::DataType::S32) {
    return Invalid("ids must be S32[..., num_tokens, top_k]; got " +
                   Describe(ids.type, ids.dimensions));
  }
  if (ffi::Error error = CheckShape(args[1], "rank", ffi::DataType::S32, {}); error.failure()) {
    return error;
  }
  p.view = call.view;
  p.ids = Data<const int32_t>(ids);
  p.rank = Data<const int32_t>(args[1]);
  p.num_tokens = static_cast<int32_t>(Dimension(ids, rank - 2));
  p.top_k = static_cast<int32_t>(Dimension(ids, rank - 1));
  p.batch = 1;
  for (size_t i = 0; i + 2 < rank; ++i) p.batch *= static_cast<int32_t>(Dimension(ids, i));
  p.num_experts = static_cast<int32_t>(*num_experts);
  p.alignment = static_cast<int32_t>(*alignment);
  p.capacity = static_cast<int32_t>(Dimension(results[4], results[4].dimensions.size() - 1));
  p.first_choice = static_cast<int32_t>(*first_choice);
  p.parts = static_cast<int32_t>(*parts);
  p.tokens_per_chunk = static_cast<int32_t>(*tokens_per_chunk);
  p.chunks = static_cast<int32_t>(std::max<int64_t>(1, ceil_div(p.num_tokens, p.tokens_per_chunk)));
  FillPlan(results, &p.plan);
  int32_t** scratch[] = {&p.all_ids, &p.expert_counts, &p.rank_counts};
  for (int i = 0; i < 3; ++i) {
    *scratch[i] = Data<int32_t>(results[kNumPlanArrays + i]);
  }
  if (int64_t{p.batch} * p.chunks > kMaxChunks || p.local_experts() > kMaxLocalExperts ||
      int64_t{p.levels()} * p.local_experts() > kMaxRouteCounts ||
      p.tokens_per_chunk > kMaxTokensPerRouteChunk || p.num_experts % p.view.num_ranks != 0 ||
      p.first_choice >= p.top_k || p.parts < 1 || p.local_experts() % p.parts != 0 ||
      (p.first_choice >= 0 && p.parts > 1)) {
    return Invalid(
        "route: too many tokens or local experts for one call, or groups that may not drop");
  }
  for (int64_t v : {p.batch, p.num_tokens, p.top_k, p.num_experts, p.capacity, p.alignment,
                    p.first_choice, p.parts}) {
    Mix(p.view.signature, v);
  }
  int64_t zone_bytes = 0;
  TakeZone(zone_bytes, 1, int64_t{p.batch} * p.num_tokens * p.top_k * sizeof(int32_t), p.view);
  return CheckZone(call, zone_bytes);
}

bool ToElementType(ffi::DataType type, ElementType* element) {
  switch (type) {
    case ffi::DataType::BF16: *element = ElementType::kBFloat16; return true;
    case ffi::DataType::F16: *element = ElementType::kFloat16; return true;
    case ffi::DataType::F32: *element = ElementType::kFloat32; return true;
    default: return false;
  }
}

// Adds `p.num_arrays` payload arrays, of which the last `num_scalars` hold an entry per choice.
ffi::Error AddMoved(const Array* args, const Array* results, int64_t num_scalars,
                    DispatchParams& p) {
  const RoutingView& routing = p.routing;
  for (int i = 0; i < p.num_arrays; ++i) {
    const auto& in = args[i];
    const auto& out = results[i];
    const bool per_choice = i >= p.num_arrays - num_scalars;
    if (ffi::Error error =
            per_choice ? CheckLead(in, "a choice array", {routing.num_tokens, routing.top_k})
                       : CheckLead(in, "a payload array", {routing.num_tokens});
        error.failure()) {
      return error;
    }
    MovedArray& array = p.arrays[i];
    array.in = Data<const char>(in);
    array.out = Data<char>(out);
    array.row_bytes = Elements(in, 1) * ItemBytes(in);
    array.choice_bytes = per_choice ? Elements(in, 2) * ItemBytes(in) : 0;
    const int64_t moved_bytes = per_choice ? array.choice_bytes : array.row_bytes;
    if (ffi::Error error = CheckItems(out, "rows", {routing.capacity}, moved_bytes);
        error.failure()) {
      return error;
    }
    array.width = Width(moved_bytes, {&in, &out});
    array.zone_offset = TakeZone(p.zone_bytes, p.routing.num_tokens, array.row_bytes, p.view);
    p.fills[i] = FillOf(out);
  }
  return ffi::Error::Success();
}

ffi::Error FillDispatch(const ffi::Dictionary& attributes, const Call& call, DispatchParams& p) {
  const auto& args = call.args;
  const auto& results = call.results;
  auto routing = DecodeRouting(args, call.view);
  if (!routing) return routing.error();
  const auto num_scalars = attributes.get<int64_t>("num_scalars");
  const auto leaves_tail = attributes.get<bool>("leaves_tail");
  if (!num_scalars || !leaves_tail || args.size() != results.size() + kNumRoutingArrays ||
      results.size() > kMaxArrays) {
    return Invalid("dispatch must return as many payload arrays as it gets, at most " +
                   std::to_string(kMaxArrays));
  }
  p.leaves_tail = *leaves_tail;
  p.view = call.view;
  p.routing = *routing;
  SignShapes(p.view, p.routing);
  p.num_arrays = static_cast<int32_t>(results.size());
  if (ffi::Error error = AddMoved(args.data(), results.data(), *num_scalars, p); error.failure()) {
    return error;
  }
  p.roles = grid_of(p, call.num_sms).roles;
  return CheckZone(call, p.zone_bytes);
}

// Decodes how leaves are quantized: NvFp4's scale is a number, or an operand of its own.
bool DecodeEncoding(const ffi::Dictionary& attributes, Encoding* encoding, bool* has_token_scales) {
  const auto format = attributes.get<int64_t>("format");
  const auto decode = attributes.get<bool>("decode");
  const auto num_leaves = attributes.get<int64_t>("num_leaves");
  const auto global_scale = attributes.get<float>("global_scale");
  const auto token_scales = attributes.get<bool>("has_token_scales");
  if (!format || !decode || !num_leaves || !global_scale || !token_scales) return false;
  encoding->format = static_cast<TokenFormat>(*format);
  encoding->decode = *decode;
  encoding->num_leaves = static_cast<int32_t>(*num_leaves);
  encoding->global_scale = *global_scale;
  *has_token_scales = *token_scales;
  return *format >= 1 && *format <= kNumFormats && *num_leaves >= 1;
}

// Adds the payload of a dispatch with a format: leaves, choice arrays, and maybe the scale of each token.
// Results: values and scales of each leaf, or its decoded rows; choice arrays.
ffi::Error AddEncoded(const Array* args, size_t num_args, const Array* results, size_t num_results,
                      int64_t num_scalars, bool has_token_scales, Encoding& encoding,
                      DispatchParams& exchange) {
  RankView& view = exchange.view;
  if (view.num_ranks == 1) {
    return Invalid(
        "a dispatch with a format needs two ranks or more, because own tokens use a landing zone");
  }
  const size_t leaves = encoding.num_leaves, scalars = num_scalars;
  const size_t results_per_leaf = encoding.decode ? 1 : 2;
  const bool scales_travel = has_token_scales && encoding.decode;
  if (num_args != leaves + scalars + has_token_scales ||
      num_results != results_per_leaf * leaves + scalars ||
      2 * leaves + scalars + scales_travel > kMaxArrays) {
    return Invalid("a dispatch with a format needs leaves and choice arrays that make at most " +
                   std::to_string(kMaxArrays));
  }
  for (int64_t v : {static_cast<int64_t>(encoding.format), int64_t{encoding.decode},
                    int64_t{encoding.num_leaves}, int64_t{has_token_scales}}) {
    Mix(view.signature, v);
  }
  const int64_t num_tokens = exchange.routing.num_tokens;
  const int64_t top_k = exchange.routing.top_k, capacity = exchange.routing.capacity;
  const auto add = [&](const void* in, void* out, int64_t row_bytes, int64_t choice_bytes,
                       int32_t width) {
    exchange.arrays[exchange.num_arrays++] = {
        static_cast<const char*>(in),
        static_cast<char*>(out),
        row_bytes,
        choice_bytes,
        TakeZone(exchange.zone_bytes, num_tokens, row_bytes, view),
        width};
  };
  for (size_t i = 0; i < leaves; ++i) {
    const auto& in = args[i];
    const auto* out = &results[i * results_per_leaf];
    if (ffi::Error error = CheckLead(in, "a payload array", {num_tokens}); error.failure()) {
      return error;
    }
    const int64_t elements = Elements(in, 1);
    if (!ToElementType(in.type, &encoding.type) || in.type != args[0].type ||
        (encoding.decode && out->type != in.type) || elements % group_size(encoding.format) != 0 ||
        Width(kVectorBytes, {&in}) != kVectorBytes ||
        (encoding.decode && Width(kVectorBytes, {out}) != kVectorBytes)) {
      return Invalid(
          "leaves with a format must have one type (bfloat16, float16 or float32) and whole "
          "groups");
    }
    const int64_t value_bytes = elements * value_bits(encoding.format) / 8;
    const int64_t scale_bytes =
        elements / group_size(encoding.format) * scale_size(encoding.format);
    if (ffi::Error error =
            encoding.decode
                ? CheckItems(out[0], "decoded rows", {capacity}, elements * ItemBytes(in))
                : FirstOf(CheckItems(out[0], "values of rows", {capacity}, value_bytes),
                          CheckItems(out[1], "scales of rows", {capacity}, scale_bytes));
        error.failure()) {
      return error;
    }
    if (encoding.decode) {
      add(in.data, out[0].data, value_bytes, 0, kVectorBytes);
      add(nullptr, nullptr, scale_bytes, 0, kVectorBytes);
    } else {
      for (const auto* each : {&out[0], &out[1]}) {
        const int64_t bytes = each == out ? value_bytes : scale_bytes;
        add(in.data, each->data, bytes, 0, Width(bytes, {each}));
      }
    }
  }
  for (size_t i = 0; i < scalars; ++i) {
    const auto& in = args[leaves + i];
    const auto& out = results[results_per_leaf * leaves + i];
    const int64_t choice_bytes = Elements(in, 2) * ItemBytes(in);
    if (ffi::Error error = FirstOf(CheckLead(in, "a choice array", {num_tokens, top_k}),
                                   CheckItems(out, "rows", {capacity}, choice_bytes));
        error.failure()) {
      return error;
    }
    add(in.data, out.data, Elements(in, 1) * ItemBytes(in), choice_bytes,
        Width(choice_bytes, {&in, &out}));
  }
  if (has_token_scales) {
    const Array& token_scales = args[leaves + scalars];
    if (ffi::Error error =
            CheckShape(token_scales, "token scales", ffi::DataType::F32, {num_tokens});
        error.failure()) {
      return error;
    }
    const void* scales = token_scales.data;
    encoding.token_scales = static_cast<const float*>(scales);
    if (scales_travel) add(scales, nullptr, sizeof(float), 0, sizeof(float));
  }
  for (size_t i = 0; i < num_results; ++i) exchange.fills[i] = FillOf(results[i]);
  return ffi::Error::Success();
}

// Operands: the payload, as AddEncoded() has it, and the routing.
ffi::Error FillFormatDispatch(const ffi::Dictionary& attributes, const Call& call,
                              FormatDispatchParams& p) {
  const auto& args = call.args;
  const auto& results = call.results;
  auto routing = DecodeRouting(args, call.view);
  if (!routing) return routing.error();
  const auto num_scalars = attributes.get<int64_t>("num_scalars");
  DispatchParams& exchange = p.exchange;
  Encoding& encoding = p.encoding;
  bool has_token_scales = false;
  const auto leaves_tail = attributes.get<bool>("leaves_tail");
  if (!num_scalars || !leaves_tail || !DecodeEncoding(attributes, &encoding, &has_token_scales)) {
    return Invalid("a dispatch with a format lacks an attribute");
  }
  exchange.leaves_tail = *leaves_tail;
  if (call.is_wide) return Invalid("a dispatch with a format must not span hosts");
  exchange.view = call.view;
  exchange.routing = *routing;
  SignShapes(exchange.view, exchange.routing);
  if (ffi::Error error =
          AddEncoded(args.data(), args.size() - kNumRoutingArrays, results.data(), results.size(),
                     *num_scalars, has_token_scales, encoding, exchange);
      error.failure()) {
    return error;
  }
  p.num_results = static_cast<int32_t>(results.size());
  exchange.roles = grid_of(p, call.num_sms).roles;
  return CheckZone(call, exchange.zone_bytes);
}

// Operands: ids, the rank, the payload. Results: the plan, the payload. With a format, if that is not 0, as
// AddEncoded() has them.
ffi::Error FillRoutedDispatch(const ffi::Dictionary& attributes, const Call& call,
                              RoutedDispatchParams& p) {
  const auto& args = call.args;
  const auto& results = call.results;
  const auto num_experts = attributes.get<int64_t>("num_experts");
  const auto alignment = attributes.get<int64_t>("alignment");
  const auto num_scalars = attributes.get<int64_t>("num_scalars");
  const auto format = attributes.get<int64_t>("format");
  const auto leaves_tail = attributes.get<bool>("leaves_tail");
  const auto first_choice = attributes.get<int64_t>("first_choice");
  constexpr size_t kNumFirst = 2;  // operands before the payload
  if (!num_experts || !alignment || !num_scalars || !format || !leaves_tail || !first_choice ||
      args.size() < kNumFirst || results.size() < kNumPlanArrays) {
    return Invalid("routed dispatch needs ids, rank, payload and all attributes");
  }
  if (call.is_wide) return Invalid("routed dispatch must not span hosts");
  const size_t num_payload = args.size() - kNumFirst, num_moved = results.size() - kNumPlanArrays;
  const auto& ids = args[0];
  if (ids.dimensions.size() != 2 || ids.type != ffi::DataType::S32) {
    return Invalid("ids must be S32[num_tokens, top_k]; got " + Describe(ids.type, ids.dimensions));
  }
  if (ffi::Error error = CheckShape(args[1], "rank", ffi::DataType::S32, {}); error.failure()) {
    return error;
  }
  DispatchParams& exchange = p.exchange;
  exchange.leaves_tail = *leaves_tail;
  exchange.view = call.view;
  exchange.routing.num_tokens = static_cast<int32_t>(Dimension(ids, 0));
  exchange.routing.top_k = static_cast<int32_t>(Dimension(ids, 1));
  exchange.routing.capacity = static_cast<int32_t>(Dimension(results[4], 0));
  SignShapes(exchange.view, exchange.routing);
  p.ids = Data<const int32_t>(ids);
  p.rank = Data<const int32_t>(args[1]);
  p.num_experts = static_cast<int32_t>(*num_experts);
  p.alignment = static_cast<int32_t>(*alignment);
  p.first_choice = static_cast<int32_t>(*first_choice);
  Mix(exchange.view.signature, p.num_experts);
  Mix(exchange.view.signature, p.alignment);
  Mix(exchange.view.signature, p.first_choice);
  FillPlan(results, &p.plan);
  const int num_ranks = exchange.view.num_ranks;
  const int64_t choices = Elements(ids, 0);
  if (exchange.routing.top_k > kMaxTopK || p.num_experts % num_ranks != 0 ||
      p.first_choice >= exchange.routing.top_k ||
      !fits_routed_dispatch(exchange.routing.num_tokens, choices * num_ranks,
                            p.num_experts / num_ranks)) {
    return Invalid("routed dispatch: too many tokens, choices or experts for one call");
  }
  for (int i = 0; i < kNumPlanArrays; ++i) {
    const auto& result = results[i];
    const bool is_count = i >= 8;  // of rows; the others are indices, -1 where there is none
    p.plan_fills[i] = {result.data, result.bytes, static_cast<uint8_t>(is_count ? 0 : 0xFF)};
  }
  const auto* payload = args.data() + kNumFirst;
  const auto* moved = results.data() + kNumPlanArrays;
  p.num_results = static_cast<int32_t>(num_moved);
  if (*format != 0) {
    bool has_token_scales = false;
    if (!DecodeEncoding(attributes, &p.encoding, &has_token_scales)) {
      return Invalid("a routed dispatch with a format lacks an attribute");
    }
    if (ffi::Error error = AddEncoded(payload, num_payload, moved, num_moved, *num_scalars,
                                      has_token_scales, p.encoding, exchange);
        error.failure()) {
      return error;
    }
  } else {
    if (num_payload != num_moved || num_payload > kMaxArrays) {
      return Invalid("routed dispatch must return as many payload arrays as it gets, at most " +
                     std::to_string(kMaxArrays));
    }
    exchange.num_arrays = static_cast<int32_t>(num_payload);
    if (ffi::Error error = AddMoved(payload, moved, *num_scalars, exchange); error.failure()) {
      return error;
    }
  }
  exchange.roles = grid_of(p, call.num_sms).roles;
  return CheckZone(call, exchange.zone_bytes);
}

// Operands: what is dispatched, rows if `dotted`, weights if `scaled`, the routing. Results: the scaled
// rows and the inner products, as wanted.
ffi::Error FillWeightedDispatch(const ffi::Dictionary& attributes, const Call& call,
                                DispatchParams& p) {
  const auto& args = call.args;
  const auto& results = call.results;
  auto routing = DecodeRouting(args, call.view);
  if (!routing) return routing.error();
  const auto scaled = attributes.get<bool>("scaled");
  const auto dotted = attributes.get<bool>("dotted");
  if (!scaled || !dotted || !(*scaled || *dotted) ||
      args.size() != kNumRoutingArrays + 1u + *scaled + *dotted ||
      results.size() != size_t{*scaled} + size_t{*dotted}) {
    return Invalid("weighted dispatch needs one array, and rows and weights as its attributes say");
  }
  p.view = call.view;
  p.routing = *routing;
  SignShapes(p.view, p.routing);
  Mix(p.view.signature, 1 + *scaled + 2 * *dotted);
  p.num_arrays = 1;
  size_t operand = 0, result = 0;
  const auto& in = args[operand++];
  MovedArray& array = p.arrays[0];
  Weighting& weighting = p.weighting;
  if (!ToElementType(in.type, &weighting.type)) {
    return Invalid("weighted dispatch needs bfloat16, float16 or float32");
  }
  const int64_t num_tokens = p.routing.num_tokens, capacity = p.routing.capacity;
  if (ffi::Error error = CheckLead(in, "a payload array", {num_tokens}); error.failure()) {
    return error;
  }
  array.in = Data<const char>(in);
  array.row_bytes = Elements(in, 1) * ItemBytes(in);
  array.width = Width(array.row_bytes, {&in});
  if (*dotted) {
    const auto& rows = args[operand++];
    if (rows.type != in.type) return Invalid("weighted dispatch takes rows of the payload's type");
    if (ffi::Error error = CheckItems(rows, "rows", {capacity}, array.row_bytes); error.failure()) {
      return error;
    }
    weighting.rows = Data<const char>(rows);
    array.width = std::min(array.width, Width(array.row_bytes, {&rows}));
  }
  if (*scaled) {
    const auto& weights = args[operand++];
    if (ffi::Error error =
            FirstOf(CheckShape(weights, "weights", ffi::DataType::F32, {capacity}),
                    CheckItems(results[result], "scaled rows", {capacity}, array.row_bytes));
        error.failure()) {
      return error;
    }
    weighting.weights = Data<const float>(weights);
    array.out = Data<char>(results[result]);
    array.width = std::min(array.width, Width(array.row_bytes, {&results[result]}));
    p.fills[result] = FillOf(results[result]);
    ++result;
  }
  if (*dotted) {
    if (ffi::Error error =
            CheckShape(results[result], "inner products", ffi::DataType::F32, {capacity});
        error.failure()) {
      return error;
    }
    weighting.dotted = Data<float>(results[result]);
    p.fills[result] = FillOf(results[result]);
  }
  if (array.width != kVectorBytes) return Invalid("weighted dispatch needs rows of 16-byte words");
  array.zone_offset = TakeZone(p.zone_bytes, p.routing.num_tokens, array.row_bytes, p.view);
  p.roles = grid_of(p, call.num_sms).roles;
  return CheckZone(call, p.zone_bytes);
}

// Both combines. `num_pairs` 0: leaves and choice scalars; else pairs of rows and weights.
ffi::Error FillCombine(const ffi::Dictionary& attributes, const Call& call, CombineParams& p) {
  const auto& args = call.args;
  const auto& results = call.results;
  auto routing = DecodeRouting(args, call.view);
  if (!routing) return routing.error();
  const auto num_scalars = attributes.get<int64_t>("num_scalars");
  const auto num_pairs = attributes.get<int64_t>("num_pairs");
  const auto float32_wire = attributes.get<bool>("float32_wire");
  const auto wire_format = attributes.get<int64_t>("wire_format");
  const auto global_scale = attributes.get<float>("global_scale");
  if (!num_scalars || !num_pairs || !float32_wire || !wire_format || !global_scale) {
    return Invalid("combine lacks an attribute");
  }
  const size_t payload = args.size() - kNumRoutingArrays;
  const bool sizes_match = *num_pairs > 0 ? payload == 2 * static_cast<size_t>(*num_pairs) &&
                                                results.size() == 1 && *num_pairs <= kMaxPairs
                                          : payload == results.size() && payload <= kMaxArrays;
  if (!sizes_match) {
    return Invalid("combine supports at most " + std::to_string(kMaxArrays) + " arrays or " +
                   std::to_string(kMaxPairs) + " pairs of rows and weights");
  }
  p.view = call.view;
  p.routing = *routing;
  SignShapes(p.view, p.routing);
  p.num_pairs = static_cast<int32_t>(*num_pairs);
  p.num_moved = static_cast<int32_t>(*num_scalars);
  p.num_summed = static_cast<int32_t>(results.size()) - p.num_moved;
  Mix(p.view.signature, *num_pairs);
  Mix(p.view.signature, *float32_wire);
  Mix(p.view.signature, *wire_format);
  p.float32_wire = *float32_wire;
  p.wire_format = static_cast<TokenFormat>(*wire_format);
  p.wire_global_scale = *global_scale;
  const bool is_encoded = *wire_format != 0;
  if (*wire_format < 0 || *wire_format > kNumFormats || (is_encoded && p.float32_wire)) {
    return Invalid("combine does not know this form of partial sums: " +
                   std::to_string(*wire_format));
  }
  const int64_t num_tokens = p.routing.num_tokens, top_k = p.routing.top_k;
  const int64_t capacity = p.routing.capacity;
  p.listed =
      !p.float32_wire && *num_pairs <= 1 && p.routing.top_k + p.view.num_ranks <= kWarpThreads;
  for (int i = 0; i < p.num_summed; ++i) {
    const auto& rows = args[i];
    const auto& out = results[i];
    SummedArray& array = p.summed[i];
    array.rows = rows.data;
    array.out = out.data;
    array.elements = Elements(rows, 1);
    if (!ToElementType(rows.type, &p.type) || rows.type != args[0].type) {
      return Invalid("combine needs arrays of one type: bfloat16, float16 or float32");
    }
    const int64_t item = ItemBytes(rows);
    if (ffi::Error error = FirstOf(CheckLead(rows, "rows", {capacity}),
                                   CheckItems(out, "sums", {num_tokens}, array.elements * item));
        error.failure()) {
      return error;
    }
    array.vectorized = Width(array.elements * item, {&rows, &out}) == 16;
    p.listed = p.listed && array.vectorized &&
               (!is_encoded || array.elements % group_size(p.wire_format) == 0);
    const int64_t row_bytes = is_encoded ? encoded_stride(p.wire_format, array.elements)
                                         : array.elements * (*float32_wire ? 4 : item);
    array.zone_offset = TakeZone(p.zone_bytes, p.routing.num_tokens, row_bytes, p.view);
    p.fills[i] = FillOf(out);
  }
  for (int i = 0; i < p.num_moved; ++i) {
    const auto& in = args[p.num_summed + i];
    const auto& out = results[p.num_summed + i];
    MovedArray& array = p.moved[i];
    array.in = Data<const char>(in);
    array.out = Data<char>(out);
    array.choice_bytes = Elements(in, 1) * ItemBytes(in);
    if (ffi::Error error =
            FirstOf(CheckLead(in, "a choice array's rows", {capacity}),
                    CheckItems(out, "a choice array", {num_tokens, top_k}, array.choice_bytes));
        error.failure()) {
      return error;
    }
    array.row_bytes = p.routing.top_k * array.choice_bytes;
    array.width = Width(array.choice_bytes, {&in, &out});
    array.zone_offset = TakeZone(p.zone_bytes, p.routing.num_tokens, array.row_bytes, p.view);
    p.fills[p.num_summed + i] = FillOf(out);
  }
  for (int i = 0; i < p.num_pairs; ++i) {
    const auto& rows = args[i];
    const auto& weights = args[p.num_pairs + i];
    if (rows.type != args[0].type || weights.type != ffi::DataType::F32) {
      return Invalid("combine takes rows of one type and weights of float32");
    }
    if (ffi::Error error =
            FirstOf(CheckItems(rows, "rows", {capacity}, p.summed[0].elements * ItemBytes(rows)),
                    CheckItems(weights, "weights", {capacity},
                               Elements(args[p.num_pairs], 1) * sizeof(float)));
        error.failure()) {
      return error;
    }
    p.pair_rows[i] = rows.data;
    p.pair_weights[i] = Data<const float>(weights);
    const int64_t weights_per_row = std::max<int64_t>(1, Elements(weights, 1));
    p.elements_per_weight = std::max<int64_t>(1, p.summed[0].elements / weights_per_row);
    // A vector must not straddle two weights.
    const bool aligned = weights_per_row == 1 || p.elements_per_weight % 8 == 0;
    const bool even = Width(p.summed[0].elements * ItemBytes(rows), {&rows}) == 16;
    p.summed[0].vectorized = p.summed[0].vectorized && aligned && even;
    // A warp goes through the list once for each weight: it should be worth it, where there is a choice.
    constexpr int64_t kLeastBytes = 1024;
    const int64_t bytes_per_weight = p.elements_per_weight * ItemBytes(rows);
    p.weights_per_row = static_cast<int32_t>(weights_per_row);
    const bool is_part =
        is_encoded ? p.elements_per_weight % group_size(p.wire_format) == 0
                   : bytes_per_weight % kVectorBytes == 0 && bytes_per_weight >= kLeastBytes;
    p.listed = p.listed && even && (weights_per_row == 1 || is_part);
  }
  if (is_encoded && !p.listed) {
    return Invalid(
        "combine in a token format needs whole groups, one pair of rows and weights, and "
        "top_k plus ranks of at most " +
        std::to_string(kWarpThreads));
  }
  p.roles = grid_of(p, call.num_sms).roles;
  return CheckZone(call, p.zone_bytes);
}

// A handler. `kFill` makes the parameters of the rank that a call is of; ranks that share a device need those of
// the first two. `kLaunch` starts the kernels.
template <typename Params, Operation kOperation,
          ffi::Error (*kFill)(const ffi::Dictionary&, const Call&, Params&),
          cudaError_t (*kLaunch)(const Kernels&, const Params*, int, cudaStream_t)>
ffi::Error Exchange(cudaStream_t stream, int32_t ordinal, ffi::RunId run_id,
                    ffi::Dictionary attributes, ffi::RemainingArgs operands,
                    ffi::RemainingRets outputs) {
  auto call = Begin(attributes, kOperation, ordinal, run_id, stream, operands, outputs);
  if (!call) return call.error();
  Params ranks[2] = {};
  ffi::Error error = kFill(attributes, *call, ranks[0]);
  if (error.success() && call->ranks_of_device > 1) {
    error = kFill(attributes, call->next(), ranks[1]);
  }
  if (error.failure()) return Abandon(call->side, stream, std::move(error));
  const int blocks = grid_of(ranks[0], call->num_sms).blocks;
  return Launch(*call, stream,
                [&](cudaStream_t on) { return kLaunch(*call->kernels, ranks, blocks, on); });
}

// The launch of one kernel.
template <auto kKernel, typename Params>
cudaError_t LaunchOne(const Kernels& kernels, const Params* ranks, int blocks,
                      cudaStream_t stream) {
  return (kernels.*kKernel)(ranks, blocks, stream);
}

cudaError_t LaunchRoute(const Kernels& kernels, const RouteParams* ranks, int blocks,
                        cudaStream_t stream) {
  if (const cudaError_t error = kernels.route_exchange(ranks, blocks, stream);
      error != cudaSuccess) {
    return error;
  }
  return kernels.route_assign(ranks, stream);
}

constexpr auto* Route = &Exchange<RouteParams, Operation::kRoute, FillRoute, LaunchRoute>;
constexpr auto* Dispatch =
    &Exchange<DispatchParams, Operation::kDispatch, FillDispatch, LaunchOne<&Kernels::dispatch>>;
constexpr auto* FormatDispatch =
    &Exchange<FormatDispatchParams, Operation::kDispatch, FillFormatDispatch,
              LaunchOne<&Kernels::format_dispatch>>;
constexpr auto* RoutedDispatch =
    &Exchange<RoutedDispatchParams, Operation::kRoutedDispatch, FillRoutedDispatch,
              LaunchOne<&Kernels::routed_dispatch>>;
constexpr auto* WeightedDispatch = &Exchange<DispatchParams, Operation::kDispatch,
                                             FillWeightedDispatch, LaunchOne<&Kernels::dispatch>>;
constexpr auto* Combine =
    &Exchange<CombineParams, Operation::kCombine, FillCombine, LaunchOne<&Kernels::combine>>;

// The end of a split exchange. Operands: those of its start, then what that gave, which are the results.
ffi::Error Done(cudaStream_t stream, int32_t ordinal, ffi::RunId run_id, ffi::Dictionary attributes,
                ffi::RemainingArgs operands, ffi::RemainingRets outputs) {
  auto call = Begin(attributes, Operation::kDispatch, ordinal, run_id, stream, operands, outputs);
  if (!call) return call.error();
  if (call->side == nullptr || call->args.size() < call->results.size()) {
    return Abandon(
        call->side, stream,
        Invalid("done needs the arguments and the results of the start of a split exchange"));
  }
  const SideStream::Arrays arrays = Addresses(call->args);
  const SideStream::Arrays results = Addresses(call->results);
  if (!std::equal(results.begin(), results.end(), arrays.end() - results.size())) {
    return Abandon(
        call->side, stream,
        Internal("XLA has given a done other memory than its start. Call both in one function"));
  }
  const Problem p = call->side->Join(stream, call->run, arrays);
  return p.empty() ? ffi::Error::Success() : Abandon(call->side, stream, ToError(p));
}

auto ExecuteBinding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Ctx<ffi::DeviceOrdinal>()
      .Ctx<ffi::RunId>()
      .Attrs()
      .RemainingArgs()
      .RemainingRets();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_a2a_instantiate, Instantiate,
                              ffi::Ffi::BindInstantiate().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_a2a_initialize, Initialize,
                              ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_a2a_route, Route, ExecuteBinding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_a2a_dispatch, Dispatch, ExecuteBinding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_a2a_format_dispatch, FormatDispatch, ExecuteBinding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_a2a_routed_dispatch, RoutedDispatch, ExecuteBinding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_a2a_weighted_dispatch, WeightedDispatch, ExecuteBinding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_a2a_combine, Combine, ExecuteBinding());
// Not for graphs: a fork within one would not be joined, and the host keeps count.
XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_a2a_dispatch_start, Dispatch, ExecuteBinding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_a2a_dispatch_done, Done, ExecuteBinding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_a2a_combine_start, Combine, ExecuteBinding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_a2a_combine_done, Done, ExecuteBinding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_a2a_route_in_graph, Route, ExecuteBinding(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_a2a_dispatch_in_graph, Dispatch, ExecuteBinding(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_a2a_format_dispatch_in_graph, FormatDispatch, ExecuteBinding(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_a2a_routed_dispatch_in_graph, RoutedDispatch, ExecuteBinding(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_a2a_weighted_dispatch_in_graph, WeightedDispatch,
                              ExecuteBinding(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_a2a_combine_in_graph, Combine, ExecuteBinding(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace moe_a2a
