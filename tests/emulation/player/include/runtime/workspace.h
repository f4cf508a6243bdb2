// Stands in for cuda/runtime/workspace.h: the ranks of one device, in the memory of the emulator's Domain.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "domain.h"
#include "params.h"
#include "runtime/problem.h"

namespace moe_a2a {

struct DevicePlace {
  int process, ordinal;
};
inline void AddDevice(int64_t, DevicePlace) {}

struct Topology {
  std::vector<int64_t> devices;
  int num_ranks, p2p_world_size;
};

class Workspace {
 public:
  static Workspace& Get(const Topology& topology, WorkspaceKind) {
    static Workspace workspace;
    workspace.num_ranks_ = topology.num_ranks;
    return workspace;
  }
  Problem Reserve(int64_t half_bytes, int64_t) {
    domain_ = std::make_unique<emulation::Domain>(num_ranks_, half_bytes, kMaxRanks);
    records_.assign(num_ranks_, ErrorRecord{});
    return {};
  }
  Problem View(int, RankView* view) {
    *view = domain_->view(0, Operation::kDispatch, 0, 1, 1);
    view->error = records_.data();
    return {};
  }
  Problem Close(int64_t) { return domain_->damage(); }
  std::string Failure() const {
    for (const ErrorRecord& record : records_) {
      if (record.kind != 0) return describe(record);
    }
    return {};
  }

 private:
  int num_ranks_ = 0;
  std::unique_ptr<emulation::Domain> domain_;
  std::vector<ErrorRecord> records_;
};

}  // namespace moe_a2a
