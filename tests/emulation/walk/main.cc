// Checks the order of the grouped GEMM's tiles (gemm/schedule.cuh) with random groups: all tiles of
// a slice of columns come before those of the next, and each tile comes once. Prints a line for
// each error. Exit status: 0 without errors.
//   walk --seed N
#include <cstdio>
#include <cstdlib>
#include <map>
#include <numeric>
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
  int stride;  // blocks; each takes every stride-th position
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

// Returns the error of a list, or null.
template <typename F>
const char* check(Random& random) {
  const int num_groups = 1 + random.below(random.one_in(4) ? 70 : 8);
  const int num_slices = F::kIsSliced ? 1 + random.below(5) : 1;
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
  const int64_t columns = slice_columns(p.gemm.n, num_slices);
  p.gemm.slices = {static_cast<int32_t>(ceil_div(p.gemm.n, columns)),
                   static_cast<int32_t>(columns / F::kResultN), nullptr};
  p.stride = 1 + random.below(3);
  int64_t most = p.stride;
  for (int32_t size : sizes) most += slice_tiles(size, p.gemm.n);
  std::vector<Work> found(most + p.stride, Work{0, -2, 0, 0});
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

  std::map<std::tuple<int, int, int>, int> seen;  // by the group's start and size, m and n
  std::vector<int64_t> counts(p.gemm.slices.num_slices);
  int slice = 0;
  for (const Work& work : found) {
    if (work.size == -2) return "a position is missing";
    if (work.is_end()) break;
    for (uint32_t rank = 0; rank < F::kBlocks; ++rank) {
      const Tile<F> tile(p.gemm, work, rank);
      if constexpr (F::kIsSliced) {
        const int of = Tile<F>::slice_of(p.gemm, work);
        if (of < slice) return "a slice comes too late";
        slice = of;
      }
      if (!tile.has_results()) continue;
      if (tile.end_n > p.gemm.n || (F::kIsSliced && tile.end_n > (slice + 1) * columns)) {
        return "a tile ends after its slice";
      }
      ++counts[slice];
      if (++seen[{work.start, tile.m, tile.n}] > 1) return "a tile comes twice";
    }
  }
  for (int s = 0; s < p.gemm.slices.num_slices; ++s) {
    int64_t tiles = 0;
    for (int32_t size : sizes)
      tiles += slice_tiles(size, std::min(columns, p.gemm.n - s * columns));
    if (counts[s] != tiles) return "a slice has another number of tiles than its count says";
  }
  return nullptr;
}

}  // namespace

int main(int argc, char** argv) {
  Random random(argc == 3 ? std::atoi(argv[2]) : 1);
  int wrong = 0;
  const auto run = [&](const char* name, const char* error) {
    if (error == nullptr) return;
    std::printf("wrong: %s: %s\n", name, error);
    ++wrong;
  };
  for (int i = 0; i < 30; ++i) {
    run("plain", check<Forward<Epilogue::kStore>>(random));
    run("sliced", check<Forward<Epilogue::kStore, true>>(random));
  }
  return wrong > 0;
}
