// Epilogues process the results of a tile: they can apply an activation or its derivative, and they
// round and store the results.
//
// A warp has the results of 16 indices along m and of all n. Four neighbouring lanes share two
// values of m, 8 apart. Of every 8 elements along n, a lane has two neighbours, in one word:
//   d[4 j + 2 r + i]  is  (m = lane / 4 + 8 r, n = 8 j + 2 (lane % 4) + i).
#pragma once

#include "gemm/activation.cuh"
#include "gemm/hopper.cuh"
#include "gemm/schedule.cuh"
#include "gemm/store_queue.cuh"

namespace moe_a2a::gemm {

// The coordinates of a group's rows, or of a weight matrix, in its tensor map.
struct Plane {
  int32_t first, c2, c3;

  // The group ends before row `end`; later rows count as outside of it.
  __device__ Plane(bool is_ragged, const Work& work, int32_t end)
      : first(is_ragged ? kRaggedRows - end : 0),
        c2(is_ragged ? work.start + end : work.weight),
        c3(is_ragged ? kRaggedRows : 0) {}

  __device__ Box box(int32_t column, int32_t row) const { return {column, first + row, c2, c3}; }
};

// Stores boxes of 16-bit results.
template <typename F>
class BoxWriter : public BoxBuffers<F> {
 public:
  static constexpr int kColumns = F::kIsTurned ? F::kStoreRows : kBoxElements;  // of n
  static constexpr int kWords = kColumns / 4;
  using BoxBuffers<F>::BoxBuffers;

  // Stores a box of 64 rows of m. This warp has 16 of them.
  __device__ void write(const CUtensorMap& map, const Box& box, const uint32_t (&words)[kWords]) {
    char* buffer = this->next();
    // Matrices 0 and 1 are the two halves of the rows for the first 8 n; 2 and 3, for the next 8 n.
    const int matrix = lane_index() / 8, row = lane_index() % 8;
    const int warp = warp_of_group();
#pragma unroll
    for (int n = 0; n < 4 * kWords; n += 16) {
      char* address;  // swizzled as by the tensor map
      if constexpr (F::kIsTurned) {
        const int chunk = (2 * warp + matrix % 2) ^ row;
        address = buffer + (n + matrix / 2 * 8 + row) * 128 + chunk * 16;
      } else {
        const int chunk = (n / 8 + matrix / 2) ^ row;
        address = buffer + (16 * warp + matrix % 2 * 8 + row) * 128 + chunk * 16;
      }
      const uint32_t* of = words + n / 4;
      store_matrices<F::kIsTurned>(address, {of[0], of[1], of[2], of[3]});
    }
    this->store(&map, box);
  }

  template <typename T, int kSize>
  __device__ void write(const CUtensorMap& map, const Box& box, const float (&d)[kSize],
                        int first) {
    uint32_t words[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = pack<T>(d[first + 2 * i], d[first + 2 * i + 1]);
    write(map, box, words);
  }
};

// An epilogue that loads nothing before the products.
struct Nothing {
  template <typename... Args>
  __device__ explicit Nothing(const Args&...) {}
};

// The router weights of a lane's rows, if rows lie along m. They are loaded before the products.
template <typename F>
struct WeightsAlongM {
  float of[2];

  __device__ WeightsAlongM(const GemmParams& p, const Work& work, const Tile<F>&, int32_t m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t row = m + lane_index() / 4 + 8 * r;
      of[r] = row < work.size ? __ldg(p.activation.row_weights + work.start + row) : 0.f;
    }
  }
  __device__ float at(int i) const { return of[i / 2 % 2]; }
};

// The router weights of a tile's rows, if rows lie along n. A warp loads them before the products;
// each lane loads the weights of different rows.
template <typename F>
class WeightsAlongN {
 public:
  __device__ WeightsAlongN(const GemmParams& p, const Work& work, const Tile<F>& tile, int32_t) {
#pragma unroll
    for (int i = 0; i < kReads; ++i) {
      const int32_t row = tile.n + i * kWarpThreads + lane_index();
      of_lane_[i] = row < tile.end_n ? __ldg(p.activation.row_weights + work.start + row) : 0.f;
    }
  }

  // Returns the weights of d[first / 2] and d[first / 2 + 1].
  __device__ float2 at(int first) const {
    const int lane = first % kWarpThreads + lane_index() % 4 * 2;
    const float of = of_lane_[first / kWarpThreads];
    return {__shfl_sync(kAllLanes, of, lane), __shfl_sync(kAllLanes, of, lane + 1)};
  }

 private:
  static constexpr int kReads = (F::kTileN + kWarpThreads - 1) / kWarpThreads;
  float of_lane_[kReads];
};

template <typename F>
using RowWeights = std::conditional_t<F::kIsTurned, WeightsAlongN<F>, WeightsAlongM<F>>;

// Calls body(first, n) for each box of a transposed tile. A box begins at d[first] and at index n.
template <typename F, typename Body>
__device__ inline void each_box(const Tile<F>& tile, Body&& body) {
#pragma unroll
  for (int n = 0; n < F::kTileN; n += F::kStoreRows) {
    if (tile.n + n < tile.end_n) body(n / 2, n);
  }
}

// A warp's rounded results of the previous tile. The warp group stores them while the products of
// the current tile run. These products therefore wait only for the rounding.
//
// If rows lie along n, a tile has more boxes than registers can hold. The first boxes are stored
// before the products of the next tile.
template <typename F>
class Rounded {
 public:
  static constexpr int kBoxes = 4;  // that registers hold

  // Takes the results of a tile. `m` is the warp group's first row of m.
  template <typename T, int kSize>
  __device__ void take(const GemmParams& p, BoxWriter<F>& writer, const Tile<F>& tile,
                       const Plane& plane, int32_t m, const float (&d)[F::kProducts][kSize]) {
    box_ = F::kIsTurned ? plane.box(m, tile.n) : plane.box(tile.n, m);
    rest_m_ = tile.end_m - m;
    rest_n_ = tile.end_n - tile.n;
    next_ = 0;
#pragma unroll
    for (int i = 0; i < kAtOnce + kBoxes; ++i) {
      const float (&of)[kSize] = d[i / kBoxesN];
      const int first = i % kBoxesN * kColumns / 2;
      if (i < kAtOnce) {
        if (exists(i)) writer.template write<T>(p.d, at(i), of, first);
        continue;
      }
#pragma unroll
      for (int j = 0; j < kWords; ++j) {
        words_[i - kAtOnce][j] = pack<T>(of[first + 2 * j], of[first + 2 * j + 1]);
      }
    }
  }

  // Stores the next box, if one is left.
  __device__ void store_next(const CUtensorMap& map, BoxWriter<F>& writer) {
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) {
      if (i == next_ && exists(kAtOnce + i)) writer.write(map, at(kAtOnce + i), words_[i]);
    }
    ++next_;
  }
  // Stores all boxes that are left. Call it before take().
  __device__ void store_rest(const CUtensorMap& map, BoxWriter<F>& writer) {
    while (next_ < kBoxes) store_next(map, writer);
  }

 private:
  static constexpr int kColumns = BoxWriter<F>::kColumns, kWords = BoxWriter<F>::kWords;
  static constexpr int kBoxesN = F::kTileN / kColumns;  // of a product
  static constexpr int kAtOnce = F::kProducts * kBoxesN - kBoxes;
  static_assert(0 <= kAtOnce && kAtOnce <= kStoreBuffers);

  // Box number i has kColumns indices of n from n_of(i) on, and 64 indices of m from m_of(i) on.
  static __device__ int m_of(int i) { return i / kBoxesN * 64; }
  static __device__ int n_of(int i) { return i % kBoxesN * kColumns; }
  __device__ bool exists(int i) const { return m_of(i) < rest_m_ && n_of(i) < rest_n_; }
  __device__ Box at(int i) const {
    const int first = F::kIsTurned ? m_of(i) : n_of(i), second = F::kIsTurned ? n_of(i) : m_of(i);
    return {box_.c0 + first, box_.c1 + second, box_.c2, box_.c3};
  }

  uint32_t words_[kBoxes][kWords];
  Box box_;
  int32_t rest_m_, rest_n_;  // from the first index of m and n to the end of the product
  int next_ = kBoxes;        // the first box that is not stored
};

// Applies biases, activation and router weights, if rows lie along m. Stores the activations, and
// the pre-activations if `keeps`. A gated tile has as many gate columns as up columns.
template <typename T, typename F, int kSize>
__device__ inline void store_activations_along_m(const GemmParams& p, BoxWriter<F>& writer,
                                                 const Work& work, const Tile<F>& tile,
                                                 const Plane& plane, int32_t m,
                                                 const WeightsAlongM<F>& weights,
                                                 float (&d)[kSize]) {
  const ActivationParams& a = p.activation;
  constexpr bool kIsGated = F::kIsGated;
  constexpr int kResults = F::kResultN / 2, kHalves = kIsGated ? 2 : 1;
  if (a.bias != nullptr && work.weight >= 0) {
    const T* bias = static_cast<const T*>(a.bias) + int64_t{work.weight} * kHalves * a.num_columns;
    const bool is_scaled = !kIsGated && a.function == Activation::kScaledBias;
#pragma unroll
    for (int i = 0; i < kHalves * kResults; i += 4) {
      const int half = i / kResults;
      const int32_t column = tile.n + i % kResults * 2 + lane_index() % 4 * 2;
      const T* of = bias + half * a.num_columns + column;
      const float2 add =
          column < a.num_columns ? unpack<T>(*reinterpret_cast<const uint32_t*>(of)) : float2{};
#pragma unroll
      for (int j = i; j < i + 4; j += 2) {
        const float scale = is_scaled ? weights.at(j) : 1.f;
        d[j] += scale * add.x, d[j + 1] += scale * add.y;
      }
    }
  }
  const auto store = [&](const CUtensorMap& map, int half) {
#pragma unroll
    for (int n = 0; n < F::kResultN; n += kBoxElements) {
      if (tile.n + n >= a.num_columns) break;
      writer.template write<T>(map, plane.box(tile.n + n, m), d, half * kResults + n / 2);
    }
  };
  if (a.keeps != 0) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) store(p.pre[half], half);
  }
  for_activation<kIsGated>(a.function, [&](auto function) {
    constexpr Activation kFunction = decltype(function)::value;
#pragma unroll
    for (int i = 0; i < kResults; ++i) {
      if constexpr (kIsGated) {
        d[i] = activate_gated<kFunction>(d[i], d[kResults + i], a.alpha, a.limit).value;
      } else {
        d[i] = activate<kFunction>(d[i], a.alpha).value;
      }
      d[i] *= weights.at(i);
    }
  });
  store(p.d, 0);
}

// Replaces store_activations_along_m() if rows lie along n. `column` is the warp group's first
// column. The two products of a gated tile are gate and up. The two products of other tiles are 64
// columns apart. This function copies results to other registers. Otherwise, the compiler would not
// let products of any step overlap.
template <typename T, typename F, int kSize>
__device__ inline void store_activations_along_n(const GemmParams& p, BoxWriter<F>& writer,
                                                 const Work& work, const Tile<F>& tile,
                                                 const Plane& plane, int32_t column,
                                                 const WeightsAlongN<F>& weights,
                                                 const float (&d)[2][kSize]) {
  const ActivationParams& a = p.activation;
  constexpr bool kIsGated = F::kIsGated;
  const bool is_scaled = !kIsGated && a.function == Activation::kScaledBias;
  const int32_t of_warp = column + warp_of_group() * 16;
  float bias[2][2] = {};  // for d[i][j], at [i][j / 2 % 2]
  if (a.bias != nullptr && work.weight >= 0) {
    const T* of =
        static_cast<const T*>(a.bias) + int64_t{work.weight} * a.num_columns * (kIsGated ? 2 : 1);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int32_t at = of_warp + lane_index() / 4 + i % 2 * 8 + (kIsGated ? 0 : i / 2 * 64);
      if (at < a.num_columns) {
        bias[i / 2][i % 2] = float(of[at + (kIsGated ? i / 2 * a.num_columns : 0)]);
      }
    }
  }
  each_box(tile, [&](int first, int row) {
    constexpr int kOfBox = F::kStoreRows / 2;
    float x[2][kOfBox], weight[kOfBox / 2];
#pragma unroll
    for (int j = 0; j < kOfBox / 4; ++j) {
      const float2 of_rows = weights.at(row + 8 * j);
      weight[2 * j] = of_rows.x, weight[2 * j + 1] = of_rows.y;
    }
    const auto weight_of = [&](int j) { return weight[j / 4 * 2 + j % 2]; };
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < kOfBox; ++j) {
        x[i][j] = d[i][first + j] + (is_scaled ? weight_of(j) : 1.f) * bias[i][j / 2 % 2];
      }
    }
    const auto store = [&](const CUtensorMap& map, int i) {
      const int32_t of = column + (kIsGated ? 0 : 64 * i);
      if (of < a.num_columns) writer.template write<T>(map, plane.box(of, tile.n + row), x[i], 0);
    };
    if (a.keeps != 0) {
      store(p.pre[0], 0);
      store(p.pre[kIsGated ? 1 : 0], 1);
    }
    for_activation<kIsGated>(a.function, [&](auto function) {
      constexpr Activation kFunction = decltype(function)::value;
#pragma unroll
      for (int j = 0; j < kOfBox; ++j) {
        if constexpr (kIsGated) {
          x[0][j] = activate_gated<kFunction>(x[0][j], x[1][j], a.alpha, a.limit).value;
        } else {
          x[0][j] = activate<kFunction>(x[0][j], a.alpha).value;
          x[1][j] = activate<kFunction>(x[1][j], a.alpha).value;
        }
#pragma unroll
        for (int i = 0; i < (kIsGated ? 1 : 2); ++i) x[i][j] *= weight_of(j);
      }
    });
    store(p.d, 0);
    if constexpr (!kIsGated) store(p.d, 1);
  });
}

struct Operands {
  char *a, *b;
};

// Computes the gradients of pre-activations from d, the gradients of weighted activations. Stores
// these gradients, the weighted activations, and partial dots of d with the unweighted activations.
//
// The loader loads pre-activations into the stages of the operands while the last products run. A
// stage has 64 columns of a tile. The memory of operand a has the gate columns, or all columns if
// the activation is not gated. The memory of operand b has the up columns. In the stage, a warp
// overwrites its rows with their gradients, and stores the gradients from there.
template <typename T, typename F>
class Derivative {
 public:
  static constexpr bool kIsGated = F::kEpilogue == Epilogue::kDeriveGated;
  static constexpr int kHalves = kIsGated ? 2 : 1;
  static constexpr int kBytes = F::kTileM * kBoxElements * 2;  // of 64 columns of a tile
  static_assert(kBytes <= F::kBytesA && 2 * kBytes <= F::kBytesB);
  static_assert(F::kTileM == 16 * kConsumerWarps);

  // Loads 64 columns of pre-activations (from column n) into a stage. One lane calls it.
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

  __device__ Derivative(const GemmParams& p, const Work& work, const Tile<F>& tile, int32_t m)
      : p_(p), work_(work), tile_(tile), m_(m), weights_(p, work, tile, m) {}

  // `take()` waits for the next stage. `give()` releases the stage after its stores have read it.
  template <int kSize, typename Take, typename Give>
  __device__ void store(const Plane& plane, float (&d)[kSize], Take&& take, Give&& give) {
    for_activation<kIsGated>(p_.activation.function, [&](auto function) {
      float dots[2] = {};
#pragma unroll
      for (int n = 0; n < F::kTileN; n += kBoxElements) {
        const auto [a, b] = take();
        if (m_ < tile_.end_m && tile_.n + n < tile_.end_n) {
          const int warp_at = threadIdx.x / kWarpThreads * F::kStoreBytes;
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
  // Computes 32 columns of a stage, the first at `column`, from d[first], d[first + 1], ...
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
  const WeightsAlongM<F> weights_;
};

// Adds products to a tile of float32 totals in global memory.
//
// The loader loads totals into the stages of the operands. A stage has 64 columns: 32 in the memory
// of operand a, and 32 in that of operand b. A warp adds its results in shared memory, and stores
// the sums. Bulk reductions would need no load, but the L2 cache adds more slowly than it stores.
template <typename F>
class AddToTotals {
 public:
  static constexpr int kColumns = F::kStoreColumns;
  static constexpr int kBytes = F::kTileM * kColumns * sizeof(float);
  static_assert(kBytes <= F::kBytesA && kBytes <= F::kBytesB && 2 * kColumns == kBoxElements);
  static_assert(F::kTileM == 16 * kConsumerWarps);

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

  __device__ AddToTotals(const GemmParams& p, const Work&, const Tile<F>& tile, int32_t m)
      : p_(p), tile_(tile), m_(m) {}

  template <int kSize, typename Take, typename Give>
  __device__ void store(const Plane& plane, const float (&d)[kSize], Take&& take, Give&& give) {
#pragma unroll
    for (int n = 0; n < F::kTileN; n += kBoxElements) {
      const auto [a, b] = take();
      const int32_t column = tile_.n + n;
      if (m_ < tile_.end_m && column < tile_.end_n) {
        const int warp_at = threadIdx.x / kWarpThreads * F::kStoreBytes;
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
  // Adds d[first], d[first + 1], ... to 16 swizzled rows of 128 bytes. Odd rows and even rows add
  // to different columns at a time, because equal columns have the same banks.
  template <int kSize>
  static __device__ void add(char* rows, const float (&d)[kSize], int first) {
    const int lane = lane_index(), row = lane / 4;
    const bool is_odd = row % 2 != 0;
    const int swizzle = (lane % 4 / 2) ^ row ^ (is_odd ? 4 : 0);
    float x[kColumns / 2];
    // Without these copies, the compiler would not let products overlap.
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
