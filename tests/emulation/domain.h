#pragma once

#include <string>
#include <vector>

#include "params.h"

namespace emulation {

class Domain {
 public:
  // `half_bytes` must be enough for every exchange.
  Domain(int num_ranks, int64_t half_bytes);

  int num_ranks() const { return num_ranks_; }
  moe_a2a::Control& control(int rank) { return header(rank)->control; }
  moe_a2a::ErrorRecord& record(int rank) { return records_[rank]; }
  bool is_poisoned(int rank) { return control(rank).poison != 0; }

  // Timeouts are in seconds.
  moe_a2a::RankView view(int rank, moe_a2a::Operation operation, uint64_t signature, double timeout,
                         double first_timeout);

  // Returns an error that names a changed byte after the zones, or "" if there is none.
  std::string damage();

 private:
  moe_a2a::Header* header(int rank) { return reinterpret_cast<moe_a2a::Header*>(slabs_[rank]); }

  int num_ranks_;
  int64_t half_bytes_;
  std::vector<char*> slabs_;
  std::vector<moe_a2a::ErrorRecord> records_;
};

}  // namespace emulation
