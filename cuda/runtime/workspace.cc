#include "runtime/workspace.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <future>
#include <map>
#include <optional>
#include <thread>
#include <utility>

#include "layout.h"
#include "runtime/cuda_error.h"
#include "runtime/driver.h"

namespace moe_a2a {
namespace {

// A request for memory: this head, then the ids of the devices.
struct RequestHead {
  int64_t version, kind, num_ranks, device, generation, first_allocation, half_bytes;
};
constexpr size_t kHeadWords = sizeof(RequestHead) / sizeof(int64_t);

Problem Check(cudaError_t error, const std::string& doing) {
  return ProblemOf(error, "workspace: " + doing);
}

// Runs `work` in a thread, because it may block forever. Returns nothing if it has not ended after
// `time`. The thread then continues, so `work` must own everything that it uses.
std::optional<Problem> RunWithin(std::chrono::nanoseconds time, std::function<Problem()> work) {
  std::packaged_task<Problem()> task(std::move(work));
  std::future<Problem> result = task.get_future();
  std::thread(std::move(task)).detach();
  if (result.wait_for(time) != std::future_status::ready) return {};
  return result.get();
}

// Calls work(stream) with a new stream, and waits until the work is done. The legacy stream is
// unsuitable, because XLA's streams do not wait for it. A synchronization of the device is
// unsuitable, because another thread may be capturing a graph.
template <typename Work>
Problem OnOwnStream(int ordinal, const char* doing, Work&& work) {
  cudaStream_t stream;
  MOE_A2A_TRY(Check(cudaSetDevice(ordinal), "choosing a device"));
  MOE_A2A_TRY(Check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream"));
  Problem p = Check(work(stream), doing);
  if (p.empty()) p = Check(cudaStreamSynchronize(stream), doing);
  cudaStreamDestroy(stream);
  return p;
}

Problem ClearHeader(int ordinal, char* slab) {
  const uint64_t first_epoch = 1;
  auto* header = reinterpret_cast<Header*>(slab);
  return OnOwnStream(ordinal, "clearing the header", [&](cudaStream_t stream) {
    const cudaError_t error = cudaMemsetAsync(header, 0, sizeof(Header), stream);
    if (error != cudaSuccess) return error;
    return cudaMemcpyAsync(&header->control.next_epoch, &first_epoch, sizeof(first_epoch),
                           cudaMemcpyHostToDevice, stream);
  });
}

}  // namespace

Workspace& Workspace::Get(const Topology& topology, WorkspaceKind kind) {
  static std::mutex mutex;
  // Never destroyed, because kernels may run while the process ends.
  static auto* all = new std::map<WorkspaceKind, std::map<Topology, std::unique_ptr<Workspace>>>();
  std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Workspace>& workspace = (*all)[kind][topology];
  if (!workspace) workspace = std::make_unique<Workspace>(topology, kind);
  return *workspace;
}

Workspace::Workspace(Topology topology, WorkspaceKind kind)
    : topology_(std::move(topology)), kind_(kind) {
  const size_t num_ranks = topology_.num_ranks;
  for (size_t domain = 0; domain < topology_.devices.size(); domain += num_ranks) {
    std::vector<Device> devices(num_ranks);
    bool is_mine = false;
    for (size_t rank = 0; rank < num_ranks; ++rank) {
      Device& device = devices[rank];
      device.index = domain + rank;
      const int64_t id = topology_.devices[device.index];
      if (!FindDevice(id, &device.place)) {
        unknown_ = Concat("device ", id, " is unknown in this process");
      }
      is_mine = is_mine || device.is_own();
    }
    if (!is_mine) continue;
    for (Device& device : devices) {
      spans_processes_ = spans_processes_ || !device.is_own();
      devices_.push_back(std::move(device));
    }
  }
}

std::vector<Workspace::Device*> Workspace::OwnDevices() {
  std::vector<Device*> own;
  for (Device& device : devices_) {
    if (device.is_own()) own.push_back(&device);
  }
  return own;
}

std::vector<int> Workspace::ReadersOf(const Device& device) const {
  std::vector<int> ordinals;
  for (const Device& other : devices_) {
    const bool same_domain =
        other.index / topology_.num_ranks == device.index / topology_.num_ranks;
    if (same_domain && other.is_own()) ordinals.push_back(other.place.ordinal);
    if (topology_.is_colocated()) break;  // all ranks share this device
  }
  return ordinals;
}

Problem Workspace::CheckAccess() const {
  for (const Device& device : devices_) {
    if (!device.is_own()) continue;
    MOE_A2A_TRY(moe_a2a::CheckAccess(device.place.ordinal, ReadersOf(device)));
  }
  return unknown_;
}

Problem Workspace::OpenOwn(Device& device) {
  MOE_A2A_TRY(Check(cudaSetDevice(device.place.ordinal), "choosing a device"));
  if (!device.own) {
    auto own = std::make_unique<OwnSlab>(device.place.ordinal, ReadersOf(device), spans_processes_);
    MOE_A2A_TRY(own->Open());
    device.own = std::move(own);
  }
  // Load the kernels now, because a load during an exchange can deadlock.
  MOE_A2A_TRY(Check(kernels().load(), "loading the kernels"));
  if (errors_ == nullptr) {
    const std::vector<Device*> own = OwnDevices();
    const size_t bytes = own.size() * sizeof(ErrorRecord);
    MOE_A2A_TRY(Check(cudaHostAlloc(reinterpret_cast<void**>(&errors_), bytes,
                                    cudaHostAllocPortable | cudaHostAllocMapped),
                      "allocating the error records"));
    std::memset(errors_, 0, bytes);
    for (size_t i = 0; i < own.size(); ++i) own[i]->error = &errors_[i];
  }
  std::memset(device.error, 0, sizeof(ErrorRecord));
  if (is_split(kind_) && (rank(device) == 0 || !topology_.is_colocated())) {
    if (!device.side) device.side = std::make_unique<SideStream>();
    MOE_A2A_TRY(device.side->Open());
  }
  return {};
}

Problem Workspace::ReserveOwn(int64_t half_bytes) {
  if (!unknown_.empty()) return unknown_;
  if (own_is_open_ && half_bytes <= own_half_bytes_) return {};
  DeviceScope scope;
  half_bytes = std::max(half_bytes, own_half_bytes_);
  if (Problem p = OpenOrGrowOwn(half_bytes); !p.empty()) {
    // Memory of an open workspace stays until Close(), because unmapping may wait for kernels.
    for (Device* device : OwnDevices()) {
      if (!own_is_open_ && device->own) device->own->Release();
    }
    return p;
  }
  own_is_open_ = true;
  own_half_bytes_ = half_bytes;
  return {};
}

Problem Workspace::OpenOrGrowOwn(int64_t half_bytes) {
  for (Device* device : OwnDevices()) {
    if (!own_is_open_) MOE_A2A_TRY(OpenOwn(*device));
    MOE_A2A_TRY(device->own->Grow(half_bytes));
    if (!own_is_open_) MOE_A2A_TRY(ClearHeader(device->place.ordinal, device->base()));
  }
  return {};
}

Problem Workspace::Reserve(int64_t half_bytes, int64_t timeout_ns) {
  // Do not lock yet, because another thread may hold the lock while it waits for a device.
  if (is_open() && half_bytes <= half_bytes_) return {};
  std::lock_guard<std::mutex> lock(mutex_);
  if (is_open() && half_bytes <= half_bytes_) return {};
  half_bytes = std::max(half_bytes, half_bytes_.load());
  uint64_t generation;
  {
    std::lock_guard<std::mutex> own_lock(own_mutex_);
    MOE_A2A_TRY(ReserveOwn(half_bytes));
    generation = generation_;
  }
  if (spans_processes_) {
    DeviceScope scope;
    for (Device& device : devices_) {
      if (device.is_own()) continue;
      MOE_A2A_TRY(ReservePeer(device, half_bytes, generation, timeout_ns));
    }
  }
  half_bytes_ = half_bytes;
  is_open_.store(true, std::memory_order_release);
  return {};
}

Problem Workspace::ReservePeer(Device& device, int64_t half_bytes, uint64_t generation,
                               int64_t timeout_ns) {
  const Deadline deadline = std::chrono::steady_clock::now() + std::chrono::nanoseconds(timeout_ns);
  const auto amiss = [&](const Problem& what) -> Problem {
    return {Concat("opening the workspace: process ", device.place.process, ", which holds rank ",
                   rank(device), ": ", what),
            what.lacks_memory};
  };
  Endpoint endpoint;
  if (!FindProcess(device.place.process, &endpoint)) {
    return amiss(
        "this process has no information about it. Call group.reserve() in every process first");
  }
  if (!device.peer) {
    auto peer = std::make_unique<PeerSlab>(ReadersOf(device));
    MOE_A2A_TRY(peer->Open());
    device.peer = std::move(peer);
  }
  while (!device.peer->holds(half_bytes)) {
    Request request = {kProtocolVersion,  // the fields of RequestHead
                       static_cast<int64_t>(kind_),
                       topology_.num_ranks,
                       static_cast<int64_t>(device.index),
                       static_cast<int64_t>(generation),
                       static_cast<int64_t>(device.peer->num_allocations()),
                       half_bytes};
    request.insert(request.end(), topology_.devices.begin(), topology_.devices.end());
    Answer answer;
    if (Problem p = Ask(endpoint, request, deadline, &answer); !p.empty()) {
      if (answer.has_ended) SetEnded(device.place.process);
      return amiss(p);
    }
    // Stop before the deadline, so that the error contains the reason from the last answer.
    constexpr auto kPause = std::chrono::milliseconds(5);
    if (answer.status == Status::kLater && std::chrono::steady_clock::now() + kPause < deadline) {
      std::this_thread::sleep_for(kPause);
      continue;
    }
    if (answer.status != Status::kGiven) {
      return amiss({answer.why, answer.status == Status::kNoMemory});
    }
    if (answer.allocations.empty()) return amiss("it shared less memory than this process needs");
    if (Problem p = device.peer->Map(answer.allocations); !p.empty()) return amiss(p);
  }
  return {};
}

Answer Workspace::Serve(const Request& request) {
  RequestHead head = {};
  if (request.size() >= kHeadWords) std::memcpy(&head, request.data(), sizeof(head));
  if (head.version != kProtocolVersion) {
    return {Status::kRefused, "it runs another version of jax_moe_a2a", {}};
  }
  const auto num_devices = static_cast<int64_t>(request.size() - kHeadWords);
  const auto kind = static_cast<WorkspaceKind>(head.kind);
  if ((kind != WorkspaceKind::kWhole && kind != WorkspaceKind::kSplit) || head.num_ranks < 1 ||
      head.num_ranks > kMaxRanks || num_devices % head.num_ranks != 0 || head.device < 0 ||
      head.device >= num_devices || head.first_allocation < 0 || head.half_bytes < 0 ||
      head.half_bytes > kHalfStride) {
    return {Status::kRefused, "it does not understand the request", {}};
  }
  const Topology topology = {{request.begin() + kHeadWords, request.end()},
                             static_cast<int>(head.num_ranks)};
  return Get(topology, kind)
      .Share(head.device, head.generation, head.first_allocation, head.half_bytes);
}

Answer Workspace::Share(size_t device, uint64_t generation, size_t first_allocation,
                        int64_t half_bytes) {
  std::lock_guard<std::mutex> lock(own_mutex_);
  const std::string counts =
      Concat("it has closed the group ", generation_, " times, and this process ", generation);
  if (generation > generation_) return {Status::kLater, counts, {}};
  if (generation < generation_) return {Status::kRefused, counts, {}};
  if (Problem p = ReserveOwn(half_bytes); !p.empty()) {
    return {p.lacks_memory ? Status::kNoMemory : Status::kRefused, p, {}};
  }
  for (Device* own : OwnDevices()) {
    if (own->index != device) continue;
    Answer answer;
    if (Problem p = own->own->Share(first_allocation, &answer.allocations); !p.empty()) {
      return {Status::kRefused, p, {}};
    }
    return answer;
  }
  return {Status::kRefused, "it does not hold that device", {}};
}

Problem Workspace::WaitUntilIdle(int64_t timeout_ns) {
  using Clock = std::chrono::steady_clock;
  if (!is_open()) return {};  // nothing was launched
  const auto start = Clock::now();
  int last = kElsewhere;
  for (const Device* device : OwnDevices()) {
    if (device->place.ordinal == last) continue;  // ranks that share a device are adjacent
    last = device->place.ordinal;
    MOE_A2A_TRY(Check(cudaSetDevice(device->place.ordinal), "choosing a device"));
    // If other devices used up the time, an idle device must still not be reported as busy.
    constexpr std::chrono::nanoseconds kLeast = std::chrono::milliseconds(100);
    const auto left = std::chrono::nanoseconds(timeout_ns) - (Clock::now() - start);
    const std::optional<Problem> problem =
        RunWithin(std::max(left, kLeast), [ordinal = device->place.ordinal]() -> Problem {
          MOE_A2A_TRY(Check(cudaSetDevice(ordinal), "choosing a device"));
          return Check(cudaDeviceSynchronize(), "waiting for the device");
        });
    if (!problem) return StillBusy(*device, timeout_ns);
    if (!problem->empty()) return *problem;
  }
  return {};
}

Problem Workspace::StillBusy(const Device& device, int64_t timeout_ns) const {
  auto control = std::make_shared<Control>();
  const std::optional<Problem> problem = RunWithin(
      std::chrono::seconds(1), [control, ordinal = device.place.ordinal,
                                from = &reinterpret_cast<Header*>(device.base())->control] {
        return OnOwnStream(ordinal, "reading the counters", [&](cudaStream_t stream) {
          return cudaMemcpyAsync(control.get(), from, sizeof(Control), cudaMemcpyDeviceToHost,
                                 stream);
        });
      });
  const std::string stream = is_split(kind_) ? "the side stream" : "XLA's stream";
  std::string what;
  if (!problem || !problem->empty()) {
    what = "its counters cannot be read";
  } else if (control->owner != 0 && control->poison == 0) {
    what = Concat("exchange ", control->next_epoch, " of rank ", rank(device), " runs on ", stream);
  } else {
    what = "no exchange of the group runs on " + stream +
           ", so it is other work, such as a collective that another process does not join";
  }
  const std::string failure = Failure();
  return Concat(
      "closing the group: GPU ", device.place.ordinal, " is still at work after ",
      static_cast<double>(timeout_ns) * 1e-9, " s: ", what, ". ",
      (failure.empty() ? "" : "Before that, the group has failed: " + failure + ". "),
      "The group stays open and keeps its memory. Close it again when that work has ended, or "
      "end the process");
}

Problem Workspace::LockWithin(int64_t* timeout_ns, std::unique_lock<std::mutex>* lock) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::nanoseconds(*timeout_ns);
  *lock = std::unique_lock<std::mutex>(mutex_, std::try_to_lock);
  if (lock->owns_lock()) return {};
  while (!lock->try_lock()) {
    if (Clock::now() >= end) {
      return Concat(
          "closing the group: another thread is still opening its workspace after ",
          static_cast<double>(*timeout_ns) * 1e-9,
          " s, because it waits for another process. The group stays as it is. Close it again "
          "when that thread has finished, or end the process");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  *timeout_ns = std::chrono::nanoseconds(end - Clock::now()).count();
  return {};
}

Problem Workspace::Wait(int64_t timeout_ns) {
  std::unique_lock<std::mutex> lock;
  MOE_A2A_TRY(LockWithin(&timeout_ns, &lock));
  DeviceScope scope;
  return WaitUntilIdle(timeout_ns);
}

Problem Workspace::Close(const std::vector<Workspace*>& workspaces, int64_t timeout_ns) {
  std::vector<std::unique_lock<std::mutex>> locks(workspaces.size());
  for (size_t i = 0; i < workspaces.size(); ++i) {
    MOE_A2A_TRY(workspaces[i]->LockWithin(&timeout_ns, &locks[i]));
  }
  DeviceScope scope;
  // Wait for all workspaces before any slab is unmapped, because devices of this process may still
  // write to it. Do not lock own_mutex_ during the wait, because Serve() needs it.
  for (Workspace* workspace : workspaces) {
    MOE_A2A_TRY(workspace->WaitUntilIdle(timeout_ns));
  }
  Problem first;
  for (Workspace* workspace : workspaces) {
    Problem p = workspace->CloseIdle();
    if (first.empty()) first = p;
  }
  return first;
}

Problem Workspace::CloseIdle() {
  std::lock_guard<std::mutex> own_lock(own_mutex_);
  ++generation_;
  if (!own_is_open_ && !is_open()) return {};
  is_open_.store(false, std::memory_order_release);
  own_is_open_ = false;
  own_half_bytes_ = half_bytes_;  // drop a size that failed in another process
  Problem first;
  for (Device& device : devices_) {
    Slab* slab = device.is_own() ? static_cast<Slab*>(device.own.get()) : device.peer.get();
    Problem p = slab != nullptr ? slab->Release() : Problem();
    if (first.empty()) first = p;
    if (device.error != nullptr) std::memset(device.error, 0, sizeof(ErrorRecord));
    if (device.side) device.side->Clear();
  }
  return first;
}

std::vector<int64_t> Workspace::MappedBytes() {
  std::lock_guard<std::mutex> lock(own_mutex_);
  std::vector<int64_t> bytes;
  for (const Device* device : OwnDevices()) {
    bytes.push_back(device->own ? device->own->mapped_bytes() : 0);
  }
  return bytes;
}

Problem Workspace::ReadCounters(std::vector<CounterValues>* values) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!is_open()) return {};
  DeviceScope scope;
  for (const Device* device : OwnDevices()) {
    const auto* header = reinterpret_cast<const Header*>(device->base());
    Control control;
    decltype(Header::head) heads;
    decltype(Header::credit) credits;
    MOE_A2A_TRY(
        OnOwnStream(device->place.ordinal, "reading the counters", [&](cudaStream_t stream) {
          const auto read = [&](auto* to, const auto& from) {
            return cudaMemcpyAsync(to, &from, sizeof(from), cudaMemcpyDeviceToHost, stream);
          };
          cudaError_t error = read(&control, header->control);
          if (error == cudaSuccess) error = read(&heads, header->head);
          return error == cudaSuccess ? read(&credits, header->credit) : error;
        }));
    std::vector<uint64_t> credit_epochs, head_epochs;
    for (int half = 0; half < kRingDepth; ++half) {
      for (int rank = 0; rank < topology_.num_ranks; ++rank) {
        credit_epochs.push_back(credits[half][rank]);
        head_epochs.push_back(heads[half][rank].flag >> kSignatureBits);
      }
    }
    values->emplace_back(control.next_epoch, control.poison, credit_epochs, head_epochs);
  }
  return {};
}

const Workspace::Device* Workspace::FirstOn(int ordinal) const {
  for (const Device& device : devices_) {
    if (device.place.ordinal == ordinal) return &device;
  }
  return nullptr;
}

Problem Workspace::View(int ordinal, RankView* view) const {
  const Device* device = FirstOn(ordinal);
  if (device == nullptr) {
    return Concat("the program runs on device ", ordinal, ", which is not in the group's mesh");
  }
  view->rank = rank(*device);
  view->num_ranks = topology_.num_ranks;
  // devices_ has the ranks of a domain in order.
  const Device* domain = device - view->rank;
  for (int i = 0; i < topology_.num_ranks; ++i) view->slab[i] = domain[i].base();
  view->error = device->error;
  return {};
}

SideStream* Workspace::Side(int ordinal) const {
  const Device* device = FirstOn(ordinal);
  return device == nullptr ? nullptr : device->side.get();
}

std::string Workspace::Failure() const {
  if (!is_open()) return {};
  std::string most;
  int known = 0;
  for (const Device& device : devices_) {
    if (!device.is_own()) continue;
    const uint32_t kind = *const_cast<volatile uint32_t*>(&device.error->kind);
    if (kind == 0) continue;
    std::atomic_thread_fence(std::memory_order_acquire);  // the device writes `kind` last
    // Prefer the error that a rank detected itself, then a timeout, then kStopped.
    const int knows = kind == static_cast<uint32_t>(ErrorKind::kStopped)   ? 1
                      : kind == static_cast<uint32_t>(ErrorKind::kTimeout) ? 2
                                                                           : 3;
    if (knows <= known) continue;
    known = knows;
    most = describe(*device.error);
  }
  return most;
}

Problem Workspace::ReadFailure(std::string* failure) {
  *failure = Failure();
  if (!failure->empty()) return {};
  std::lock_guard<std::mutex> own_lock(own_mutex_);  // Close() locks it to unmap
  if (!is_open()) return {};
  DeviceScope scope;
  for (const Device* device : OwnDevices()) {
    const Control& control = reinterpret_cast<Header*>(device->base())->control;
    uint64_t poison = 0;
    MOE_A2A_TRY(OnOwnStream(device->place.ordinal, "reading the poison", [&](cudaStream_t stream) {
      return cudaMemcpyAsync(&poison, &control.poison, sizeof(poison), cudaMemcpyDeviceToHost,
                             stream);
    }));
    if (poison == 0) continue;
    *failure = Failure();  // a kernel may have written a record since the first call
    if (failure->empty()) {
      *failure = Concat("stopped: rank ", rank(*device),
                        " between two exchanges: ", describe_poison(poison));
    }
    return {};
  }
  return {};
}

#ifdef MOE_A2A_TEST_HOOKS

template <typename T>
static void Store(T* on_device, const T& value) {
  cudaMemcpy(on_device, &value, sizeof(T), cudaMemcpyHostToDevice);
}

static void StoreCredits(Header* header, uint64_t epoch) {
  const std::vector<uint64_t> credits(kRingDepth * kMaxRanks, epoch);
  cudaMemcpy(header->credit, credits.data(), sizeof(header->credit), cudaMemcpyHostToDevice);
}

template <typename Set>
Problem Workspace::ForEachHooked(int64_t index, Set&& set) {
  if (!is_open()) return "hooks need an open workspace; run an exchange first";
  DeviceScope scope;
  for (const Device* device : OwnDevices()) {
    cudaSetDevice(device->place.ordinal);
    cudaDeviceSynchronize();
  }
  for (const Device* device : OwnDevices()) {
    if (index >= 0 && static_cast<int64_t>(device->index) != index) continue;
    cudaSetDevice(device->place.ordinal);
    set(reinterpret_cast<Header*>(device->base()));
    MOE_A2A_TRY(Check(cudaDeviceSynchronize(), "setting test hooks"));
  }
  return {};
}

Problem Workspace::SetHooks(int64_t index, uint32_t mutation, uint32_t delay_phase,
                            uint64_t delay_ns, uint32_t depth) {
  if (depth > kRingDepth) return Concat("depth must be at most ", kRingDepth);
  return ForEachHooked(index, [&](Header* header) {
    Control& control = header->control;
    Store(&control.mutation, mutation);
    Store(&control.delay_phase, delay_phase);
    Store(&control.delay_ns, delay_ns);
    Store(&control.depth, depth);
    // Mark all ring halves as read, because the new depth assigns epochs to other ring halves.
    uint64_t next_epoch;
    cudaMemcpy(&next_epoch, &control.next_epoch, sizeof(next_epoch), cudaMemcpyDeviceToHost);
    StoreCredits(header, next_epoch - 1);
  });
}

Problem Workspace::SetEpoch(int64_t index, uint64_t epoch) {
  return ForEachHooked(index, [&](Header* header) {
    // Clear all flags, because no flag may be ahead of its epoch.
    cudaMemset(header->head, 0, sizeof(Header) - offsetof(Header, head));
    StoreCredits(header, epoch - 1);
    Store(&header->control.next_epoch, epoch);
  });
}

Problem Workspace::SetCredits(int64_t index, uint64_t epoch) {
  return ForEachHooked(index, [&](Header* header) { StoreCredits(header, epoch); });
}
#endif

}  // namespace moe_a2a
