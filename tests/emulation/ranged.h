// A ranged dispatch of tools/driver/ranges.cuh on one rank, with a product that follows it range by range.
#pragma once

#include "exchange.h"

namespace emulation {

// A product of each row of the groups: a checksum of the row in all results of the dispatch.
class RangedLaunch {
 public:
  RangedLaunch(const Making& making, const Routing& routing) : making_(making), routing_(routing) {}

  // Launches the dispatch on a stream of its own, next to the waits and the products; sometimes an ordinary dispatch and
  // then the product. Returns when all have ended.
  cudaError_t launch(const LaunchOn& on, const moe_a2a::DispatchParams& dispatch, int num_blocks,
                     const Array& product) const;

  bool has_no_exchange() const { return making_.has_no_exchange; }

  // Returns what is wrong with a product of rows that are right, or of no exchange, or "".
  std::string wrong(int rank, const moe_a2a::DispatchParams& dispatch, const Array& product) const;

 private:
  Making making_;
  const Routing& routing_;
};

// Loads the kernels of ranged dispatches and of their product.
cudaError_t load_ranged();

}  // namespace emulation
