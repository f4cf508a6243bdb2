// Checks with random groups that the schedule of the grouped GEMM (gemm/schedule.cuh) visits each
// tile once. Usage: walk --seed N.
#include <cstdio>
#include <cstdlib>
#include <set>
#include <tuple>
#include <vector>

#include "gemm/grouped_gemm.h"
#include "gemm/schedule.cuh"
#include "launch.h"
#include "random.h"

namespace {

using namespace emulation;
using namespace moe_a2a;
using namespace moe_a2a::gemm;

struct ListParams {
  GemmParams gemm;
  Work* found;
  int stride;  // each block lists every stride-th position
};

template <typename F>
void list_tiles(const ListParams* p) {
  Walk<F> walk(p->gemm);
  for (int position = static_cast<int>(emulation::block_index().x);; position += p->stride) {
    const Work work = walk.at(position);
    if (lane_index() == 0) p->found[position] = work;
    if (work.is_end()) return;
  }
}

// Returns the first error in the list, or null.
template <typename F>
const char* check(Random& random) {
  const int num_groups = 1 + random.below(random.one_in(4) ? 70 : 8);
  std::vector<int32_t> sizes, starts, weights;
  int32_t rows = 0;
  for (int group = 0; group < num_groups; ++group) {
    sizes.push_back(random.one_in(4) ? 0 : random.below(random.one_in(8) ? 3000 : 400));
    starts.push_back(rows);
    weights.push_back(random.one_in(9) ? -1 : group);
    rows += sizes.back();
  }
  ListParams p = {};
  p.gemm.n = 1 + random.below(3000);
  p.gemm.k = 64;
  p.gemm.starts = starts.data(), p.gemm.sizes = sizes.data(), p.gemm.weights = weights.data();
  p.gemm.num_groups = num_groups;
  p.stride = 1 + random.below(3);
  int64_t tiles = 0;
  for (int32_t size : sizes) tiles += ceil_div(size, F::kResultM) * ceil_div(p.gemm.n, F::kResultN);
  std::vector<Work> found(tiles + 2 * p.stride, Work{0, -2, 0, 0});
  p.found = found.data();
  const ListParams* pointer = &p;
  void* arguments[] = {&pointer};
  auto* const kernel = list_tiles<F>;
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess ||
      cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(p.stride), dim3(32), arguments,
                       0, stream_of(0)) != cudaSuccess) {
    return "the launch failed";
  }

  std::set<std::tuple<int, int, int>> seen;  // (start of the tile's group, its m, its n)
  for (const Work& work : found) {
    if (work.size == -2) return "a position is missing";
    if (work.is_end()) break;
    for (uint32_t rank = 0; rank < F::kBlocks; ++rank) {
      const Tile<F> tile(p.gemm, work, rank);
      if (tile.m >= tile.end_m || tile.n >= tile.end_n) continue;
      if (!seen.insert({work.start, tile.m, tile.n}).second) return "a tile comes twice";
    }
  }
  return static_cast<int64_t>(seen.size()) == tiles ? nullptr : "a tile is missing";
}

}  // namespace

int main(int argc, char** argv) {
  Random random(argc == 3 ? std::atoi(argv[2]) : 1);
  for (int i = 0; i < 60; ++i) {
    if (const char* error = check<Forward<Epilogue::kStore>>(random); error != nullptr) {
      std::printf("wrong: %s\n", error);
      return 1;
    }
  }
  return 0;
}
