// The memory for one workspace kind of a topology: a slab per device, opened at the first use. Each
// process allocates the slabs of its own devices, and maps the slabs of other processes.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
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
  // Ids, domain after domain, in the order of ranks. If ranks share a device, its id appears once
  // for each rank.
  std::vector<int64_t> devices;
  int num_ranks;

  // Returns true if all ranks share a device. Then there is one domain.
  bool is_colocated() const { return num_ranks > 1 && devices[0] == devices[1]; }
  int ranks_of_device() const { return is_colocated() ? num_ranks : 1; }

  bool operator<(const Topology& other) const {
    return std::tie(num_ranks, devices) < std::tie(other.num_ranks, other.devices);
  }
};

// The counters of a rank (docs/protocol.md, section 4): the next epoch, the poison, and the epochs
// [kRingDepth, num_ranks] of credits and heads.
using CounterValues = std::tuple<uint64_t, uint64_t, std::vector<uint64_t>, std::vector<uint64_t>>;

class Workspace {
 public:
  // Returns the workspace of a topology and a kind. A new workspace is closed. Workspaces are never
  // destroyed.
  static Workspace& Get(const Topology& topology, WorkspaceKind kind);

  Workspace(Topology topology, WorkspaceKind kind);

  // Returns why the devices of this process cannot reach each other's memory, or empty.
  Problem CheckAccess() const;

  // Opens or grows the workspace, so that every ring half of every device holds `half_bytes`.
  // Addresses never move. If the workspace opens after Close(), it again reserves the memory that
  // it had before.
  //
  // Other processes need not make the same call: they allocate the missing memory of their devices
  // when this process requests it, and have `timeout_ns` to answer.
  //
  // If a device has too little memory, a smaller size can still be reserved. If the workspace was
  // closed, its memory in this process is freed. The memory added to an open workspace, and the
  // memory that other processes have allocated, stays until Close().
  Problem Reserve(int64_t half_bytes, int64_t timeout_ns);

  // If the workspace is open, waits until the devices of this process are idle. After `timeout_ns`,
  // returns a problem that says what runs on a device.
  Problem Wait(int64_t timeout_ns);

  // Waits like Wait(). Then frees the memory of this process's devices, unmaps the memory of other
  // processes, and clears a failure. The next use opens the workspace again, after the other
  // processes have closed it too. If the wait times out, nothing has changed. The caller must not
  // launch exchanges of the topology during this call.
  Problem Close(int64_t timeout_ns) { return Close({this}, timeout_ns); }

  // Closes all of these workspaces, or none of them if a wait times out. Processes that have not
  // closed a workspace equally often could never open it again. Every caller must list the
  // workspaces in the same order.
  static Problem Close(const std::vector<Workspace*>& workspaces, int64_t timeout_ns);

  // Returns the kernels for this topology.
  const Kernels& kernels() const;

  // Returns the parameters of a launch on `ordinal` for the first rank of that device. The caller
  // adds operation, signature and timeouts. The error records of ranks that share a device are
  // adjacent.
  Problem View(int ordinal, RankView* view) const;

  // Returns the side stream of `ordinal`, which all ranks of this device share. Returns null in a
  // workspace for whole exchanges, or if the workspace was never opened.
  SideStream* Side(int ordinal) const;

  // Returns the most informative failure that a kernel of this process has recorded, or empty.
  // Reads only host memory.
  std::string Failure() const;

  // Does the same as Failure(), but without a record it reads the poison of this process's ranks.
  // Another rank may have poisoned a rank that has launched nothing since.
  Problem ReadFailure(std::string* failure);

  // Returns the bytes that each device of this process has mapped, in the order of the topology; 0
  // while closed.
  std::vector<int64_t> MappedBytes();

  // Copies the counters of each device of this process; none while closed. The devices must be
  // idle.
  Problem ReadCounters(std::vector<CounterValues>* values);

  bool is_open() const { return is_open_.load(std::memory_order_acquire); }
  int64_t half_bytes() const { return is_open() ? half_bytes_.load() : 0; }
  bool spans_processes() const { return spans_processes_; }
  const Topology& topology() const { return topology_; }

#ifdef MOE_A2A_TEST_HOOKS
  // Sets the hooks of the rank with this index in the topology, or of all ranks of this process if
  // the index is -1.
  Problem SetHooks(int64_t index, uint32_t mutation, uint32_t delay_phase, uint64_t delay_ns,
                   uint32_t depth);
  // Sets the next epoch of the rank, as if all earlier exchanges had run. `index`: as above.
  Problem SetEpoch(int64_t index, uint64_t epoch);
  // Sets all credits of the rank to `epoch`.
  Problem SetCredits(int64_t index, uint64_t epoch);
  // Sets whether ranks that share a device may have as many blocks as their budget allows.
  void SetUncapped(bool is_uncapped) { is_uncapped_ = is_uncapped; }
  bool is_uncapped() const { return is_uncapped_; }
#endif

  // Answers another process's request for memory of a device of this process.
  static Answer Serve(const Request& request);

 private:
  // A device of the domains that this process takes part in.
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
#ifdef MOE_A2A_TEST_HOOKS
  // Calls set(slab) for one rank, or for all ranks of this process if the index is -1, while
  // nothing runs.
  template <typename Set>
  Problem ForEachHooked(int64_t index, Set&& set);
#endif
  // Returns the ordinals of this process's devices in the domain of `device`.
  std::vector<int> ReadersOf(const Device& device) const;
  int rank(const Device& device) const {
    return static_cast<int>(device.index) % topology_.num_ranks;
  }

  // The caller holds own_mutex_. Opens or grows the slabs of this process's devices.
  Problem ReserveOwn(int64_t half_bytes);
  Problem OpenOrGrowOwn(int64_t half_bytes);
  // Opens the slab, kernels, error record and side stream of a device.
  Problem OpenOwn(Device& device);
  // Locks mutex_ and reduces the timeout by the time that locking took. Another thread may hold
  // mutex_ while it waits for the memory of another process, for longer than the timeout.
  Problem LockWithin(int64_t* timeout_ns, std::unique_lock<std::mutex>* lock);
  // Does the work of Wait(). The caller holds mutex_.
  Problem WaitUntilIdle(int64_t timeout_ns);

  // The second half of Close(). The caller holds mutex_, and the devices are idle.
  Problem CloseIdle();
  Problem StillBusy(const Device& device, int64_t timeout_ns) const;
  // The caller holds mutex_. Maps a slab of another process.
  Problem ReservePeer(Device& device, int64_t half_bytes, uint64_t generation, int64_t timeout_ns);
  Answer Share(size_t device, uint64_t generation, size_t first_allocation, int64_t half_bytes);

  const Topology topology_;
  const WorkspaceKind kind_;
  Problem unknown_;                // says that a device was not registered; otherwise empty
  ErrorRecord* errors_ = nullptr;  // of this process's ranks, in host memory
  bool spans_processes_ = false;
  std::vector<Device> devices_;  // in the order of the topology
  // Two mutexes, because another process may request memory while this process waits for that
  // process's memory. mutex_ is locked first.
  std::mutex mutex_;
  std::mutex own_mutex_;  // guards this process's devices and the next three members
  bool own_is_open_ = false;
  int64_t own_half_bytes_ = 0;  // more than half_bytes_ if another process has requested more
  uint64_t generation_ = 0;     // number of Close() calls; eventually equal in all processes
#ifdef MOE_A2A_TEST_HOOKS
  std::atomic<bool> is_uncapped_{false};
#endif
  std::atomic<bool> is_open_{false};
  std::atomic<int64_t> half_bytes_{0};  // the most that was reserved in this process and all peers
};

}  // namespace moe_a2a
