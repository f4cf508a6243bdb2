#include "runtime/workspace.h"

#include <cuda_runtime_api.h>

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

}  // namespace

Workspace& Workspace::Get(const Topology& topology) {
  static std::mutex mutex;
  // Never destroyed: kernels may run while the process ends.
  static auto* all = new std::map<Topology, std::unique_ptr<Workspace>>();
  std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Workspace>& workspace = (*all)[topology];
  if (!workspace) workspace = std::make_unique<Workspace>(topology);
  return *workspace;
}

Problem Workspace::Open() {
  const size_t num_devices = topology_.ordinals.size();
  devices_.resize(num_devices);
  for (size_t i = 0; i < num_devices; ++i) {
    Device& device = devices_[i];
    const int ordinal = topology_.ordinals[i];
    const size_t domain = i / topology_.num_ranks * topology_.num_ranks;
    if (!device.slab) {
      const std::vector<int> readers(topology_.ordinals.begin() + domain,
                                     topology_.ordinals.begin() + domain + topology_.num_ranks);
      if (Problem p = OpenLocalSlab(ordinal, readers, &device.slab); !p.empty()) return p;
    }
    if (Problem p = Check(cudaSetDevice(ordinal), "choosing a device"); !p.empty()) return p;
    // Kernels are loaded now: loading one while a peer already waits can deadlock.
    if (Problem p = Check(LoadKernels(), "loading the kernels"); !p.empty()) return p;
    if (device.error == nullptr) {
      if (Problem p = Check(cudaHostAlloc(reinterpret_cast<void**>(&device.error),
                                          sizeof(ErrorRecord),
                                          cudaHostAllocPortable | cudaHostAllocMapped),
                            "allocating the error record");
          !p.empty()) {
        return p;
      }
    }
    std::memset(device.error, 0, sizeof(ErrorRecord));
    if (Problem p = device.slab->Grow(0); !p.empty()) return p;
  }
  for (size_t i = 0; i < num_devices; ++i) {
    if (Problem p = Check(cudaSetDevice(topology_.ordinals[i]), "choosing a device"); !p.empty()) {
      return p;
    }
    Header* header = reinterpret_cast<Header*>(devices_[i].slab->base());
    const uint64_t first_epoch = 1;
    Problem p = Check(cudaMemset(header, 0, sizeof(Header)), "clearing the header");
    if (p.empty()) {
      p = Check(cudaMemcpy(&header->control.next_epoch, &first_epoch, sizeof(first_epoch),
                           cudaMemcpyHostToDevice),
                "setting the first epoch");
    }
    // XLA's streams do not wait for the legacy stream.
    if (p.empty()) p = Check(cudaDeviceSynchronize(), "clearing the header");
    if (!p.empty()) return p;
  }
  ++generation_;
  is_open_ = true;
  return {};
}

Problem Workspace::Reserve(int64_t slot_bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (is_open_ && slot_bytes <= slot_bytes_) return {};
  DeviceScope scope;
  if (!is_open_) {
    if (Problem p = Open(); !p.empty()) return p;
  }
  // Of all devices before any of them uses the new shape.
  for (Device& device : devices_) {
    if (Problem p = device.slab->Grow(slot_bytes); !p.empty()) return p;
  }
  slot_bytes_ = slot_bytes;
  return {};
}

Problem Workspace::Close() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!is_open_) return {};
  DeviceScope scope;
  // A slab is never unmapped while a peer may still write to it.
  for (int ordinal : topology_.ordinals) {
    Problem p = Check(cudaSetDevice(ordinal), "choosing a device");
    if (p.empty()) p = Check(cudaDeviceSynchronize(), "waiting for the device");
    if (!p.empty()) return p;
  }
  Problem first;
  for (Device& device : devices_) {
    Problem p = device.slab->Release();
    if (first.empty()) first = p;
    std::memset(device.error, 0, sizeof(ErrorRecord));
  }
  slot_bytes_ = 0;
  is_open_ = false;
  return first;
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

std::string Workspace::Failure() const {
  for (const Device& device : devices_) {
    if (device.error == nullptr) continue;
    const uint32_t kind = *const_cast<volatile uint32_t*>(&device.error->kind);
    if (kind != 0) return describe(*device.error);
  }
  return {};
}

#ifdef MOE_A2A_TEST_HOOKS
Problem Workspace::SetHooks(int ordinal, uint32_t mutation, uint32_t delay_phase,
                            uint64_t delay_ns) {
  DeviceScope scope;
  for (size_t i = 0; i < topology_.ordinals.size(); ++i) {
    if (ordinal >= 0 && topology_.ordinals[i] != ordinal) continue;
    cudaSetDevice(topology_.ordinals[i]);
    cudaDeviceSynchronize();
    Control* control = &reinterpret_cast<Header*>(devices_[i].slab->base())->control;
    cudaMemcpy(&control->mutation, &mutation, sizeof(mutation), cudaMemcpyHostToDevice);
    cudaMemcpy(&control->delay_phase, &delay_phase, sizeof(delay_phase), cudaMemcpyHostToDevice);
    cudaMemcpy(&control->delay_ns, &delay_ns, sizeof(delay_ns), cudaMemcpyHostToDevice);
    if (Problem p = Check(cudaDeviceSynchronize(), "setting test hooks"); !p.empty()) return p;
  }
  return {};
}

Problem Workspace::SetEpoch(uint64_t epoch) {
  DeviceScope scope;
  for (size_t i = 0; i < topology_.ordinals.size(); ++i) {
    cudaSetDevice(topology_.ordinals[i]);
    cudaDeviceSynchronize();
  }
  for (size_t i = 0; i < topology_.ordinals.size(); ++i) {
    cudaSetDevice(topology_.ordinals[i]);
    Header* header = reinterpret_cast<Header*>(devices_[i].slab->base());
    // Every slot has been read by whoever was sent to: as if all earlier epochs had run.
    std::vector<uint64_t> credits(kRingDepth * kMaxRanks, epoch - 1);
    cudaMemcpy(header->credit, credits.data(), sizeof(header->credit), cudaMemcpyHostToDevice);
    cudaMemcpy(&header->control.next_epoch, &epoch, sizeof(epoch), cudaMemcpyHostToDevice);
    if (Problem p = Check(cudaDeviceSynchronize(), "setting the epoch"); !p.empty()) return p;
  }
  return {};
}
#endif

}  // namespace moe_a2a
