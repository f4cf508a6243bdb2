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

// A lane passes 16 bytes of a box to store_matrices(). Returns their offset in the box, for 16
// indices of n from index `n` of the box on. Rows are swizzled as by the tensor map. Matrices 0 and
// 1 are the two halves of the warp's 16 indices of m. Matrices 2 and 3 have the next 8 of n.
template <typename F>
__device__ inline int offset_in_box(int n) {
  const int matrix = lane_index() / 8, row = lane_index() % 8, warp = warp_of_group();
  if constexpr (F::kIsTurned) {
    return (n + matrix / 2 * 8 + row) * 128 + ((2 * warp + matrix % 2) ^ row) * 16;
  } else {
    return (16 * warp + matrix % 2 * 8 + row) * 128 + ((n / 8 + matrix / 2) ^ row) * 16;
  }
}

// Stores boxes of 16-bit results.
template <typename F>
class BoxWriter : public BoxBuffers<F> {
 public:
  static constexpr int kColumns = F::kIsTurned ? F::kStoreRows : kBoxElements;  // of n
  static constexpr int kWords = kColumns / 4;
  using BoxBuffers<F>::BoxBuffers;

  // Stores a box of 64 indices of m. This warp has 16 of them.
  __device__ void write(const CUtensorMap& map, const Box& box, const uint32_t (&words)[kWords]) {
    char* buffer = this->next();
#pragma unroll
    for (int n = 0; n < kColumns; n += 16) {
      const uint32_t* of = words + n / 4;
      store_matrices<F::kIsTurned>(buffer + offset_in_box<F>(n), {of[0], of[1], of[2], of[3]});
    }
    this->store(map, box);
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

// Returns weight * x. Rows of weight 0 are zeros, even if x is infinite or NaN.
__device__ inline float weigh(float weight, float x) { return weight == 0.f ? 0.f : weight * x; }

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

// A warp's rounded results of a tile. The warp group stores most of them while the products of the
// next tile run. These products therefore wait only for the rounding.
//
// The results have one array (d) or, with an activation, pre-activations and then d. Each array has
// kOfArray boxes. Registers hold the last kBoxes boxes of all. Earlier boxes are stored before the
// next products.
template <typename F>
class Rounded {
 public:
  static constexpr int kBoxes = 4;

  // Call it before keep(). `m` is the warp group's first index of m.
  __device__ void begin(const Tile<F>& tile, const Plane& plane, int32_t m) {
    box_ = F::kIsTurned ? plane.box(m, tile.n) : plane.box(tile.n, m);
    rest_m_ = tile.end_m - m;
    rest_n_ = tile.end_n - tile.n;
    next_ = 0;
  }
  // Rounds an array, whose results begin at d[i][first].
  template <typename T, int kProducts, int kSize>
  __device__ void keep(const GemmParams& p, BoxWriter<F>& writer, int array,
                       const float (&d)[kProducts][kSize], int first) {
#pragma unroll
    for (int i = 0; i < kOfArray; ++i) {
      const int box = array * kOfArray + i, at = first + n_of(i) / 2;
      const float (&of)[kSize] = d[i % kBoxesM];
      if (box < kAtOnce) {
        if (exists(p, box)) writer.template write<T>(map(p, box), box_at(box), of, at);
        continue;
      }
#pragma unroll
      for (int j = 0; j < kWords; ++j) {
        words_[box - kAtOnce][j] = pack<T>(of[at + 2 * j], of[at + 2 * j + 1]);
      }
    }
  }

  // Stores the next box, if one is left.
  __device__ void store_next(const GemmParams& p, BoxWriter<F>& writer) {
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) {
      const int box = kAtOnce + i;
      if (i == next_ && exists(p, box)) writer.write(map(p, box), box_at(box), words_[i]);
    }
    ++next_;
  }
  // Stores all boxes that are left. Call it before begin().
  __device__ void store_rest(const GemmParams& p, BoxWriter<F>& writer) {
    while (next_ < kBoxes) store_next(p, writer);
  }

 private:
  static constexpr int kColumns = BoxWriter<F>::kColumns, kWords = BoxWriter<F>::kWords;
  static constexpr int kArrays = F::kIsGated ? 3 : F::kEpilogue == Epilogue::kActivate ? 2 : 1;
  static constexpr int kBoxesM = F::kResultM / (64 * kConsumerGroups);
  static constexpr int kOfArray = kBoxesM * F::kResultN / kColumns;
  static constexpr int kAtOnce = kArrays * kOfArray - kBoxes;
  static_assert(kAtOnce >= 0);

  // The first indices of box number i, from the first index of the results on.
  static __device__ int m_of(int i) { return i % kBoxesM * 64; }
  static __device__ int n_of(int i) { return i % kOfArray / kBoxesM * kColumns; }
  static __device__ bool is_of_d(int i) { return i / kOfArray == kArrays - 1; }
  static __device__ const CUtensorMap& map(const GemmParams& p, int i) {
    return is_of_d(i) ? p.d : p.pre[i / kOfArray];
  }
  __device__ bool exists(const GemmParams& p, int i) const {
    return m_of(i) < rest_m_ && n_of(i) < rest_n_ && (is_of_d(i) || p.activation.keeps != 0);
  }
  __device__ Box box_at(int i) const {
    const int first = F::kIsTurned ? m_of(i) : n_of(i), second = F::kIsTurned ? n_of(i) : m_of(i);
    return {box_.c0 + first, box_.c1 + second, box_.c2, box_.c3};
  }

  uint32_t words_[kBoxes][kWords];
  Box box_;
  int32_t rest_m_, rest_n_;  // from the first index of m and n to the end of the product
  int next_ = kBoxes;        // the first box that is not stored
};

// Applies biases, activation and router weights, if rows lie along m. Keeps or stores the
// pre-activations and the activations. A gated tile has as many gate columns as up columns.
template <typename T, typename F, int kSize>
__device__ inline void store_activations_along_m(const GemmParams& p, BoxWriter<F>& writer,
                                                 Rounded<F>& rounded, const Work& work,
                                                 const Tile<F>& tile,
                                                 const WeightsAlongM<F>& weights,
                                                 float (&results)[1][kSize]) {
  const ActivationParams& a = p.activation;
  float (&d)[kSize] = results[0];
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
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    rounded.template keep<T>(p, writer, half, results, half * kResults);
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
      d[i] = weigh(weights.at(i), d[i]);
    }
  });
  rounded.template keep<T>(p, writer, kHalves, results, 0);
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
#pragma unroll
  for (int row = 0; row < F::kTileN; row += F::kStoreRows) {
    if (tile.n + row >= tile.end_n) break;
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
        x[i][j] = d[i][row / 2 + j] + (is_scaled ? weight_of(j) : 1.f) * bias[i][j / 2 % 2];
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
        for (int i = 0; i < (kIsGated ? 1 : 2); ++i) x[i][j] = weigh(weight_of(j), x[i][j]);
      }
    });
    store(p.d, 0);
    if constexpr (!kIsGated) store(p.d, 1);
  }
}

// A stage for an array that an epilogue reads, and the barrier of the stage's release.
struct ReadStage {
  char *a, *b;  // the memory of the operands
  uint64_t* released;

  // Returns the place of a box. The first boxes are in the memory of operand a.
  template <typename F>
  __device__ char* box(int i) const {
    constexpr int kInA = F::kBytesA / F::kStoreBytes;
    return i < kInA ? a + i * F::kStoreBytes : b + (i - kInA) * F::kStoreBytes;
  }
};

// Computes the gradients of pre-activations from d, the gradients of weighted activations. Stores
// these gradients, the weighted activations, and partial dots of d with the unweighted activations.
//
// The loader loads pre-activations while the last products run. A stage has 64 columns of a tile:
// boxes of gate columns, or of all columns if the activation is not gated, and then boxes of up
// columns. In these boxes, a warp overwrites its rows with their gradients, which are stored from
// there. More boxes are for the activations.
template <typename T, typename F>
class Derivative {
 public:
  static constexpr bool kIsGated = F::kEpilogue == Epilogue::kDeriveGated;
  static constexpr int kHalves = kIsGated ? 2 : 1;
  static constexpr int kBoxes = F::kTileM / kBoxElements;  // of an array
  static_assert((kHalves + 1) * kBoxes * F::kStoreBytes <= F::kBytesA + F::kBytesB);

  // Loads 64 columns of pre-activations (from column n) into a stage. One lane calls it.
  static __device__ void load(const GemmParams& p, const Tile<F>& tile, const Plane& plane, int n,
                              const ReadStage& to, uint64_t* loaded) {
    expect_bytes(loaded, kHalves * kBoxes * F::kStoreBytes);
#pragma unroll
    for (int i = 0; i < kHalves * kBoxes; ++i) {
      const Box box = plane.box(tile.n + n, tile.m + i % kBoxes * kBoxElements);
      load_box(to.box<F>(i), &p.read[i / kBoxes], box, loaded);
    }
  }

  __device__ Derivative(const GemmParams& p, const Work& work, const Tile<F>& tile, int32_t m)
      : p_(p), work_(work), tile_(tile), weights_(p, work, tile, m) {}

  // `take()` waits for the next stage, and returns it. `m` is the warp group's first row.
  template <int kSize, typename Take>
  __device__ void store(BoxBuffers<F>& boxes, const Plane& plane, int32_t m,
                        const float (&d)[kSize], Take&& take) {
    const int group = threadIdx.x / kGroupThreads;
    for_activation<kIsGated>(p_.activation.function, [&](auto function) {
      float dots[2] = {};
#pragma unroll
      for (int n = 0; n < F::kTileN; n += kBoxElements) {
        const ReadStage stage = take();
        boxes.wait();
        char* const gate = stage.box<F>(group);
        char* const up = stage.box<F>(kBoxes + group);
        char* const act = stage.box<F>(kHalves * kBoxes + group);
        const bool exists = tile_.n + n < tile_.end_n;
        if (exists) {
#pragma unroll
          for (int column = 0; column < kBoxElements; column += 32) {
            derive<decltype(function)::value>(gate, up, act, column, d, (n + column) / 2, dots);
          }
          clear_unweighted({gate, kIsGated ? up : act, act});
        }
        boxes.request([&](StoreRequest<F>& request) {
          const auto map_of = [&](const CUtensorMap& map) { return exists ? &map : nullptr; };
          const Box box = plane.box(tile_.n + n, m);
          request.stores[0] = {map_of(p_.pre[0]), gate, box};
          request.stores[1] = {kIsGated ? map_of(p_.pre[1]) : nullptr, up, box};
          request.stores[2] = {map_of(p_.d), act, box};
          request.released = stage.released;
        });
      }
      store_dots(dots, m + warp_of_group() * 16);
    });
  }

 private:
  // Computes 32 columns of a stage, the first at `column`, from d[first], d[first + 1], ...
  template <Activation kFunction, int kSize>
  __device__ void derive(char* gate, char* up, char* act, int column, const float (&d)[kSize],
                         int first, float (&dots)[2]) {
    const ActivationParams& a = p_.activation;
    int at[2];
    uint32_t gates[2][4], ups[2][4];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      at[j] = offset_in_box<F>(column + 16 * j);
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

  // Overwrites the rows of weight 0, in which 0 times infinity is NaN, with zeros. To select the
  // numbers in derive() would take up to 3 % of the product's time.
  __device__ void clear_unweighted(char* const (&boxes)[3]) const {
    const bool clears[] = {weights_.of[0] == 0.f, weights_.of[1] == 0.f};
    if (!__any_sync(kAllLanes, clears[0] || clears[1])) return;
    __syncwarp();
    for (char* box : boxes) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = warp_of_group() * 16 + lane_index() / 4 + 8 * r;
        auto* quarter = reinterpret_cast<uint4*>(box + row * 128 + lane_index() % 4 * 32);
        if (clears[r]) quarter[0] = quarter[1] = uint4{};
      }
    }
  }

  // `m` is the warp's first row.
  __device__ void store_dots(float (&dots)[2], int32_t m) const {
    const int lane = lane_index();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      dots[r] += __shfl_xor_sync(kAllLanes, dots[r], 1);
      dots[r] += __shfl_xor_sync(kAllLanes, dots[r], 2);
      const int32_t row = m + lane / 4 + 8 * r;
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
  const WeightsAlongM<F> weights_;
};

// Adds products to a tile of float32 totals in global memory.
//
// The loader loads totals into stages. A stage has 64 columns: 32 in the memory of operand a, and
// 32 in that of operand b. A warp adds its results there, and the sums are stored from there. Bulk
// reductions would need no load, but the L2 cache adds more slowly than it stores.
template <typename F>
class AddToTotals {
 public:
  static constexpr int kColumns = F::kStoreColumns;
  static constexpr int kBoxes = F::kTileM / kBoxElements;  // of the first 32 columns of a stage
  static_assert(kBoxes * F::kStoreBytes == F::kBytesA && F::kBytesA <= F::kBytesB);
  static_assert(2 * kColumns == kBoxElements);

  static __device__ void load(const GemmParams& p, const Tile<F>& tile, const Plane& plane, int n,
                              const ReadStage& to, uint64_t* loaded) {
    expect_bytes(loaded, 2 * kBoxes * F::kStoreBytes);
#pragma unroll
    for (int i = 0; i < 2 * kBoxes; ++i) {
      const int32_t column = tile.n + n + i / kBoxes * kColumns;
      load_box(to.box<F>(i), &p.d, plane.box(column, tile.m + i % kBoxes * kBoxElements), loaded);
    }
  }

  __device__ AddToTotals(const GemmParams& p, const Work&, const Tile<F>& tile, int32_t)
      : p_(p), tile_(tile) {}

  template <int kSize, typename Take>
  __device__ void store(BoxBuffers<F>& boxes, const Plane& plane, int32_t m,
                        const float (&d)[kSize], Take&& take) {
    const int group = threadIdx.x / kGroupThreads;
#pragma unroll
    for (int n = 0; n < F::kTileN; n += kBoxElements) {
      const ReadStage stage = take();
      boxes.wait();
      const int32_t columns = tile_.end_n - tile_.n - n;  // of the rest of the tile
      if (columns > 0) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          add(stage.box<F>(half * kBoxes + group) + warp_of_group() * 16 * 128, d,
              (n + half * kColumns) / 2);
        }
      }
      boxes.request([&](StoreRequest<F>& request) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          request.stores[half] = {half * kColumns < columns ? &p_.d : nullptr,
                                  stage.box<F>(half * kBoxes + group),
                                  plane.box(tile_.n + n + half * kColumns, m)};
        }
        request.released = stage.released;
      });
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
};

}  // namespace moe_a2a::gemm
