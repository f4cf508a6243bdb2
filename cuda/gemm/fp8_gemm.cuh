// A grouped GEMM of FP8 numbers (E4M3) with blockwise scales.
//
// Holds afterwards: for every group, d[m, n] is the sum of s[m, n, i] * t[m, n, i] over blocks i of
// k. t is the sum of the products of the 128 values of a block. The hardware computes this sum
// with fewer bits than float32 has. s is the rounded product of the two scales. The sum over blocks
// is in float32 in the order of k, and is rounded once. All else is as in gemm/grouped_gemm.cuh.
//
// Parts: a warp group has kParts parts, each 64 long in m and as long in n as the tile. For each
// part, it multiplies a block of k into temporary registers. Then it adds these numbers times their
// scales to the part's results. The compiler does not let a product run during the wait for
// another product. A part's product therefore starts after the wait for the previous part.
//
// Rows along m: one part and one set of temporary registers. The products of both warp groups end
// at the same time, so the time until the next products matters. This time is shortest if a tile's
// number of steps is a multiple of kStages (kWholeTurns). Then stage indices are constant,
// descriptors are in uniform registers, and a warp group begins to wait for a step while it adds
// the products of the previous step.
//
// Rows along n: two parts and two sets of temporary registers. A part is added while the next part
// is multiplied.
//
// Scales: a lane reads scales from global memory into registers, some steps ahead. It receives the
// scales of other lanes through shared memory (rows along m) or by shuffles (rows along n).
//
// Launch: as in gemm/grouped_gemm.cuh.
#pragma once

#include "gemm/fp8_gemm.h"
#include "gemm/grouped_gemm.cuh"

namespace moe_a2a::gemm {

// A row of a box has 128 values, as many bytes as Form's 64 16-bit elements.
template <Axis kRows_, int kTileM_, int kTileN_, int kBlocks_, int kStages_,
          bool kWholeTurns_ = false>
struct Fp8Form : Form<kRows_, Major::kK, Major::kK, kTileM_, kTileN_, kBlocks_, kStages_> {
  static constexpr int kStepK = kFp8Block;
  static constexpr int kLeastSteps = 0;  // sums start as zeros
  static constexpr bool kIsTurned = kRows_ == Axis::kN;
  static constexpr bool kWholeTurns = kWholeTurns_;  // the steps of k are a multiple of kStages
  static constexpr int kParts = kTileM_ / (64 * kConsumerGroups);
  static constexpr int kPartSize = kTileN_ / 2;  // registers of a part
  // As in Form::gain(), only the sign of the sum over groups matters. Loads of weights limit both
  // forms, so this form may have 1/8 more tiles of rows.
  MOE_A2A_HOST_DEVICE static int32_t gain(int32_t size, int32_t) {
    const int32_t many = (size + kBaseRows - 1) / kBaseRows, few = (size + kTileN_ - 1) / kTileN_;
    return 9 * many - 8 * few;
  }
  static_assert(kFp8Block == kBoxElements * 2);
  // A warp group's results need the scales of at most two blocks of weights.
  static_assert(kTileM_ == (kIsTurned ? kFp8Block : 64) * kConsumerGroups);
  static_assert(!kWholeTurns || (!kIsTurned && kStages_ % 4 == 0),
                "the scales of four steps are read at once");
};

struct Fp8Params : GemmParams {
  const float *row_scales, *matrix_scales;
  // The strides of row_scales (Fp8Gemm). There are fewer than 2^32 scales, because 2^32 scales
  // would need 512 GiB of rows.
  uint32_t row_stride, block_stride;
};

// The scales of a lane's results, for rows along m. All lanes of a quad have the same rows. Each
// lane reads the scales of a different step, and stores them for the other lanes in shared memory.
// Rows and columns past the end have arbitrary scales, but their results are not stored.
template <typename F>
class ScalesAlongM {
 public:
  // This many aligned columns of a tile always have the same scale.
  static constexpr int kColumns = kFp8Block / 2;
  static constexpr int kSize = F::kTileN / kColumns * 2;
  static constexpr int kLanes = 4;
  static_assert(F::kTileN == 3 * kColumns, "a tile has columns of two blocks of weights");
  // [step][quad]: scales of the quad's two rows, times those of the first and of the second block.
  using Shared = float4[kLanes][kWarpThreads / kLanes];

  __device__ explicit ScalesAlongM(Shared& of_steps) : of_steps_(of_steps) {}

  // Loads the scales of the tile's first steps. `m` is the warp's first row in its group.
  __device__ void start(const Fp8Params& p, const Work& work, const Tile<F>& tile, int32_t m) {
    const int32_t row = m + lane_index() / kLanes, last = work.size - 1;
    const int32_t blocks_n = (p.n + kFp8Block - 1) / kFp8Block;
    const int32_t block_n = min(tile.n / kFp8Block, blocks_n - 1);
    const int steps = tile.steps();
    begins_within_block_ = tile.n % kFp8Block != 0;
    row_ = (work.start + min(row, last)) * p.row_stride;
    to_second_row_ = (min(row + 8, last) - min(row, last)) * p.row_stride;
    block_ = (work.weight * blocks_n + block_n) * steps;
    to_second_block_ = block_n + 1 < blocks_n ? steps : 0;
    load(p, 0, steps);
  }

  // Sets `scales` to those of step `first + next`, as index() orders them. kLanes divides `first`.
  __device__ void get(const Fp8Params& p, int first, int next, int steps, float (&scales)[kSize]) {
    if (next % kLanes == 0) {
      __syncwarp();
      of_steps_[lane_index() % kLanes][lane_index() / kLanes] = {
          of_row_[0] * of_block_[0], of_row_[1] * of_block_[0], of_row_[0] * of_block_[1],
          of_row_[1] * of_block_[1]};
      __syncwarp();
      load(p, first + next + kLanes, steps);
    }
    const float4 of_step = of_steps_[next % kLanes][lane_index() / kLanes];
    // Columns 64 h to 64 h + 63 are in block h / 2, or (h + 1) / 2 if begins_within_block_.
    const bool second[] = {false, begins_within_block_, true};
#pragma unroll
    for (int i = 0; i < kSize / 2; ++i) {
      scales[2 * i] = second[i] ? of_step.z : of_step.x;
      scales[2 * i + 1] = second[i] ? of_step.w : of_step.y;
    }
  }
  // Returns the index of the scale for register i of a part.
  static constexpr __device__ int index(int i) { return i / 4 * 8 / kColumns * 2 + i / 2 % 2; }

 private:
  __device__ void load(const Fp8Params& p, int step, int steps) {
    const uint32_t of_lane = step + lane_index() % kLanes;
    const bool is_step = of_lane < steps;
    const uint32_t row = row_ + of_lane * p.block_stride, block = block_ + of_lane;
    of_row_[0] = load_if(is_step, p.row_scales + row);
    of_row_[1] = load_if(is_step, p.row_scales + row + to_second_row_);
    of_block_[0] = load_if(is_step, p.matrix_scales + block);
    of_block_[1] = load_if(is_step, p.matrix_scales + block + to_second_block_);
  }

  Shared& of_steps_;
  bool begins_within_block_;
  uint32_t row_, to_second_row_, block_, to_second_block_;  // indices of scales in their arrays
  float of_row_[2], of_block_[2];                           // for the next steps
};

// The scales if rows lie along n. Each lane of a warp reads the scales of different rows.
template <typename F>
class ScalesAlongN {
 public:
  static constexpr int kSize = F::kTileN / 4;
  static constexpr int kReads = F::kTileN / kWarpThreads;
  using Shared = Nothing;

  __device__ explicit ScalesAlongN(Shared&) {}

  __device__ void start(const Fp8Params& p, const Work& work, const Tile<F>& tile, int32_t m) {
    const int32_t row = tile.n + lane_index(), blocks_m = (p.m + kFp8Block - 1) / kFp8Block;
    const int steps = tile.steps();
    num_rows_ = m < p.m ? work.size - row : 0;
    row_ = (work.start + row) * p.row_stride;
    matrix_ = (work.weight * blocks_m + min(m / kFp8Block, blocks_m - 1)) * steps;
    load(p, 0, steps);
  }

  // Sets `scales` to those of `step`. Scale 2 j + i is for results at n = 8 j + 2 (lane % 4) + i.
  __device__ void get(const Fp8Params& p, int step, int steps, float (&scales)[kSize]) {
    float of_lane[kReads];
#pragma unroll
    for (int i = 0; i < kReads; ++i) of_lane[i] = of_row_[i] * of_matrix_;
    load(p, step + 1, steps);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const int row = i / 2 * 8 + i % 2;
      scales[i] = __shfl_sync(kAllLanes, of_lane[row / kWarpThreads],
                              row % kWarpThreads + lane_index() % 4 * 2);
    }
  }
  static constexpr __device__ int index(int i) { return i / 4 * 2 + i % 2; }

 private:
  __device__ void load(const Fp8Params& p, int step, int steps) {
#pragma unroll
    for (int i = 0; i < kReads; ++i) {
      const uint32_t row = i * kWarpThreads;
      of_row_[i] = load_if(step < steps && static_cast<int32_t>(row) < num_rows_,
                           p.row_scales + row_ + row * p.row_stride + step * p.block_stride);
    }
    // Even a lane without rows may read this scale, because the index is always in range.
    of_matrix_ = load_if(step < steps, p.matrix_scales + matrix_ + step);
  }

  uint32_t row_, matrix_;             // indices of scales in their arrays
  int32_t num_rows_;                  // from this lane's first row to the group's end
  float of_row_[kReads], of_matrix_;  // for the next step
};

template <typename F>
using Scales = std::conditional_t<F::kIsTurned, ScalesAlongN<F>, ScalesAlongM<F>>;

template <typename F>
struct Fp8Shared : GemmShared<F> {
  // Each warp's Work is in shared memory, because products need the warp's registers.
  Work current[kConsumerWarps];
  typename Scales<F>::Shared scales[kConsumerWarps];
};

// Stores boxes of float32 results. Their rows have 128 bytes.
template <typename F>
class FloatWriter : public BoxBuffers<F> {
 public:
  static constexpr int kColumns = F::kIsTurned ? F::kTileN : 32;  // of n
  using BoxBuffers<F>::BoxBuffers;

  // Stores the results d[first], d[first + 1], ... (gemm/epilogue.cuh) of 64 rows of m.
  template <typename, int kSize>
  __device__ void write(const CUtensorMap& map, const Box& box, const float (&d)[kSize],
                        int first) {
    const int warp = warp_of_group();
    if constexpr (F::kIsTurned) {  // a box has the results of two warps
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        char* buffer = this->next();
        if (warp / 2 == half) write_to(buffer, warp % 2 * 16, d, first);
        this->store(map, {box.c0 + 32 * half, box.c1, box.c2, box.c3});
      }
    } else {
      write_to(this->next(), warp * 16, d, first);
      this->store(map, box);
    }
  }

 private:
  // Writes this warp's results, which begin at index `first_m` of m in the box. Rows are swizzled.
  template <int kSize>
  static __device__ void write_to(char* buffer, int first_m, const float (&d)[kSize], int first) {
    const int quad = lane_index() / 4, place = lane_index() % 4;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float2 x = {d[first + 4 * j + 2 * r], d[first + 4 * j + 2 * r + 1]};
        const int m = first_m + quad + 8 * r, n = 8 * j + 2 * place;
        const auto at = [&](int row, int column) {
          return reinterpret_cast<float*>(buffer + row * 128 + (column / 4 ^ row % 8) * 16) +
                 column % 4;
        };
        if constexpr (F::kIsTurned) {
          *at(n, m) = x.x, *at(n + 1, m) = x.y;
        } else {
          *reinterpret_cast<float2*>(at(m, n)) = x;
        }
      }
    }
  }
};

template <typename T, typename F>
using WriterOf = std::conditional_t<std::is_same_v<T, float>, FloatWriter<F>, BoxWriter<F>>;

template <typename T, typename F>
__device__ inline void store_results(const Fp8Params& p, WriterOf<T, F>& writer,
                                     const Tile<F>& tile, const Plane& plane, int32_t first_m,
                                     const float (&d)[F::kParts * F::kPartSize]) {
  constexpr int kColumns = WriterOf<T, F>::kColumns;
#pragma unroll
  for (int i = 0; i < F::kParts; ++i) {
    const int32_t m = tile.m + first_m + i * 64;
#pragma unroll
    for (int n = 0; n < F::kTileN; n += kColumns) {
      if (m >= tile.end_m || tile.n + n >= tile.end_n) break;
      const Box box = F::kIsTurned ? plane.box(m, tile.n + n) : plane.box(tile.n + n, m);
      writer.template write<T>(p.d, box, d, i * F::kPartSize + n / 2);
    }
  }
}

template <typename T, typename F>
__device__ inline void multiply_fp8_tiles(const Fp8Params& p, Fp8Shared<F>& shared, uint32_t rank) {
  constexpr int kWarpGroupM = F::kTileM / kConsumerGroups;
  const int warp = static_cast<int>(uniform(threadIdx.x / kWarpThreads));
  const int group = warp / kWarpsOfGroup, first_m = group * kWarpGroupM;
  const int warp_m = first_m + warp % kWarpsOfGroup * 16;
  WriterOf<T, F> writer(shared.results[group], shared.stores[group]);
  const auto descriptor_of = [](const char* operand) {
    return uniform(operand_descriptor(operand, Major::kK));
  };
  const uint32_t descriptor_a = descriptor_of(shared.a[0] + first_m / kBoxElements * kBoxBytes);
  const uint32_t descriptor_b = descriptor_of(shared.b[0]);
  Cursor<kWorkEntries> entry;
  Cursor<F::kStages> stage;
  Scales<F> scales(shared.scales[warp]);
  const auto take_work = [&] {
    const Work work = receive_work(static_cast<GemmShared<F>&>(shared), rank, entry);
    if (!work.is_end()) {
      const Tile<F> tile(p, work, rank);
      scales.start(p, work, tile, tile.m + warp_m);
    }
    return work;
  };
  const auto give = [&](int place) {
    if (lane_index() < F::kBlocks) arrive_at_block<F>(&shared.released[place], lane_index());
  };
  Work work = take_work();
  while (!work.is_end()) {
    if (lane_index() == 0) shared.current[warp] = work;
    __syncwarp();
    const Tile<F> tile(p, work, rank);
    const int steps = tile.steps();
    float d[F::kParts * F::kPartSize];
#pragma unroll
    for (float& x : d) x = 0;
    if (tile.n < tile.end_n && tile.m + first_m < tile.end_m) {
      float t[F::kParts][F::kPartSize], scale[Scales<F>::kSize];
      const auto start = [&](int place, int part) {
        float (&of)[F::kPartSize] = t[part];
        const uint32_t a = descriptor_a + place * (F::kBytesA >> 4) + part * (kBoxBytes >> 4);
        const uint32_t b = descriptor_b + place * (F::kBytesB >> 4);
        fence_registers<F::kPartSize>(of);
        begin_products();
#pragma unroll
        for (int k = 0; k < F::kStepK / 32; ++k) {
          multiply_fp8(of, a + k * kDescriptorStep<Major::kK>, b + k * kDescriptorStep<Major::kK>,
                       k > 0);
        }
        end_products();
        fence_registers<F::kPartSize>(of);
      };
      const auto add = [&](int part) {
        float (&of)[F::kPartSize] = t[part];
        fence_registers<F::kPartSize>(of);
#pragma unroll
        for (int i = 0; i < F::kPartSize; ++i) {
          d[part * F::kPartSize + i] += scale[Scales<F>::index(i)] * of[i];
        }
      };
      if constexpr (F::kIsTurned) {
        constexpr int kLast = F::kParts - 1;
        const auto add_all_but_last = [&](int step) {
          scales.get(p, step, steps, scale);
#pragma unroll
          for (int part = 0; part < kLast; ++part) {
            wait_for_products<0>();
            start(stage.place, part + 1);
            add(part);
          }
        };
        if (steps > 0) {
          wait_for(&shared.loaded[stage.place], stage.parity);
          start(stage.place, 0);
          for (int step = 0; step + 1 < steps; ++step) {
            add_all_but_last(step);
            const int place = stage.place;
            stage.advance();
            wait_for(&shared.loaded[stage.place], stage.parity);
            wait_for_products<0>();
            start(stage.place, 0);
            give(place);
            add(kLast);
          }
          add_all_but_last(steps - 1);
          wait_for_products<0>();
          give(stage.place);
          stage.advance();
          add(kLast);
        }
      } else {
        // Multiplies step `first + next`, whose stage is `place`.
        const auto multiply = [&](int first, int next, int place) {
          wait_until_loaded(&shared.loaded[place], stage.parity);  // all lanes start the products
          start(place, 0);
          scales.get(p, first, next, steps, scale);
          wait_for_products<0>();
          give(place);
          add(0);
        };
        if constexpr (F::kWholeTurns) {
          for (int first = 0; first < steps; first += F::kStages) {
#pragma unroll
            for (int place = 0; place < F::kStages; ++place) multiply(first, place, place);
            stage.parity ^= 1;
          }
        } else {
          for (int step = 0; step < steps; ++step) {
            multiply(0, step, stage.place);
            stage.advance();
          }
        }
      }
    } else {
      for (int step = 0; step < steps; ++step) {
        wait_for(&shared.loaded[stage.place], stage.parity);
        give(stage.place);
        stage.advance();
      }
    }
    // Take the next work before the results are stored, so that its first scales load meanwhile.
    const Work next = take_work();
    const Work done = read_work(shared.current[warp]);
    store_results<T, F>(p, writer, Tile<F>(p, done, rank), Plane(F::kHasRaggedD, done, done.size),
                        first_m, d);
    work = next;
  }
  writer.end();
}

// The kernels of FP8 products with results of type T.
template <typename T>
struct Fp8Kernels {
  using Params = Fp8Params;
  using Result = T;
  template <typename F>
  using Shared = Fp8Shared<F>;

  template <typename F>
  static __device__ void multiply(const Params& p, Shared<F>& shared, uint32_t rank) {
    multiply_fp8_tiles<T, F>(p, shared, rank);
  }
};

}  // namespace moe_a2a::gemm
