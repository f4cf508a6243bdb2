// The package's own memory for one exchange topology: a slab per device, opened at the first use.
#ifndef MOE_A2A_RUNTIME_WORKSPACE_H_
#define MOE_A2A_RUNTIME_WORKSPACE_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "params.h"
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
  // The workspace of a topology; made closed, kept while the process lives.
  static Workspace& Get(const Topology& topology);

  explicit Workspace(Topology topology) : topology_(std::move(topology)) {}

  // Opens the workspace, or grows it, so that every ring slot holds `slot_bytes`. Addresses never move.
  Problem Reserve(int64_t slot_bytes);

  // Waits for all devices, then gives the memory back and clears a failure. The next use opens again.
  Problem Close();

  // What a launch on `ordinal` needs; the caller adds operation, signature and timeout.
  Problem View(int ordinal, RankView* view);

  // The first failure that a kernel has recorded, or empty.
  std::string Failure() const;

  // Times that the workspace was opened; part of every signature.
  uint64_t generation() const { return generation_; }
  int64_t slot_bytes() const { return slot_bytes_; }

#ifdef MOE_A2A_TEST_HOOKS
  Problem SetHooks(int ordinal, uint32_t mutation, uint32_t delay_phase, uint64_t delay_ns);
  Problem SetEpoch(uint64_t epoch);
#endif

 private:
  struct Device {
    std::unique_ptr<Slab> slab;
    ErrorRecord* error = nullptr;  // host memory
  };

  Problem Open();  // with mutex_ held

  const Topology topology_;
  std::mutex mutex_;
  std::vector<Device> devices_;  // in the order of topology_.ordinals; empty before the first use
  bool is_open_ = false;
  std::atomic<int64_t> slot_bytes_{0};
  std::atomic<uint64_t> generation_{0};
};

}  // namespace moe_a2a

#endif  // MOE_A2A_RUNTIME_WORKSPACE_H_
