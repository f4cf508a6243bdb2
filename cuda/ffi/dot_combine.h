// The state of the call `dot_combine`. A whole call that forks and joins: the product runs on XLA's
// stream, and the combine next to it on the side stream (docs/protocol_split.md, "Slices of a
// product").
#ifndef MOE_A2A_FFI_DOT_COMBINE_H_
#define MOE_A2A_FFI_DOT_COMBINE_H_

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "calls/dot_combine.h"
#include "ffi/call_state_of.h"
#include "gemm/grouped_gemm.h"

namespace moe_a2a {

class DotCombineState final : public CallStateOf<DotCombineCall> {
 public:
  using CallStateOf::CallStateOf;

 private:
  ffi::Error LaunchRanks(const Execution& execution, const LaunchState& state, Addresses args,
                         Addresses results, Params* ranks) const override {
    auto most = MostBlocksOfRank(attributes(), state, execution.ordinal);
    if (!most) return most.error();
    int sms = 0;
    if (const cudaError_t error =
            cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, execution.ordinal);
        error != cudaSuccess) {
      return ToError(error);
    }
    const int64_t ranks_here = state.ranks_of_device;
    const int64_t budget = std::max<int64_t>(1, std::min(*most, attributes().num_sms / ranks_here));
    Grid grid = grid_of(ranks[0], budget);
    const int left = sms - static_cast<int>(grid.blocks * ranks_here);
    const bool runs_next_to = left >= sms / 2;
    if (runs_next_to) {  // Late blocks take the multiprocessors that the product leaves.
      grid.roles.late_blocks = grid.blocks;
      grid.blocks = std::max(grid.blocks, static_cast<int>(*most));
    } else {
      grid = grid_of(ranks[0], *most);
    }
    for (int rank = 0; rank < std::min<int64_t>(ranks_here, 2); ++rank) {
      ranks[rank].roles = grid.roles;
      ranks[rank].sliced = ranks[0].sliced;
    }

    uint32_t* counters = reinterpret_cast<uint32_t*>(results[DotCombineCall::kCounters]);
    if (const cudaError_t error = cudaMemsetAsync(
            counters, 0, state.result_bytes[DotCombineCall::kCounters], execution.stream);
        error != cudaSuccess) {
      return ToError(error);
    }
    const ColumnSlices slices = {DotCombineCall::kNumSlices, counters + 1};
    GroupedGemm gemm = Product(state, args, results, ranks[0]);
    gemm.slices = &slices;
    gemm.num_sms = runs_next_to ? left : sms;
    const auto combine = [&](cudaStream_t stream) {
      return ToError(DotCombineCall::Launch(*state.kernels, ranks, grid.blocks, stream));
    };
    if (!runs_next_to) {
      const Problem problem = LaunchGroupedGemm(gemm, execution.stream);
      return problem.empty() ? combine(execution.stream) : ToError(problem);
    }
    // The fork comes before the product, and the product before what waits for it.
    cudaStream_t side;
    Problem problem = state.side->Fork(execution.stream, execution.run, &side);
    if (problem.empty()) problem = LaunchGroupedGemm(gemm, execution.stream);
    if (problem.empty()) problem = LaunchWaitForStart(gemm, attributes().timeout_ns, side);
    if (!problem.empty()) return ToError(problem);
    if (ffi::Error error = combine(side); error.failure()) return error;
    return ToError(state.side->JoinAll(execution.stream));
  }

  // Returns the product of all ranks of the device. Their arrays follow one another.
  GroupedGemm Product(const LaunchState& state, Addresses args, Addresses results,
                      const Params& p) const {
    using Call = DotCombineCall;
    const int64_t ranks_here = state.ranks_of_device, columns = p.summed[0].elements;
    const int64_t rows = p.routing.capacity, item = element_bytes(p.type);
    const int64_t inner = state.arg_bytes[Call::kRows] / (rows * item);
    const int64_t matrices = state.arg_bytes[Call::kWeights] / (inner * columns * item);
    const bool is_transposed = call().transposed != 0;
    GroupedGemm gemm = {};
    gemm.product = is_transposed ? GroupedProduct::kTransposed : GroupedProduct::kForward;
    gemm.type = p.type;
    gemm.a = args[Call::kRows];
    gemm.b = args[Call::kWeights];
    gemm.d = results[Call::kProducts];
    gemm.num_rows = ranks_here * rows;
    gemm.num_weights = ranks_here * matrices;
    gemm.k = is_transposed ? columns : inner;
    gemm.n = is_transposed ? inner : columns;
    gemm.num_groups = p.sliced.num_groups;
    gemm.starts = reinterpret_cast<const int32_t*>(args[Call::kTable]);
    gemm.sizes = gemm.starts + gemm.num_groups;
    gemm.weights = gemm.sizes + gemm.num_groups;
    gemm.counter = reinterpret_cast<int32_t*>(results[Call::kCounters]);
    return gemm;
  }
};

}  // namespace moe_a2a

#endif  // MOE_A2A_FFI_DOT_COMBINE_H_
