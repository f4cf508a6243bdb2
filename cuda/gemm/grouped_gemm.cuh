// A grouped GEMM: multiplies groups of rows by weight matrices, or computes the weights' gradient.
//
// Holds afterwards: for every group, d[m, n] = sum over k of a[m, k] b[k, n], in float32 and
// rounded once. Groups with a negative weight index have zeros. With Epilogue::kAdd, d has
// increased by these sums in float32, and is unchanged for a group without rows. Rows that belong
// to no group are not read or written.
//
// Layout: gemm/form.h describes the axis of the rows, and the layout of tiles in shared memory.
//
// Roles: in the last warp group of a block, one warp takes tiles of d, one warp loads tiles of a
// and b into kStages stages, and two warps store results. The two other warp groups are consumers.
// Each of them multiplies half of a tile along m, and writes results to shared memory, from where
// one of the storing warps stores them (gemm/store_queue.cuh). Many results are written while the
// next tile's products run. The first of kBlocks blocks takes tiles, from a counter or in turn, and
// tells the other one. Any number of blocks completes the work. With a counter, blocks that start
// late take fewer tiles. A tile is taken only when the loader soon needs it, because a slow block
// must not hold tiles that other blocks could start earlier.
//
// Forms: a kernel has one form, or a form for many rows in a group and one for few rows. In a
// kernel of two forms, each block adds up the gains of the form for few rows over all groups, so
// all blocks choose the same form. gemm/launch.cuh chooses the kernel.
//
// For an epilogue that reads an array, such as pre-activations, the loader fills kReadStages stages
// after a tile's operands. A block uses all these stages, even for fewer columns. Consumers
// overwrite what they have read with results.
//
// Waits: the loader waits until the consumers of both blocks have released a stage, because a load
// may be for both blocks. Consumers wait for the loads. If an epilogue reads a stage, the storing
// warps release it for the consumers, when the stores have read it. No cluster waits for another
// cluster.
//
// Launch: kGemmThreads threads, clusters of kBlocks blocks of the first form. A second form of one
// block ignores the cluster. `next_tile` is null or points to a 0.
#pragma once

#include "gemm/epilogue.cuh"
#include "gemm/hopper.cuh"
#include "gemm/schedule.cuh"

namespace moe_a2a::gemm {

constexpr int kWorkEntries = 2;
constexpr int kStepsAhead = Tuning::kGemmStepsAhead;
static_assert(sizeof(Work) == sizeof(int4), "an entry of work is sent in one store");

template <typename F>
struct alignas(1024) GemmShared {
  char a[F::kStages][F::kBytesA];
  char b[F::kStages][F::kBytesB];
  StoreBuffers<F> results[kConsumerGroups];
  uint64_t loaded[F::kStages], released[F::kStages];
  // work_read: all warps of this block (in the first of two blocks: of both) have read it.
  uint64_t work_sent[kWorkEntries], work_read[kWorkEntries];
  uint64_t tile_wanted;  // the loader soon needs one more tile
  Work work[kWorkEntries];
  StoreQueue<F> stores[kConsumerGroups];
};

template <Major kMajor>
__device__ inline Box box_of(const Plane& plane, int32_t mn, int32_t k) {
  return kMajor == Major::kK ? plane.box(k, mn) : plane.box(mn, k);
}

// Returns the first column of weights in a box of a gated tile, whose results begin at column
// `first` of I. Operand b has two boxes of gate columns, then two boxes of up columns. Operand a
// has one gate box and one up box for each warp group.
template <bool kIsA>
__device__ inline int32_t gated_column(int32_t first, int box, int32_t num_columns) {
  const int half = kIsA ? box % 2 : box / 2, of_half = kIsA ? box / 2 : box % 2;
  return first + of_half * kBoxElements + half * num_columns;
}

template <typename F>
__device__ inline int32_t end_of_rows(const Work& work, const Tile<F>& tile) {
  return F::kVaries ? tile.end_n : work.size;
}

// Calls body(std::integral_constant<int, extent>) with the extent of a tile's products along n.
template <typename F, typename Body>
__device__ inline void with_extent(const Tile<F>& tile, Body&& body) {
  if constexpr (!F::kVaries) {
    body(std::integral_constant<int, F::kTileN>{});
  } else {
    static_assert(F::kTileN == 144);
    switch (tile.extent) {
      case 32: return body(std::integral_constant<int, 32>{});
      case 64: return body(std::integral_constant<int, 64>{});
      case 96: return body(std::integral_constant<int, 96>{});
      case 112: return body(std::integral_constant<int, 112>{});
      case 120: return body(std::integral_constant<int, 120>{});
      case 128: return body(std::integral_constant<int, 128>{});
      case 136: return body(std::integral_constant<int, 136>{});
      default: return body(std::integral_constant<int, 144>{});
    }
  }
}

// Reads an entry of `work`. The first block may overwrite the entry after all lanes have read it.
__device__ inline Work read_work(const volatile Work& from) {
  const Work work = {from.start, from.size, from.weight, from.tile};
  __syncwarp();
  return work;
}

// What an epilogue reads: an array through stages (Reader), or row weights before the products.
template <typename T, typename F>
using Reader = std::conditional_t<F::kDerives, Derivative<T, F>, AddToTotals<F>>;
template <typename T, typename F>
using Before = std::conditional_t<
    F::kReads, Reader<T, F>,
    std::conditional_t<F::kEpilogue == Epilogue::kStore, Nothing, RowWeights<F>>>;

// Arrives at a barrier of one of the blocks that share loads. Forms of one such block may run in
// hardware clusters of two blocks.
template <typename F>
__device__ inline void arrive_at_block(uint64_t* barrier, uint32_t block) {
  if constexpr (F::kBlocks == 1) {
    arrive(barrier);
  } else {
    arrive_at(barrier, block);
  }
}

// Takes tiles, and tells them to all warps of the cluster. One warp of each block does only this,
// so that the next tile is known before the loader needs it.
//
// The first block writes entries of `work` in both blocks, and reuses an entry after all warps have
// read it. If the second block's warps arrived at a barrier of the first block, consumers would
// need a slow cluster-scope fence in each tile. These warps therefore arrive at a barrier of the
// second block, where this function waits before it arrives at the first block.
template <typename F>
__device__ inline void take_tiles(const GemmParams& p, GemmShared<F>& shared, uint32_t rank) {
  constexpr bool kIsCluster = F::kBlocks > 1;
  Cursor<kWorkEntries> entry;
  if (rank == 0) {
    Walk<F> walk(p);
    const auto take = [&] {
      int taken = 0;
      if (lane_index() == 0) taken = atomicAdd(p.next_tile, 1);
      return __shfl_sync(kAllLanes, taken, 0);
    };
    int position = blockIdx.x / F::kBlocks;
    Cursor<1> wanted;
    for (bool is_first = true;; is_first = false) {
      if (!is_first) {
        wait_for(&shared.tile_wanted, wanted.parity);
        wanted.advance();
      }
      if (p.next_tile != nullptr) position = take();
      const Work work = walk.at(position);
      position += gridDim.x / F::kBlocks;
      wait_for<kIsCluster>(&shared.work_read[entry.place], entry.parity ^ 1);
      if (lane_index() < F::kBlocks) {
        const int4 words = {work.start, work.size, work.weight, static_cast<int>(work.tile)};
        send(reinterpret_cast<int4*>(&shared.work[entry.place]), &shared.work_sent[entry.place],
             kIsCluster ? lane_index() : cluster_rank(), words);
      }
      if (work.is_end()) return;
      entry.advance();
    }
  }
  while (true) {
    wait_for<kIsCluster>(&shared.work_sent[entry.place], entry.parity);
    const Work work = read_work(shared.work[entry.place]);
    if (work.is_end()) return;
    if (lane_index() == 0) arrive_at(&shared.work_read[entry.place], rank);
    wait_for(&shared.work_read[entry.place], entry.parity);
    if (lane_index() == 0) arrive_in_cluster_order(&shared.work_read[entry.place], 0);
    entry.advance();
  }
}

template <typename F>
__device__ inline Work receive_work(GemmShared<F>& shared, uint32_t rank,
                                    Cursor<kWorkEntries>& entry) {
  wait_for<(F::kBlocks > 1)>(&shared.work_sent[entry.place], entry.parity);
  const Work work = read_work(shared.work[entry.place]);
  if (lane_index() == 0) arrive_at_block<F>(&shared.work_read[entry.place], rank);
  entry.advance();
  return work;
}

// Loads all tiles. One warp calls it.
template <typename T, typename F>
__device__ inline void load_tiles(const GemmParams& p, GemmShared<F>& shared, uint32_t rank) {
  constexpr bool kIsCluster = F::kBlocks > 1;
  static_assert(kStepsAhead >= 1 && kStepsAhead > F::kReadStages - F::kStages,
                "a consumer keeps its last stage until it knows the next tile");
  const bool is_first_lane = lane_index() == 0;
  Cursor<kWorkEntries> entry;
  Cursor<F::kStages> stage;
  while (true) {
    Work work = receive_work(shared, rank, entry);
    if (work.is_end()) return;
    const Tile<F> tile(p, work, rank);
    // Only the loader distinguishes weights and spare weights.
    const bool is_spare = F::kHasRaggedD && work.weight >= p.first_spare;
    work.weight -= is_spare ? p.first_spare : 0;
    const Plane plane_a(F::kHasRaggedA, work, work.size),
        plane_b(F::kHasRaggedB, work, end_of_rows(work, tile)),
        plane_d(F::kHasRaggedD, work, end_of_rows(work, tile));
    constexpr int kBytesOfRowB = F::kBytesB / F::kTileN;
    const int rows_b = tile.loaded_rows();
    const int products = tile.steps(), steps = products + F::kReadStages;
    // A group without weights has one step, past the end of k, where the hardware loads zeros.
    const int32_t first_k = F::kRows != Axis::kK && work.weight < 0 ? p.k : 0;
    const auto want_tile = [&] {
      if (is_first_lane && rank == 0) arrive(&shared.tile_wanted);
    };
    if (steps < kStepsAhead) want_tile();
    for (int step = 0; step < steps; ++step) {
      if (step == steps - kStepsAhead) want_tile();
      wait_for(&shared.released[stage.place], stage.parity ^ 1);
      uint64_t* loaded = &shared.loaded[stage.place];
      char* a = shared.a[stage.place];
      char* b = shared.b[stage.place];
      if (F::kReads && step >= products) {
        if constexpr (F::kReads) {
          const int n = (step - products) * kBoxElements;
          if (is_first_lane) Reader<T, F>::load(p, tile, plane_d, n, {a, b, nullptr}, loaded);
        }
      } else if (is_first_lane) {
        const int32_t k = first_k + step * F::kStepK;
        expect_bytes(loaded, F::kBytesA + rows_b * kBytesOfRowB);
        // Branches choose the map, because the loader lacks registers for a computed address.
        const auto load_from = [&](const CUtensorMap& map, bool has_weights, char* to,
                                   const Box& box, auto&& load) {
          if (has_weights && is_spare) {
            load(to, &p.spare, box, loaded);
          } else {
            load(to, &map, box, loaded);
          }
        };
        const auto load_a = [&](int box, auto&& load) {
          const int32_t m = F::kIsGated && F::kRows == Axis::kN
                                ? gated_column<true>(tile.m, box, p.activation.num_columns)
                                : tile.m + box * kBoxElements;
          load_from(p.a, F::kWeightsAreA, a + box * kBoxBytes, box_of<F::kMajorA>(plane_a, m, k),
                    load);
        };
        const auto load_b = [&](int box, auto&& load) {
          const int32_t n = F::kIsGated && F::kRows == Axis::kM
                                ? gated_column<false>(tile.n, box, p.activation.num_columns)
                                : tile.n + box * F::kRowsOfBoxB;
          load_from(p.b, !F::kWeightsAreA, b + box * F::kRowsOfBoxB * kBytesOfRowB,
                    box_of<F::kMajorB>(plane_b, n, k), load);
        };
        const auto load_last_b = [&](auto&& load) {
          constexpr int kFirst = F::kBoxesB * F::kRowsOfBoxB;
          if (!F::kVaries || rows_b <= kFirst) return;
          load(b + kFirst * kBytesOfRowB, &p.last_b,
               box_of<F::kMajorB>(plane_b, tile.n + kFirst, k), loaded);
        };
        const int boxes_b = F::kVaries ? min(F::kBoxesB, rows_b / F::kRowsOfBoxB) : F::kBoxesB;
        if (kIsCluster && shares_a<F>(work)) {
          constexpr int kHalf = F::kBoxesA / 2;
          for (int box = 0; box < kHalf; ++box) load_a(rank * kHalf + box, load_box_for_both);
          for (int box = 0; box < boxes_b; ++box) load_b(box, load_box);
          load_last_b(load_box);
        } else {
          for (int box = 0; box < F::kBoxesA; ++box) load_a(box, load_box);
          if constexpr (kIsCluster) {
            constexpr int kHalf = F::kBoxesB / 2;
            for (int box = 0; box < kHalf; ++box) {
              const int of_rank = rank * kHalf + box;
              if (of_rank < boxes_b) load_b(of_rank, load_box_for_both);
            }
            if (rank == 0) load_last_b(load_box_for_both);
          } else {
            for (int box = 0; box < F::kBoxesB; ++box) load_b(box, load_box);
          }
        }
      }
      __syncwarp();
      stage.advance();
    }
  }
}

template <typename T, typename F>
__device__ inline void multiply_tiles(const GemmParams& p, GemmShared<F>& shared, uint32_t rank) {
  constexpr int kWarpGroupM = F::kTileM / kConsumerGroups;
  constexpr int kResultM = F::kResultM / kConsumerGroups;  // of this warp group's results
  const int warp = static_cast<int>(uniform(threadIdx.x / kWarpThreads)),
            group = warp / kWarpsOfGroup;
  const int first_m = group * kWarpGroupM;
  BoxWriter<F> writer(shared.results[group], shared.stores[group]);
  constexpr bool kActivatesAlongN = F::kIsTurned && F::kEpilogue != Epilogue::kStore;
  constexpr bool kStoresLate = !F::kReads && !kActivatesAlongN;
  std::conditional_t<kStoresLate, Rounded<F>, Nothing> rounded;
  const uint32_t descriptor_a =
      uniform(operand_descriptor(shared.a[0] + first_m / kBoxElements * kBoxBytes, F::kMajorA));
  const uint32_t descriptor_b = uniform(operand_descriptor(shared.b[0], F::kMajorB));
  Cursor<kWorkEntries> entry;
  Cursor<F::kStages> stage;
  const auto release = [&](int place) {
    if (lane_index() < F::kBlocks) arrive_at(&shared.released[place], lane_index());
  };
  Work work, next = receive_work(shared, rank, entry);
  Tile<F> tile, next_tile(p, next, rank);
  bool is_loaded = false;  // the next step is known to be loaded
  while (!next.is_end()) {
    work = next, tile = next_tile;
    const int steps = tile.steps();
    const int32_t m = tile.m + group * kResultM;
    if (m >= tile.end_m || tile.n >= tile.end_n) {
      for (int step = 0; step < steps + F::kReadStages; ++step) {
        wait_for(&shared.loaded[stage.place], stage.parity);
        release(stage.place);
        stage.advance();
      }
      next = receive_work(shared, rank, entry);
      next_tile = Tile<F>(p, next, rank);
      is_loaded = false;
      continue;
    }

    const int32_t warp_m = m + warp_of_group() * 16;
    Before<T, F> before(p, work, tile, warp_m);
    float d[F::kProducts][F::kTileN / 2];
    int previous = 0;
    // If rows lie along k, a last step may be partial, with fewer products.
    const int whole = F::kRows == Axis::kK ? tile.whole_steps() : steps;
    // The two warp groups store at different steps if there are enough steps. While one group
    // stores, the products of the other group keep the tensor cores busy.
    constexpr int kBoxes = Rounded<F>::kBoxes;
    const int steps_of_box = max(1, whole / kBoxes);
    int store_at = group * (whole / (kConsumerGroups * kBoxes));
    with_extent(tile, [&](auto extent) {
      constexpr int kExtent = decltype(extent)::value;
      const auto multiply_step = [&](int step, auto num) {
        if (!is_loaded) wait_until_loaded(&shared.loaded[stage.place], stage.parity);
        __syncwarp();
        const uint32_t a = uniform(descriptor_a + stage.place * (F::kBytesA >> 4));
        const uint32_t b = uniform(descriptor_b + stage.place * (F::kBytesB >> 4));
#pragma unroll
        for (int i = 0; i < F::kProducts; ++i) fence_registers<kExtent / 2>(d[i]);
        begin_products();
#pragma unroll
        for (int k = 0; k < decltype(num)::value; ++k) {
#pragma unroll
          for (int i = 0; i < F::kProducts; ++i) {
            multiply<T, F::kMajorA, F::kMajorB, kExtent>(
                d[i], a + i * (kBoxBytes >> 4) + k * kDescriptorStep<F::kMajorA>,
                b + k * kDescriptorStep<F::kMajorB>, step > 0 || k > 0);
          }
        }
        end_products();
#pragma unroll
        for (int i = 0; i < F::kProducts; ++i) fence_registers<kExtent / 2>(d[i]);
        const int place = stage.place;
        stage.advance();
        is_loaded = is_complete(&shared.loaded[stage.place], stage.parity);
        wait_for_products<1>();
        if (step > 0) release(previous);
        previous = place;
      };
      for (int step = 0; step < whole; ++step) {
        multiply_step(step, Constant<kTileK / 16>{});
        // Store after the stage's release, because a store may wait for earlier stores.
        if constexpr (kStoresLate) {
          if (step == store_at) {
            rounded.store_next(p, writer);
            store_at += steps_of_box;
          }
        }
      }
      if constexpr (F::kRows == Axis::kK) {
        // A group without rows has one product of zeros.
        if (whole < steps) {
          switch (max(0, tile.end_k - whole * F::kStepK - 1) / 16) {
            case 0: multiply_step(whole, Constant<1>{}); break;
            case 1: multiply_step(whole, Constant<2>{}); break;
            default: multiply_step(whole, Constant<3>{});
          }
        }
      }
    });
    // Prepare the first products of the next tile while the last products run.
    next = receive_work(shared, rank, entry);
    next_tile = Tile<F>(p, next, rank);
    is_loaded = !F::kReads && !next.is_end();
    if (is_loaded) wait_for(&shared.loaded[stage.place], stage.parity);
    wait_for_products<0>();
    with_extent(tile, [&](auto extent) {
      constexpr int kExtent = decltype(extent)::value;
#pragma unroll
      for (int i = 0; i < F::kProducts; ++i) {
        fence_registers<kExtent / 2>(d[i]);
        // Set the unused numbers; otherwise they would need registers during the products.
#pragma unroll
        for (int j = kExtent / 2; j < F::kTileN / 2; ++j) d[i][j] = 0;
      }
    });
    release(previous);

    const Plane plane(F::kHasRaggedD, work, end_of_rows(work, tile));
    if constexpr (kStoresLate) {
      rounded.store_rest(p, writer);
      rounded.begin(tile, plane, m);
    }
    if constexpr (F::kReads) {
      before.store(writer, plane, m, d[0], [&] {
        wait_for(&shared.loaded[stage.place], stage.parity);
        const ReadStage taken = {shared.a[stage.place], shared.b[stage.place],
                                 &shared.released[stage.place]};
        stage.advance();
        return taken;
      });
    } else if constexpr (F::kEpilogue == Epilogue::kStore) {
      rounded.template keep<T>(p, writer, 0, d, 0);
    } else if constexpr (F::kIsTurned) {
      store_activations_along_n<T, F>(p, writer, work, tile, plane, m, before, d);
    } else {
      store_activations_along_m<T, F>(p, writer, rounded, work, tile, before, d);
    }
  }
  if constexpr (kStoresLate) rounded.store_rest(p, writer);
  writer.end();
}

// Runs a block. Consumers call `multiply`, which multiplies and stores all tiles.
template <typename T, typename F, typename Multiply>
__device__ inline void run_block(const GemmParams& p, GemmShared<F>& shared, uint32_t rank,
                                 Multiply&& multiply) {
  if (threadIdx.x == 0) {
    prefetch_map(&p.a);
    prefetch_map(&p.b);
    prefetch_map(&p.d);
    for (int i = 0; i < F::kStages; ++i) {
      init_barrier(&shared.loaded[i], 1);
      init_barrier(&shared.released[i], kConsumerWarps * F::kBlocks);
    }
    init_barrier(&shared.tile_wanted, 1);
    for (int i = 0; i < kWorkEntries; ++i) {
      init_barrier(&shared.work_sent[i], 1);
      // One arrival for each consumer, for the loader, and for the second block.
      init_barrier(&shared.work_read[i], kConsumerWarps + F::kBlocks);
    }
    for (StoreQueue<F>& queue : shared.stores) queue.init();
    fence_load_barriers();
  }
  sync_cluster();

  // At the launch, a thread has 168 registers. Register counts must be multiples of 8.
  constexpr int kLoaderRegisters = 40, kConsumerRegisters = 232;
  static_assert(kLoaderRegisters % 8 == 0 && kConsumerRegisters % 8 == 0);
  static_assert(kLoaderRegisters + kConsumerGroups * kConsumerRegisters <= 3 * 168);
  const int warp = threadIdx.x / kWarpThreads;
  if (warp >= kConsumerWarps) {
    release_registers<kLoaderRegisters>();
    if (warp == kConsumerWarps) load_tiles<T, F>(p, shared, rank);
    if (warp == kConsumerWarps + 1) take_tiles(p, shared, rank);
    const int group = warp - kConsumerWarps - 2;
    if (group >= 0 && lane_index() == 0) serve_stores<F>(shared.stores[group]);
  } else {
    take_registers<kConsumerRegisters>();
    multiply();
  }
  // The other block may still arrive at barriers of this block, so no block may exit before this.
  sync_cluster();
}

// Returns true if the form Few is faster for all groups together. All threads of a block call it.
template <typename Few>
__device__ inline bool has_few_rows(const GemmParams& p) {
  bool is_faster = false;
  if (threadIdx.x < kWarpThreads) {  // one warp, because many reads of the same memory are slow
    int32_t gain = 0;
    for (int group = lane_index(); group < p.num_groups; group += kWarpThreads) {
      prefetch(p.starts + group);  // Walk reads it soon
      const int32_t size = p.sizes[group], weight = p.weights[group];
      gain += weight < 0 ? 0 : Few::gain(size, p.k);
    }
    is_faster = __reduce_add_sync(kAllLanes, gain) > 0;
  }
  return __syncthreads_or(is_faster);
}

// The kernels of grouped_dot for elements T. Results have type T, too.
template <typename T>
struct GroupedKernels {
  using Params = GemmParams;
  using Result = T;
  template <typename F>
  using Shared = GemmShared<F>;

  template <typename F>
  static __device__ void multiply(const Params& p, Shared<F>& shared, uint32_t rank) {
    multiply_tiles<T, F>(p, shared, rank);
  }
};

// The bytes of shared memory of a kernel of these forms.
template <typename Kernels, typename... Forms>
constexpr size_t kSharedBytes = std::max({sizeof(typename Kernels::template Shared<Forms>)...});

template <typename Kernels, typename F>
__device__ inline void run_form(const typename Kernels::Params& p, char* memory) {
  auto& shared = *reinterpret_cast<typename Kernels::template Shared<F>*>(memory);
  const uint32_t rank = F::kBlocks == 1 ? 0 : cluster_rank();
  run_block<typename Kernels::Result, F>(p, shared, rank,
                                         [&] { Kernels::template multiply<F>(p, shared, rank); });
}

// Computes a product in the first form, or in the second form if it is faster.
template <typename Kernels, typename F, typename... Few>
__global__ void __launch_bounds__(kGemmThreads, 1)
    grouped_gemm(const __grid_constant__ ParamsOf<typename Kernels::Params, F, Few...> p) {
  static_assert(kSharedBytes<Kernels, F, Few...> <= Tuning::kMaxSharedBytes);
  MOE_A2A_DYNAMIC_SHARED(1024, char, memory);
  if constexpr (sizeof...(Few) > 0) {
    static_assert(sizeof...(Few) == 1 && ((Few::kBlocks <= F::kBlocks) && ...));
    if (has_few_rows<Few...>(p.of[0])) return run_form<Kernels, Few...>(p.of[1], memory);
  }
  run_form<Kernels, F>(p.of[0], memory);
}

}  // namespace moe_a2a::gemm
