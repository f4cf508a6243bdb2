// The package's own memory for one ring of an exchange topology: a slab per device, opened at the first
// use.
#ifndef MOE_A2A_RUNTIME_WORKSPACE_H_
#define MOE_A2A_RUNTIME_WORKSPACE_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "counters.h"
#include "params.h"
#include "runtime/side_stream.h"
#include "runtime/slab.h"

namespace moe_a2a {

// Device ordinals, domain after domain, each in the order of its ranks.
struct Topology {
  std::vector<int> ordinals;
  int num_ranks;

  bool operator<(const Topology& other) const {
    return num_ranks != other.num_ranks ? num_ranks < other.num_ranks : ordinals < other.ordinals;
  }
};

class Workspace {
 public:
  // The workspace of a ring of a topology; made closed, kept while the process lives.
  static Workspace& Get(const Topology& topology, Ring ring);

  Workspace(Topology topology, Ring ring)
      : topology_(std::move(topology)), ring_(ring), devices_(topology_.ordinals.size()) {}

  // Why the devices of the topology cannot reach each other's memory, or empty.
  Problem CheckAccess() const;

  // Opens the workspace, or grows it, so that every ring slot holds `slot_bytes`. Addresses never move.
  // What was once reserved is reserved again when it opens after Close().
  Problem Reserve(int64_t slot_bytes);

  // Waits for all devices, then gives the memory back and clears a failure. The next use opens again.
  // Nothing of the topology may be launched meanwhile.
  Problem Close();

  // What a launch on `ordinal` needs; the caller adds operation, signature and timeout.
  Problem View(int ordinal, RankView* view);

  // The stream of `ordinal` for split exchanges; null in the other ring. After View() of it.
  SideStream* Side(int ordinal);

  // The first failure that a kernel has recorded, or empty.
  std::string Failure() const;

  // Bytes of memory that each device has mapped, in the order of the topology; 0 while closed.
  std::vector<int64_t> MappedBytes();

  // Copies the counters of each device; empty while closed. Nothing of the topology may run meanwhile.
  Problem ReadCounters(std::vector<CounterValues>* values);

  bool is_open() const { return is_open_.load(std::memory_order_acquire); }
  int64_t slot_bytes() const { return is_open() ? slot_bytes_.load() : 0; }

#ifdef MOE_A2A_TEST_HOOKS
  Problem SetHooks(int ordinal, uint32_t mutation, uint32_t delay_phase, uint64_t delay_ns,
                   uint32_t depth);
  Problem SetEpoch(uint64_t epoch);
#endif

 private:
  struct Device {
    std::unique_ptr<Slab> slab;
    ErrorRecord* error = nullptr;  // host memory
    std::unique_ptr<SideStream> side;
  };

  // With mutex_ held:
  Problem Open();
  std::vector<int> DomainOf(size_t device) const;  // ordinals

  const Topology topology_;
  const Ring ring_;
  std::mutex mutex_;
  std::vector<Device> devices_;  // in the order of topology_.ordinals
  std::atomic<bool> is_open_{false};
  std::atomic<int64_t> slot_bytes_{0};  // the most that was ever reserved
};

}  // namespace moe_a2a

#endif  // MOE_A2A_RUNTIME_WORKSPACE_H_
