// The package's own memory for one workspace kind of an exchange topology: a slab per device, opened at the first
// use. Each process has one for the devices that it holds, and maps the slabs of the others.
#ifndef MOE_A2A_RUNTIME_WORKSPACE_H_
#define MOE_A2A_RUNTIME_WORKSPACE_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "counters.h"
#include "kernels/launch.h"
#include "params.h"
#include "runtime/devices.h"
#include "runtime/handoff.h"
#include "runtime/side_stream.h"
#include "runtime/slab.h"

namespace moe_a2a {

// Device ids, domain after domain, each in the order of its ranks. Ranks that share a device name it each.
struct Topology {
  std::vector<int64_t> devices;
  int num_ranks;
  int p2p_world_size;  // neighbouring ranks that share memory; the others are reached by NVSHMEM

  bool is_wide() const { return p2p_world_size < num_ranks; }
  // True if the ranks share a device. Then there is one domain.
  bool is_colocated() const { return num_ranks > 1 && devices[0] == devices[1]; }

  bool operator<(const Topology& other) const {
    return std::tie(num_ranks, p2p_world_size, devices) <
           std::tie(other.num_ranks, other.p2p_world_size, other.devices);
  }
};

class Workspace {
 public:
  // The workspace of a ring of a topology; made closed, kept while the process lives.
  static Workspace& Get(const Topology& topology, Ring ring);

  Workspace(Topology topology, Ring ring);

  // Returns why the devices of this process cannot reach each other's memory, or empty.
  Problem CheckAccess() const;

  // Opens the workspace, or grows it, so that every ring half of every device holds `slot_bytes`.
  // Addresses never move. When it opens after Close(), it reserves again what was reserved before. Other processes need
  // not have come to the same place: they open the missing memory of their devices at this process's request. They have
  // `timeout_ns` to answer. If a device has no room, less can still be reserved. If this process was about to open, it
  // has freed what it had allocated. Memory by which it has grown, and memory that other processes have allocated,
  // stays until Close().
  Problem Reserve(int64_t slot_bytes, int64_t timeout_ns);

  // Does what can fail in this process by itself before OpenWide(): a process that failed within OpenWide() before it
  // allocates would leave the others waiting in NVSHMEM, without a bound.
  Problem PrepareWide();

  // Opens the workspace of a multi-host topology, or opens it again after Close(); PrepareWide() comes first. The first
  // time, all processes call it together, when all are prepared, and launch nothing before all are back. That call
  // allocates the memory, which never grows and is never freed: the ring halves follow each other in it, at addresses
  // that captured graphs keep.
  Problem OpenWide(int64_t slot_bytes);

  // Waits until the devices of this process have done all that they were given, if the workspace is open. If they have
  // not after `timeout_ns`, returns a problem that says what they still do.
  Problem Wait(int64_t timeout_ns);

  // Waits like Wait(), then frees the devices' memory, unmaps that of the others, and clears a failure. The next
  // use opens again, with the others when they have closed too. If the wait times out, nothing has changed. Nothing of
  // the topology may be launched meanwhile.
  Problem Close(int64_t timeout_ns);

  // The exchanges that run on this topology.
  const Kernels& kernels() const;

  // The parameters of a launch on `ordinal`, for the first rank there; the caller adds operation, signature and
  // timeout. The error records of ranks that share a device lie one after the other.
  Problem View(int ordinal, RankView* view);

  // The stream of `ordinal` for split exchanges, common to all ranks there; null in a workspace for whole exchanges.
  // After View() of it.
  SideStream* Side(int ordinal);

  // The first failure that a kernel has recorded in this process, or empty. Reads host memory only.
  std::string Failure() const;

  // The same, or the failure that another rank has reported to a rank of this process that has launched nothing since.
  Problem ReadFailure(std::string* failure);

  // Bytes of memory that each device of this process has mapped, in the order of the topology; 0 while
  // closed.
  std::vector<int64_t> MappedBytes();

  // Copies the counters of each device of this process; empty while closed. Nothing of the topology may
  // run meanwhile.
  Problem ReadCounters(std::vector<CounterValues>* values);

  bool is_open() const { return is_open_.load(std::memory_order_acquire); }
  int64_t slot_bytes() const { return is_open() ? slot_bytes_.load() : 0; }
  bool spans_processes() const { return spans_processes_; }

#ifdef MOE_A2A_TEST_HOOKS
  // For the rank with that index in the topology, or (-1) for all of this process.
  Problem SetHooks(int64_t index, uint32_t mutation, uint32_t delay_phase, uint64_t delay_ns,
                   uint32_t depth);
  // For one rank, or (-1) for all.
  Problem SetEpoch(int64_t index, uint64_t epoch);
  // Sets the epoch up to which the rank believes that its rows have been read.
  Problem SetCredits(int64_t index, uint64_t epoch);
  // Lets each of several ranks on one device have as many blocks as its budget says.
  void SetUncapped(bool is_uncapped) { is_uncapped_ = is_uncapped; }
  bool is_uncapped() const { return is_uncapped_; }
#endif

  // Answers a request of another process for the memory of a device of this one.
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
    char* wide = nullptr;  // of a multi-host topology, the slab

    bool is_own() const { return place.ordinal != kElsewhere; }
    char* base() const { return wide != nullptr ? wide : is_own() ? own->base() : peer->base(); }
  };

  std::vector<Device*> OwnDevices();
#ifdef MOE_A2A_TEST_HOOKS
  // Calls set(slab) for one rank or (-1) all of this process, while nothing runs.
  template <typename Set>
  Problem ForEachHooked(int64_t index, Set&& set);
#endif
  // The ordinals of this process in the device's domain.
  std::vector<int> ReadersOf(const Device& device) const;
  int rank(const Device& device) const {
    return static_cast<int>(device.index) % topology_.num_ranks;
  }

  // With own_mutex_ held: opens or grows what this process holds.
  Problem ReserveOwn(int64_t slot_bytes);
  Problem OpenOrGrowOwn(int64_t slot_bytes);
  Problem OpenOwn(Device& device);
  void ReleaseOwn();
  // With mutex_ held: Wait(), and the problem of a wait that timed out.
  Problem WaitUntilIdle(int64_t timeout_ns);
  Problem StillBusy(const Device& device, int64_t timeout_ns) const;
  // With both held: what a device has besides its slab.
  Problem OpenRest(Device& device);
  Problem AllocateWide(Device& own, int64_t slot_bytes);
  // With mutex_ held: maps what another process holds.
  Problem ReservePeer(Device& device, int64_t slot_bytes, uint64_t generation, int64_t timeout_ns);
  Answer Share(size_t device, uint64_t generation, size_t first_piece, int64_t slot_bytes);

  const Topology topology_;
  const Ring ring_;
  Problem unknown_;                // a device that was not registered
  ErrorRecord* errors_ = nullptr;  // of the own devices, in host memory
  bool spans_processes_ = false;
  std::vector<Device> devices_;  // in the order of the topology
  Network network_ = {};         // of a multi-host topology
  // Two, because another process may ask for memory while this one waits for its: mutex_ first.
  std::mutex mutex_;
  std::mutex own_mutex_;  // guards this process's devices and the next three members
  bool own_is_open_ = false;
  int64_t own_slot_bytes_ = 0;  // more than slot_bytes_ if another process has asked for more
  uint64_t generation_ = 0;     // how often it was closed, the same in all processes
#ifdef MOE_A2A_TEST_HOOKS
  std::atomic<bool> is_uncapped_{false};
#endif
  std::atomic<bool> is_open_{false};
  std::atomic<int64_t> slot_bytes_{0};  // the most that was ever reserved, here and at all peers
};

}  // namespace moe_a2a

#endif  // MOE_A2A_RUNTIME_WORKSPACE_H_
