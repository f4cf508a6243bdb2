#include "runtime/workspace.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>

#include "kernels/load.h"
#include "layout.h"

namespace moe_a2a {
namespace {

Problem Check(cudaError_t error, const char* doing) {
  if (error == cudaSuccess) return {};
  return std::string("workspace: ") + doing + ": " + cudaGetErrorString(error);
}

// Leaves the thread's current device as it was.
class DeviceScope {
 public:
  DeviceScope() { cudaGetDevice(&before_); }
  ~DeviceScope() { cudaSetDevice(before_); }

 private:
  int before_ = 0;
};

// Calls work(stream) on a stream of its own, and waits for it: XLA's streams do not wait for the legacy
// stream, and a device must not be synchronized while another thread captures a graph.
template <typename Work>
Problem OnOwnStream(int ordinal, const char* doing, Work&& work) {
  cudaStream_t stream;
  Problem p = Check(cudaSetDevice(ordinal), "choosing a device");
  if (p.empty()) {
    p = Check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream");
  }
  if (!p.empty()) return p;
  p = Check(work(stream), doing);
  if (p.empty()) p = Check(cudaStreamSynchronize(stream), doing);
  cudaStreamDestroy(stream);
  return p;
}

// Zeroes a slab's header and sets the first epoch.
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

Workspace& Workspace::Get(const Topology& topology, Ring ring) {
  static std::mutex mutex;
  // Never destroyed: kernels may run while the process ends.
  static auto* all = new std::map<Ring, std::map<Topology, std::unique_ptr<Workspace>>>();
  std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Workspace>& workspace = (*all)[ring][topology];
  if (!workspace) workspace = std::make_unique<Workspace>(topology, ring);
  return *workspace;
}

std::vector<int> Workspace::DomainOf(size_t device) const {
  const auto first =
      topology_.ordinals.begin() + device / topology_.num_ranks * topology_.num_ranks;
  return std::vector<int>(first, first + topology_.num_ranks);
}

Problem Workspace::CheckAccess() const {
  for (size_t i = 0; i < topology_.ordinals.size(); ++i) {
    if (Problem p = CheckLocalAccess(topology_.ordinals[i], DomainOf(i)); !p.empty()) return p;
  }
  return {};
}

Problem Workspace::Open() {
  for (size_t i = 0; i < devices_.size(); ++i) {
    Device& device = devices_[i];
    const int ordinal = topology_.ordinals[i];
    if (Problem p = Check(cudaSetDevice(ordinal), "choosing a device"); !p.empty()) return p;
    if (!device.slab) {
      if (Problem p = OpenLocalSlab(ordinal, DomainOf(i), &device.slab); !p.empty()) return p;
    }
    // Kernels are loaded now: loading one while a peer already waits can deadlock.
    if (Problem p = Check(LoadKernels(), "loading the kernels"); !p.empty()) return p;
    if (device.error == nullptr) {
      if (Problem p =
              Check(cudaHostAlloc(reinterpret_cast<void**>(&device.error), sizeof(ErrorRecord),
                                  cudaHostAllocPortable | cudaHostAllocMapped),
                    "allocating the error record");
          !p.empty()) {
        return p;
      }
    }
    std::memset(device.error, 0, sizeof(ErrorRecord));
    if (ring_ == Ring::kSplit) {
      if (!device.side) device.side = std::make_unique<SideStream>();
      if (Problem p = device.side->Open(); !p.empty()) return p;
    }
    if (Problem p = device.slab->Grow(slot_bytes_); !p.empty()) return p;
  }
  for (size_t i = 0; i < devices_.size(); ++i) {
    if (Problem p = ClearHeader(topology_.ordinals[i], devices_[i].slab->base()); !p.empty()) {
      return p;
    }
  }
  is_open_.store(true, std::memory_order_release);
  return {};
}

Problem Workspace::Reserve(int64_t slot_bytes) {
  // No lock where there is nothing to do: a thread that holds it may wait for a device.
  if (is_open() && slot_bytes <= slot_bytes_) return {};
  std::lock_guard<std::mutex> lock(mutex_);
  DeviceScope scope;
  if (is_open()) {
    if (slot_bytes <= slot_bytes_) return {};
    // Of all devices before any of them uses the new shape.
    for (Device& device : devices_) {
      if (Problem p = device.slab->Grow(slot_bytes); !p.empty()) return p;
    }
    slot_bytes_ = slot_bytes;
    return {};
  }
  const int64_t before = slot_bytes_;
  slot_bytes_ = std::max(before, slot_bytes);
  Problem p = Open();
  if (!p.empty()) slot_bytes_ = before;
  return p;
}

Problem Workspace::Close() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!is_open()) return {};
  DeviceScope scope;
  // A slab is never unmapped while a peer may still write to it.
  for (int ordinal : topology_.ordinals) {
    Problem p = Check(cudaSetDevice(ordinal), "choosing a device");
    if (p.empty()) p = Check(cudaDeviceSynchronize(), "waiting for the device");
    if (!p.empty()) return p;
  }
  is_open_.store(false, std::memory_order_release);
  Problem first;
  for (Device& device : devices_) {
    Problem p = device.slab->Release();
    if (first.empty()) first = p;
    std::memset(device.error, 0, sizeof(ErrorRecord));
    if (device.side) device.side->Clear();
  }
  return first;
}

std::vector<int64_t> Workspace::MappedBytes() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<int64_t> bytes;
  for (const Device& device : devices_) {
    bytes.push_back(device.slab ? device.slab->mapped_bytes() : 0);
  }
  return bytes;
}

Problem Workspace::ReadCounters(std::vector<CounterValues>* values) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!is_open()) return {};
  DeviceScope scope;
  for (size_t i = 0; i < devices_.size(); ++i) {
    const auto* header = reinterpret_cast<const Header*>(devices_[i].slab->base());
    Control control;
    decltype(Header::head) heads;
    decltype(Header::credit) credits;
    Problem p =
        OnOwnStream(topology_.ordinals[i], "reading the counters", [&](cudaStream_t stream) {
          const auto read = [&](auto* to, const auto& from) {
            return cudaMemcpyAsync(to, &from, sizeof(from), cudaMemcpyDeviceToHost, stream);
          };
          cudaError_t error = read(&control, header->control);
          if (error == cudaSuccess) error = read(&heads, header->head);
          return error == cudaSuccess ? read(&credits, header->credit) : error;
        });
    if (!p.empty()) return p;
    CounterValues& of_device =
        values->emplace_back(CounterValues{control.next_epoch, control.poison, {}, {}});
    for (int slot = 0; slot < kRingDepth; ++slot) {
      for (int rank = 0; rank < topology_.num_ranks; ++rank) {
        of_device.credits.push_back(credits[slot][rank]);
        of_device.heads.push_back(heads[slot][rank].flag >> 16);  // without the signature
      }
    }
  }
  return {};
}

Problem Workspace::View(int ordinal, RankView* view) {
  for (size_t i = 0; i < topology_.ordinals.size(); ++i) {
    if (topology_.ordinals[i] != ordinal) continue;
    const size_t domain = i / topology_.num_ranks * topology_.num_ranks;
    view->rank = static_cast<int32_t>(i - domain);
    view->num_ranks = topology_.num_ranks;
    for (int rank = 0; rank < topology_.num_ranks; ++rank) {
      view->slab[rank] = devices_[domain + rank].slab->base();
    }
    view->error = devices_[i].error;
    return {};
  }
  return "the program runs on device " + std::to_string(ordinal) +
         ", which is not in the group's mesh";
}

SideStream* Workspace::Side(int ordinal) {
  for (size_t i = 0; i < topology_.ordinals.size(); ++i) {
    if (topology_.ordinals[i] == ordinal) return devices_[i].side.get();
  }
  return nullptr;
}

std::string Workspace::Failure() const {
  if (!is_open()) return {};
  std::string first;
  for (const Device& device : devices_) {
    const uint32_t kind = *const_cast<volatile uint32_t*>(&device.error->kind);
    if (kind == 0) continue;
    std::atomic_thread_fence(std::memory_order_acquire);  // The record was written before its kind.
    // A rank that saw something wrong knows more than the ranks that then waited for it in vain.
    const bool is_cause = kind != static_cast<uint32_t>(ErrorKind::kTimeout);
    if (first.empty() || is_cause) first = describe(*device.error);
    if (is_cause) break;
  }
  return first;
}

#ifdef MOE_A2A_TEST_HOOKS
namespace {

void SetCredits(char* slab, uint64_t epoch) {
  auto* header = reinterpret_cast<Header*>(slab);
  const std::vector<uint64_t> credits(kRingDepth * kMaxRanks, epoch);
  cudaMemcpy(header->credit, credits.data(), sizeof(header->credit), cudaMemcpyHostToDevice);
}

}  // namespace

Problem Workspace::SetHooks(int ordinal, uint32_t mutation, uint32_t delay_phase, uint64_t delay_ns,
                            uint32_t depth) {
  if (!is_open()) return "hooks are set on an open workspace; run an exchange first";
  if (depth > kRingDepth) return "depth must be at most " + std::to_string(kRingDepth);
  DeviceScope scope;
  for (size_t i = 0; i < topology_.ordinals.size(); ++i) {
    if (ordinal >= 0 && topology_.ordinals[i] != ordinal) continue;
    cudaSetDevice(topology_.ordinals[i]);
    cudaDeviceSynchronize();
    Control* control = &reinterpret_cast<Header*>(devices_[i].slab->base())->control;
    cudaMemcpy(&control->mutation, &mutation, sizeof(mutation), cudaMemcpyHostToDevice);
    cudaMemcpy(&control->delay_phase, &delay_phase, sizeof(delay_phase), cudaMemcpyHostToDevice);
    cudaMemcpy(&control->delay_ns, &delay_ns, sizeof(delay_ns), cudaMemcpyHostToDevice);
    cudaMemcpy(&control->depth, &depth, sizeof(depth), cudaMemcpyHostToDevice);
    // Which slot an epoch takes has changed: every slot counts as read.
    uint64_t next_epoch;
    cudaMemcpy(&next_epoch, &control->next_epoch, sizeof(next_epoch), cudaMemcpyDeviceToHost);
    SetCredits(devices_[i].slab->base(), next_epoch - 1);
    if (Problem p = Check(cudaDeviceSynchronize(), "setting test hooks"); !p.empty()) return p;
  }
  return {};
}

Problem Workspace::SetEpoch(uint64_t epoch) {
  if (!is_open()) return "the epoch is set on an open workspace; run an exchange first";
  DeviceScope scope;
  for (size_t i = 0; i < topology_.ordinals.size(); ++i) {
    cudaSetDevice(topology_.ordinals[i]);
    cudaDeviceSynchronize();
  }
  for (size_t i = 0; i < topology_.ordinals.size(); ++i) {
    cudaSetDevice(topology_.ordinals[i]);
    Header* header = reinterpret_cast<Header*>(devices_[i].slab->base());
    // As if all earlier epochs had run. Flags that stand may not be ahead of what comes.
    cudaMemset(header->head, 0, sizeof(header->head));
    cudaMemset(header->chunk, 0, sizeof(header->chunk));
    cudaMemset(header->id, 0, sizeof(header->id));
    SetCredits(devices_[i].slab->base(), epoch - 1);
    cudaMemcpy(&header->control.next_epoch, &epoch, sizeof(epoch), cudaMemcpyHostToDevice);
    if (Problem p = Check(cudaDeviceSynchronize(), "setting the epoch"); !p.empty()) return p;
  }
  return {};
}
#endif

}  // namespace moe_a2a
