// A ranged dispatch of tools/driver/ranges.cuh on one rank, with a product that follows it range by range.
#pragma once

#include "exchange.h"

namespace emulation {

// A product of each row of the groups: a checksum of the row in all results of the dispatch.
class RangedLaunch {
 public:
  explicit RangedLaunch(const Routing& routing) : routing_(routing) {}

  // Launches the dispatch on a stream of its own, next to the waits and the products; sometimes an ordinary dispatch and
  // then the product. Returns when all have ended.
  cudaError_t launch(const LaunchOn& on, const moe_a2a::DispatchParams& dispatch, int num_blocks,
                     const Array& product) const;

  // Returns what is wrong with a product of rows that are right, or "".
  std::string wrong(int rank, const moe_a2a::DispatchParams& dispatch, const Array& product) const;

 private:
  const Routing& routing_;
};

// Loads the kernels of ranged dispatches and of their product.
cudaError_t load_ranged();

}  // namespace emulation
