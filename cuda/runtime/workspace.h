// The memory for a topology and a WorkspaceKind: a slab per device, opened at the first use. A
// process allocates the slabs of its devices, and maps the slabs of other processes.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/launch.h"
#include "params.h"
#include "runtime/devices.h"
#include "runtime/handoff.h"
#include "runtime/side_stream.h"
#include "runtime/slab.h"

namespace moe_a2a {

struct Topology {
  // For each rank the id of its device, domain after domain.
  std::vector<int64_t> devices;
  int num_ranks;

  bool is_colocated() const { return num_ranks > 1 && devices[0] == devices[1]; }
  int ranks_of_device() const { return is_colocated() ? num_ranks : 1; }

  bool operator<(const Topology& other) const {
    return std::tie(num_ranks, devices) < std::tie(other.num_ranks, other.devices);
  }
};

// The next epoch and the poison of a rank, and the epochs [kRingDepth, num_ranks] of its credits
// and of its heads (docs/protocol.md, section 4).
using CounterValues = std::tuple<uint64_t, uint64_t, std::vector<uint64_t>, std::vector<uint64_t>>;

class Workspace {
 public:
  // Returns the workspace of a topology and a kind. It is closed at first, and never destroyed.
  static Workspace& Get(const Topology& topology, WorkspaceKind kind);

  Workspace(Topology topology, WorkspaceKind kind);

  // Returns a problem if devices of this process cannot access each other's memory.
  Problem CheckAccess() const;

  // Opens or grows the workspace. Then every ring half has `half_bytes`, or more if it had more
  // before Close(). Addresses never move. Other processes have `timeout_ns` to share memory.
  //
  // After a failure, a smaller size can still be reserved. If the workspace was closed, its memory
  // in this process is freed. Otherwise new memory stays until Close().
  Problem Reserve(int64_t half_bytes, int64_t timeout_ns);

  // Waits until the devices of this process are idle, if the workspace is open. After `timeout_ns`,
  // returns a problem that says what still runs on a device.
  Problem Wait(int64_t timeout_ns);

  // Waits like Wait(). If the wait times out, changes nothing. Otherwise frees this process's
  // memory, unmaps other processes' memory, and clears a failure. The next use opens the workspace
  // again, after other processes have closed it too. During Close(), launch none of its exchanges.
  Problem Close(int64_t timeout_ns) { return Close({this}, timeout_ns); }

  // Closes all of these workspaces, or none if a wait times out, because processes that open a
  // workspace must have closed it equally often. All callers must pass them in the same order.
  static Problem Close(const std::vector<Workspace*>& workspaces, int64_t timeout_ns);

  const Kernels& kernels() const {
    return topology_.is_colocated() ? ColocatedKernels() : DirectKernels();
  }

  // Sets the view of the first rank of device `ordinal`, without the attributes of a call. If ranks
  // share the device, their error records are adjacent.
  Problem View(int ordinal, RankView* view) const;

  // Returns the side stream of device `ordinal`; null for whole exchanges, or before the first use.
  SideStream* Side(int ordinal) const;

  // Returns the most informative error record of this process as text, or empty. Uses no device.
  std::string Failure() const;

  // Sets `failure` to Failure(). If there is no record, reads the poison of this process's ranks,
  // because a rank that launched nothing since it was poisoned has no record.
  Problem ReadFailure(std::string* failure);

  // Returns the mapped bytes of each device of this process, in the order of the topology.
  std::vector<int64_t> MappedBytes();

  // Sets `values` to the counters of this process's devices; none if closed. Devices must be idle.
  Problem ReadCounters(std::vector<CounterValues>* values);

  bool is_open() const { return is_open_.load(std::memory_order_acquire); }
  int64_t half_bytes() const { return is_open() ? half_bytes_.load() : 0; }
  bool spans_processes() const { return spans_processes_; }
  const Topology& topology() const { return topology_; }

#ifdef MOE_A2A_TEST_HOOKS
  // `index` is the index of a rank in the topology, or -1 for all ranks of this process.
  Problem SetHooks(int64_t index, uint32_t mutation, uint32_t delay_phase, uint64_t delay_ns,
                   uint32_t depth);
  // Sets the next epoch, as if all earlier exchanges had run.
  Problem SetEpoch(int64_t index, uint64_t epoch);
  Problem SetCredits(int64_t index, uint64_t epoch);
  // If uncapped, a launch for ranks that share a device has as many blocks as the call requests.
  void SetUncapped(bool is_uncapped) { is_uncapped_ = is_uncapped; }
  bool is_uncapped() const { return is_uncapped_; }
#endif

  // Answers another process's request for memory.
  static Answer Serve(const Request& request);

 private:
  // The device of a rank, in a domain that includes a device of this process.
  struct Device {
    DevicePlace place;
    size_t index;  // in the topology
    std::unique_ptr<OwnSlab> own;
    std::unique_ptr<PeerSlab> peer;
    ErrorRecord* error = nullptr;  // one of errors_
    std::unique_ptr<SideStream> side;

    bool is_own() const { return place.ordinal != kElsewhere; }
    char* base() const { return is_own() ? own->base() : peer->base(); }
  };

  std::vector<Device*> OwnDevices();
  // Returns the first rank on a device of this process, or null.
  const Device* FirstOn(int ordinal) const;
  // Returns the ordinals of this process's devices in the same domain as `device`.
  std::vector<int> ReadersOf(const Device& device) const;
  int rank(const Device& device) const {
    return static_cast<int>(device.index) % topology_.num_ranks;
  }

  // Opens or grows the slabs of this process's devices. The caller holds own_mutex_.
  Problem ReserveOwn(int64_t half_bytes);
  Problem OpenOrGrowOwn(int64_t half_bytes);
  Problem OpenOwn(Device& device);
  // Locks mutex_ within the timeout, and subtracts the time that this took.
  Problem LockWithin(int64_t* timeout_ns, std::unique_lock<std::mutex>* lock);
  // The callers of the next four functions hold mutex_.
  Problem WaitUntilIdle(int64_t timeout_ns);
  Problem CloseIdle();
  Problem StillBusy(const Device& device, int64_t timeout_ns) const;
  Problem ReservePeer(Device& device, int64_t half_bytes, uint64_t generation, int64_t timeout_ns);
  Answer Share(size_t device, uint64_t generation, size_t first_allocation, int64_t half_bytes);

  const Topology topology_;
  const WorkspaceKind kind_;
  Problem unknown_;                // of a device that was not registered; or empty
  ErrorRecord* errors_ = nullptr;  // of this process's ranks, in host memory
  bool spans_processes_ = false;
  std::vector<Device> devices_;  // in the order of the topology
  // There are two mutexes, because a process must share memory while it waits for memory.
  std::mutex mutex_;      // locked before own_mutex_
  std::mutex own_mutex_;  // guards this process's devices and the next three members
  bool own_is_open_ = false;
  int64_t own_half_bytes_ = 0;  // larger than half_bytes_ if another process requested more
  uint64_t generation_ = 0;     // number of Close() calls; eventually equal in all processes
#ifdef MOE_A2A_TEST_HOOKS
  // Waits until the devices are idle. Then calls set(header) for the ranks of `index`.
  template <typename Set>
  Problem ForEachHooked(int64_t index, Set&& set);
  std::atomic<bool> is_uncapped_{false};
#endif
  std::atomic<bool> is_open_{false};
  std::atomic<int64_t> half_bytes_{0};  // the most that all processes have reserved
};

}  // namespace moe_a2a
