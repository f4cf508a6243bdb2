// Handles the results of a tile in a warp: applies an activation or its derivative if there is one,
// and then rounds and stores the results.
//
// A warp has the results of 16 rows of m and all n. For every 8 of n, four neighbouring lanes share
// two rows. In its registers d, lane q of these four lanes holds the elements 2 q and 2 q + 1 of
// the row lane / 4, and then the same elements of the row that is 8 rows below:
//   d[4 j + 2 r + i]  is  (m = lane / 4 + 8 r, n = 8 j + 2 (lane % 4) + i).
// Two registers in a row are rounded into a word.
#pragma once

#include "gemm/activation.cuh"
#include "gemm/hopper.cuh"
#include "gemm/schedule.cuh"

namespace moe_a2a::gemm {

// Where the rows of a tensor are in its map: the rows of a group, or of a matrix of weights.
struct Plane {
  int32_t first, c2, c3;

  __device__ Plane(bool is_ragged, const Work& work)
      : first(is_ragged ? kRaggedRows - work.size : 0),
        c2(is_ragged ? work.start + work.size : work.weight),
        c3(is_ragged ? kRaggedRows : 0) {}

  __device__ Box box(int32_t column, int32_t row) const { return {column, first + row, c2, c3}; }
};

// Stores boxes of results through a warp's buffers in turn.
template <typename F>
class BoxWriter {
 public:
  static constexpr int kWords = F::kIsTurned ? F::kTileN / 4 : kBoxElements / 4;

  __device__ explicit BoxWriter(char (&buffers)[kStoreBuffers][kStoreBytes]) : buffers_(buffers) {}

  // Stores 16 rows of m by 64 of n, or by all n of a transposed tile.
  __device__ void write(const CUtensorMap& map, const Box& box, const uint32_t (&words)[kWords]) {
    const int lane = lane_index();
    if (lane == 0) wait_until_read<kStoreBuffers - 1>();
    __syncwarp();
    char* buffer = buffers_[next_];
    next_ = (next_ + 1) % kStoreBuffers;
    // store_matrices() stores 16 rows of m by 16 of n: the upper and the lower 8 rows for the first
    // 8 of n, then for the other 8.
    const int matrix = lane / 8, row = lane % 8;
#pragma unroll
    for (int n = 0; n < 4 * kWords; n += 16) {
      char* address;
      if constexpr (F::kIsTurned) {
        address = buffer + (n + matrix / 2 * 8 + row) * 32 + matrix % 2 * 16;
      } else {
        const int chunk = (n / 8 + matrix / 2) ^ row;  // as the map swizzles
        address = buffer + (matrix % 2 * 8 + row) * 128 + chunk * 16;
      }
      const uint32_t* of = words + n / 4;
      store_matrices<F::kIsTurned>(address, {of[0], of[1], of[2], of[3]});
    }
    fence_shared_for_bulk();
    __syncwarp();
    if (lane == 0) {
      store_box(&map, box, buffer);
      end_store_group();
    }
  }

  // Rounds d[first], d[first + 1], ... and stores them.
  template <typename T, int kSize>
  __device__ void write(const CUtensorMap& map, const Box& box, const float (&d)[kSize],
                        int first) {
    uint32_t words[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = pack<T>(d[first + 2 * i], d[first + 2 * i + 1]);
    write(map, box, words);
  }

 private:
  char (&buffers_)[kStoreBuffers][kStoreBytes];
  int next_ = 0;
};

// The operands of an epilogue that loads nothing before the products.
struct Nothing {
  template <typename... Args>
  __device__ explicit Nothing(const Args&...) {}
};

// The router weights of this lane's rows. The constructor reads these weights before the products,
// so that nothing waits for the weights.
template <typename F>
struct RowWeights {
  static constexpr int kRows = F::kIsTurned ? F::kTileN / 4 : 2;
  float of[kRows];

  // `m` is the first row of a warp's results in a tile that is not transposed.
  __device__ RowWeights(const GemmParams& p, const Work& work, const Tile<F>& tile, int32_t m) {
    const int lane = lane_index();
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int32_t row =
          F::kIsTurned ? tile.n + i / 2 * 8 + lane % 4 * 2 + i % 2 : m + lane / 4 + 8 * i;
      of[i] = row < work.size ? __ldg(p.activation.row_weights + work.start + row) : 0.f;
    }
  }
  // Returns the weight for d[i].
  __device__ float at(int i) const { return F::kIsTurned ? of[i / 4 * 2 + i % 2] : of[i / 2 % 2]; }
};

// Adds the biases of columns `first`, `first` + 1, ... of [L, P] to d. Columns from `end` on have
// no bias. `scale(i)` multiplies the bias of d[i].
template <typename T, typename F, int kSize, typename Scale>
__device__ inline void add_bias(const T* bias, int32_t first, int32_t end, float (&d)[kSize],
                                int begin, int count, Scale&& scale) {
  const int lane = lane_index();
#pragma unroll
  for (int i = 0; i < count; i += F::kIsTurned ? kSize : 4) {
    if constexpr (F::kIsTurned) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t column = first + lane / 4 + 8 * half;
        const float add = column < end ? float(bias[column]) : 0.f;
#pragma unroll
        for (int j = 2 * half; j < kSize; j += 4) {
          d[j] += scale(j) * add, d[j + 1] += scale(j + 1) * add;
        }
      }
    } else {
      const int32_t column = first + i * 2 + lane % 4 * 2;
      const float2 add =
          column < end ? unpack<T>(*reinterpret_cast<const uint32_t*>(bias + column)) : float2{};
#pragma unroll
      for (int j = begin + i; j < begin + i + 4; j += 2) {
        d[j] += scale(j) * add.x, d[j + 1] += scale(j + 1) * add.y;
      }
    }
  }
}

// Stores 16 rows of m of all products of a warp in a transposed tile. The products of a warp are 64
// of m apart.
template <typename T, typename F, int kProducts, int kSize>
__device__ inline void store_products(const GemmParams& p, BoxWriter<F>& writer,
                                      const Tile<F>& tile, const Plane& plane, int32_t m,
                                      const float (&d)[kProducts][kSize]) {
  static_assert(F::kIsTurned);
#pragma unroll
  for (int i = 0; i < kProducts; ++i) {
    if (m + 64 * i >= tile.end_m) break;
    writer.template write<T>(p.d, plane.box(m + 64 * i, tile.n), d[i], 0);
  }
}

// The rounded results of a warp's last tile, 16 rows of m by all n. The warp stores them while the
// products of its next tile run, so the next products wait only for the rounding.
template <typename F>
class Rounded {
 public:
  static constexpr int kBoxes = F::kTileN / kBoxElements;
  static constexpr int kParts = kBoxes;  // a box is stored with each of the first steps

  template <typename T, int kSize>
  __device__ void take(const Tile<F>& tile, const Plane& plane, int32_t m,
                       const float (&d)[kSize]) {
#pragma unroll
    for (int i = 0; i < kSize / 2; ++i) {
      words_[i / (kBoxElements / 4)][i % (kBoxElements / 4)] = pack<T>(d[2 * i], d[2 * i + 1]);
    }
    box_ = plane.box(tile.n, m);
    columns_ = tile.end_n - tile.n;
  }

  // Stores the part with the number `part`, if it exists. Call it for all parts in turn before the
  // next take().
  __device__ void store(const CUtensorMap& map, BoxWriter<F>& writer, int part) {
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) {
      if (i != part || i * kBoxElements >= columns_) continue;
      writer.write(map, {box_.c0 + i * kBoxElements, box_.c1, box_.c2, box_.c3}, words_[i]);
    }
    if (part == kParts - 1) columns_ = 0;
  }

 private:
  uint32_t words_[kBoxes][kBoxElements / 4];
  Box box_;
  int32_t columns_ = 0;  // from the first of the tile to the end; 0: nothing is left to store
};

// Applies biases, activation and router weights, and stores the activations. Also stores the
// pre-activations if they are kept.
template <typename T, typename F, int kProducts, int kSize>
__device__ inline void store_activations(const GemmParams& p, BoxWriter<F>& writer,
                                         const Work& work, const Tile<F>& tile, const Plane& plane,
                                         int32_t m, const RowWeights<F>& weights,
                                         float (&d)[kProducts][kSize]) {
  const ActivationParams& a = p.activation;
  constexpr bool kIsGated = F::kIsGated;
  // A transposed gated tile has gate and up in two products. Other gated tiles have gate and up in
  // the two halves of one product.
  constexpr int kColumns = F::kIsTurned ? 16 : F::kResultN;
  constexpr int kResults = F::kIsTurned ? kSize : kColumns / 2;
  static_assert(F::kIsTurned ? kProducts == 2 : kProducts == 1);
  const int32_t column = F::kIsTurned ? m : tile.n;
  const auto each_product = [&](auto&& body) {  // body(registers, their first index, columns, half)
    if constexpr (F::kIsTurned) {
      body(d[0], 0, column, 0);
      if constexpr (kIsGated) {
        body(d[1], 0, column, 1);
      } else if (column + 64 < a.num_columns) {
        body(d[1], 0, column + 64, 0);
      }
    } else {
      body(d[0], 0, column, 0);
      if constexpr (kIsGated) body(d[0], kResults, column, 1);
    }
  };
  if (a.bias != nullptr && work.weight >= 0) {
    const int32_t num_columns = a.num_columns * (kIsGated ? 2 : 1);
    const T* bias = static_cast<const T*>(a.bias) + int64_t{work.weight} * num_columns;
    const auto add = [&](auto&& scale) {
      each_product([&](auto& of, int first, int32_t column, int half) {
        add_bias<T, F>(bias + half * a.num_columns, column, a.num_columns, of, first, kResults,
                       scale);
      });
    };
    if (!kIsGated && a.function == Activation::kScaledBias) {
      add([&](int i) { return weights.at(i); });
    } else {
      add([](int) { return 1.f; });
    }
  }
  const auto store = [&](const CUtensorMap& map, const auto& of, int first, int32_t column) {
    if constexpr (F::kIsTurned) {
      writer.template write<T>(map, plane.box(column, tile.n), of, 0);
    } else {
#pragma unroll
      for (int n = 0; n < kColumns; n += kBoxElements) {
        if (column + n >= a.num_columns) break;
        writer.template write<T>(map, plane.box(column + n, m), of, first + n / 2);
      }
    }
  };
  if (a.keeps != 0) {
    each_product([&](auto& of, int first, int32_t column, int half) {
      store(p.pre[half], of, first, column);
    });
  }
  for_activation<kIsGated>(a.function, [&](auto function) {
    constexpr Activation kFunction = decltype(function)::value;
    if constexpr (kIsGated) {
#pragma unroll
      for (int i = 0; i < kResults; ++i) {
        const float up = F::kIsTurned ? d[kProducts - 1][i] : d[0][(kResults + i) % kSize];
        const Gated x = activate_gated<kFunction>(d[0][i], up, a.alpha, a.limit);
        d[0][i] = x.value * weights.at(i);
      }
    } else {
#pragma unroll
      for (int j = 0; j < kProducts; ++j) {
#pragma unroll
        for (int i = 0; i < kResults; ++i) {
          d[j][i] = activate<kFunction>(d[j][i], a.alpha).value * weights.at(i);
        }
      }
    }
  });
  each_product([&](auto& of, int first, int32_t column, int half) {
    if (half == 0) store(p.d, of, first, column);
  });
}

// The memory of a stage for operands.
struct Operands {
  char *a, *b;
};

// Turns d, the gradients of weighted activations, into gradients of pre-activations. Stores these
// gradients and the weighted activations. Adds up the partial dots of the gradients with the
// unweighted activations.
//
// Pre-activations come through the stages of the operands, so the loader loads them while the last
// products run. A stage has 64 columns of a tile: the gate columns (or the columns of an activation
// that is not gated) in place of operand a, and the up columns in place of operand b. A warp
// overwrites the rows that it reads with their gradients, and stores the gradients from there.
template <typename T, typename F>
class Derivative {
 public:
  static constexpr bool kIsGated = F::kEpilogue == Epilogue::kDeriveGated;
  static constexpr int kHalves = kIsGated ? 2 : 1;
  static constexpr int kBytes = F::kTileM * kBoxElements * 2;  // of 64 columns of a tile
  static_assert(kBytes <= F::kBytesA && 2 * kBytes <= F::kBytesB);
  static_assert(F::kTileM == 16 * kConsumerWarps);

  // Loads 64 columns of pre-activations into a stage; one lane calls it.
  static __device__ void load(const GemmParams& p, const Tile<F>& tile, const Plane& plane, int n,
                              char* a, char* b, uint64_t* loaded) {
    expect_bytes(loaded, kHalves * kBytes);
#pragma unroll
    for (int m = 0; m < F::kTileM; m += kBoxElements) {
      const Box box = plane.box(tile.n + n, tile.m + m);
      load_box(a + m * kBoxElements * 2, &p.read[0], box, loaded);
      if constexpr (kIsGated) load_box(b + m * kBoxElements * 2, &p.read[1], box, loaded);
    }
  }

  // `m` is the warp's first row in the group.
  __device__ Derivative(const GemmParams& p, const Work& work, const Tile<F>& tile, int32_t m)
      : p_(p), work_(work), tile_(tile), m_(m), weights_(p, work, tile, m) {}

  // `take()` waits for the next stage and returns its Operands. `give()` releases the stage after
  // the last group of stores has read the stage.
  template <int kSize, typename Take, typename Give>
  __device__ void store(const Plane& plane, float (&d)[kSize], Take&& take, Give&& give) {
    for_activation<kIsGated>(p_.activation.function, [&](auto function) {
      float dots[2] = {};
#pragma unroll
      for (int n = 0; n < F::kTileN; n += kBoxElements) {
        const auto [a, b] = take();
        if (m_ < tile_.end_m && tile_.n + n < tile_.end_n) {
          const int warp_at = threadIdx.x / kWarpThreads * kStoreBytes;
          char* const gate = a + warp_at;
          char* const up = b + warp_at;
          char* const act = b + kBytes + warp_at;
#pragma unroll
          for (int i = 0; i < kBoxElements; i += 32) {
            derive<decltype(function)::value>(gate, up, act, i, d, (n + i) / 2, dots);
          }
          fence_shared_for_bulk();
          __syncwarp();
          if (lane_index() == 0) {
            const Box box = plane.box(tile_.n + n, m_);
            store_box(&p_.pre[0], box, gate);
            if constexpr (kIsGated) store_box(&p_.pre[1], box, up);
            store_box(&p_.d, box, act);
          }
        }
        if (lane_index() == 0) end_store_group();
        give();
      }
      store_dots(dots);
    });
  }

 private:
  // Computes 32 of the 64 columns in shared memory, beginning with column `column`, from d[first],
  // d[first + 1], ...
  template <Activation kFunction, int kSize>
  __device__ void derive(char* gate, char* up, char* act, int column, const float (&d)[kSize],
                         int first, float (&dots)[2]) {
    const ActivationParams& a = p_.activation;
    const int matrix = lane_index() / 8, row = lane_index() % 8;
    int at[2];
    uint32_t gates[2][4], ups[2][4];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      at[j] = (matrix % 2 * 8 + row) * 128 + (((column + 16 * j) / 8 + matrix / 2) ^ row) * 16;
      load_matrices(gate + at[j], gates[j]);
      if constexpr (kIsGated) load_matrices(up + at[j], ups[j]);
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      uint32_t acts[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = i % 2;
        const float weight = weights_.of[r];
        const float2 x = unpack<T>(gates[j][i]);
        const float2 factor = kIsGated ? unpack<T>(ups[j][i]) : float2{};
        float out[3][2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float ct = d[first + 8 * j + 2 * i + e], weighted = ct * weight;
          if constexpr (kIsGated) {
            const Gated y = activate_gated<kFunction>(
                e == 0 ? x.x : x.y, e == 0 ? factor.x : factor.y, a.alpha, a.limit);
            dots[r] += ct * y.value;
            out[0][e] = weighted * y.d_gate;
            out[1][e] = weighted * y.d_up;
            out[2][e] = weight * y.value;
          } else {
            const Activated y = activate<kFunction>(e == 0 ? x.x : x.y, a.alpha);
            dots[r] += ct * y.value;
            out[0][e] = weighted * y.slope;
            out[2][e] = weight * y.value;
          }
        }
        gates[j][i] = pack<T>(out[0][0], out[0][1]);
        if constexpr (kIsGated) ups[j][i] = pack<T>(out[1][0], out[1][1]);
        acts[i] = pack<T>(out[2][0], out[2][1]);
      }
      const auto words = [](const uint32_t (&w)[4]) { return uint4{w[0], w[1], w[2], w[3]}; };
      store_matrices<false>(gate + at[j], words(gates[j]));
      if constexpr (kIsGated) store_matrices<false>(up + at[j], words(ups[j]));
      store_matrices<false>(act + at[j], words(acts));
    }
  }

  // Stores the partial dots of this tile's columns.
  __device__ void store_dots(float (&dots)[2]) const {
    const int lane = lane_index();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      dots[r] += __shfl_xor_sync(kAllLanes, dots[r], 1);
      dots[r] += __shfl_xor_sync(kAllLanes, dots[r], 2);
      const int32_t row = m_ + lane / 4 + 8 * r;
      if (lane % 4 == 0 && row < work_.size) {
        p_.activation
            .partial_dots[tile_.n / F::kTileN * p_.activation.num_rows + work_.start + row] =
            dots[r];
      }
    }
  }

  const GemmParams& p_;
  const Work& work_;
  const Tile<F>& tile_;
  const int32_t m_;
  const RowWeights<F> weights_;
};

// Adds products to a tile of float32 totals, and stores the sums in their place.
//
// Totals come through the stages of the operands. A stage has 64 columns of a tile: 32 in place of
// operand a, and 32 in place of operand b. A warp adds its results to these rows in shared memory,
// and stores the sums from there. Bulk reductions would need no load, but would be slower, because
// the L2 cache adds more slowly than it stores.
template <typename F>
class AddToTotals {
 public:
  static constexpr int kColumns = F::kStoreColumns;
  static constexpr int kBytes = F::kTileM * kColumns * sizeof(float);
  static_assert(kBytes <= F::kBytesA && kBytes <= F::kBytesB && 2 * kColumns == kBoxElements);
  static_assert(F::kTileM == 16 * kConsumerWarps);

  // Loads 64 columns of totals into a stage; one lane calls it.
  static __device__ void load(const GemmParams& p, const Tile<F>& tile, const Plane& plane, int n,
                              char* a, char* b, uint64_t* loaded) {
    expect_bytes(loaded, 2 * kBytes);
#pragma unroll
    for (int m = 0; m < F::kTileM; m += kBoxElements) {
      const int bytes = m * kColumns * sizeof(float);
      load_box(a + bytes, &p.read[0], plane.box(tile.n + n, tile.m + m), loaded);
      load_box(b + bytes, &p.read[0], plane.box(tile.n + n + kColumns, tile.m + m), loaded);
    }
  }

  // `m` is the warp's first row in the matrix of weights.
  __device__ AddToTotals(const GemmParams& p, const Work&, const Tile<F>& tile, int32_t m)
      : p_(p), tile_(tile), m_(m) {}

  // `take` and `give` are as in Derivative::store().
  template <int kSize, typename Take, typename Give>
  __device__ void store(const Plane& plane, const float (&d)[kSize], Take&& take, Give&& give) {
#pragma unroll
    for (int n = 0; n < F::kTileN; n += kBoxElements) {
      const auto [a, b] = take();
      const int32_t column = tile_.n + n;
      if (m_ < tile_.end_m && column < tile_.end_n) {
        const int warp_at = threadIdx.x / kWarpThreads * kStoreBytes;
        add(a + warp_at, d, n / 2);
        add(b + warp_at, d, (n + kColumns) / 2);
        fence_shared_for_bulk();
        __syncwarp();
        if (lane_index() == 0) {
          store_box(&p_.d, plane.box(column, m_), a + warp_at);
          if (column + kColumns < tile_.end_n) {
            store_box(&p_.d, plane.box(column + kColumns, m_), b + warp_at);
          }
        }
      }
      if (lane_index() == 0) end_store_group();
      give();
    }
  }

 private:
  // Adds d[first], d[first + 1], ... to 16 swizzled rows of 128 bytes. At any time, lanes of odd
  // rows and lanes of even rows add to different columns, because in equal columns they would use
  // the same banks.
  template <int kSize>
  static __device__ void add(char* rows, const float (&d)[kSize], int first) {
    const int lane = lane_index(), row = lane / 4;
    const bool is_odd = row % 2 != 0;
    const int swizzle = (lane % 4 / 2) ^ row ^ (is_odd ? 4 : 0);
    float x[kColumns / 2];
    // The numbers are copied, because otherwise the compiler would not let products overlap.
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      asm volatile("mov.f32 %0, %1;" : "=f"(x[i]) : "f"(d[first + i]));
    }
#pragma unroll
    for (int i = 0; i < kColumns / 8; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int even = 4 * i + 2 * half, odd = 4 * (i ^ 2) + 2 * half;
        auto* at = reinterpret_cast<float2*>(rows + (row + 8 * half) * 128 +
                                             ((2 * i) ^ swizzle) * 16 + lane % 2 * 8);
        float2 sum = *at;
        sum.x += is_odd ? x[odd] : x[even];
        sum.y += is_odd ? x[odd + 1] : x[even + 1];
        *at = sum;
      }
    }
  }

  const GemmParams& p_;
  const Tile<F>& tile_;
  const int32_t m_;
};

}  // namespace moe_a2a::gemm
