// The forms of a grouped GEMM. A form is a way to divide a product d[m, n] = sum over k of a[m, k]
// b[k, n] into tiles. The rows of groups lie along one of the axes m, n and k.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "gemm/activation.h"
#include "layout.h"
#include "tuning.h"

namespace moe_a2a::gemm {

enum class Axis { kM, kN, kK };

// The contiguous axis of an operand: k, or its other axis, m or n.
enum class Major { kK, kMN };

// In shared memory, an operand's tile has boxes of kBoxElements or fewer rows (operand b:
// kRowsOfBoxB). A row has 64 elements (128 bytes, swizzled). In a K-major box, elements are along
// k, and rows along m or n. In an MN-major box, elements are along m or n, and rows along k. The
// next box has the next 64 of m or n.
constexpr int kBoxElements = 64;
constexpr int kTileK = 64;
constexpr int kBoxBytes = kBoxElements * kTileK * 2;
static_assert(kBoxElements * 2 == 128, "the hardware swizzles rows of 128 bytes");

constexpr int kConsumerGroups = 2;  // warp groups that multiply: each has half of a tile's m
constexpr int kWarpsOfGroup = 4, kConsumerWarps = kWarpsOfGroup * kConsumerGroups;
constexpr int kGroupThreads = 128;
// The last warp group takes tiles, loads operands and stores results.
constexpr int kGemmThreads = kGroupThreads * (kConsumerGroups + 1);
// A band is this number of rows of tiles. Clusters take tiles band by band, so that tiles that
// run at the same time share rows and columns of operands.
constexpr int kBand = Tuning::kGemmBand;
static_assert(kBand >= 1);

// The rows of a tile of a form for many rows.
constexpr int kBaseRows = 128;
static_assert(kBaseRows == Tuning::kForward.m && kBaseRows == Tuning::kTransposed.m);

// Work::tile has 16 bits for a tile's index along one axis, and 15 bits for the other axis.
constexpr int64_t kMaxTiles = 1 << 15;
// A group of r rows has at most r / kLeastTileRows + 1 tiles of rows. kLeastTileColumns is the
// smallest extent of a tile along the other axes.
constexpr int kLeastTileRows = 64, kLeastTileColumns = 128;

// An epilogue processes the results of a product and stores them (gemm/epilogue.cuh).
enum class Epilogue : int32_t {
  kStore,          // only stores results
  kActivate,       // applies an activation to each result
  kActivateGated,  // multiplies the activated gate columns by the up columns
  kDerive,         // computes the gradient of pre-activations from the gradient of activations
  kDeriveGated,    // does so for gated activations
  kAdd,            // adds each result, without rounding, to the float32 total in d
};

template <Axis kRows_, Major kMajorA_, Major kMajorB_, int kTileM_, int kTileN_, int kBlocks_,
          int kStages_, Epilogue kEpilogue_ = Epilogue::kStore, bool kVaries_ = false>
struct Form {
  static constexpr Axis kRows = kRows_;
  static constexpr Major kMajorA = kMajorA_, kMajorB = kMajorB_;
  static constexpr int kTileM = kTileM_, kTileN = kTileN_;
  static constexpr int kBlocks = kBlocks_;  // that share loads
  static constexpr int kStages = kStages_;
  static constexpr Epilogue kEpilogue = kEpilogue_;
  static constexpr bool kVaries = kVaries_;  // tiles have different numbers of rows (RowTiles)
  // The two blocks of a cluster have neighbouring tiles along this axis.
  static constexpr Axis kPaired = kVaries ? Axis::kN : Axis::kM;
  static constexpr int kStepK = kTileK;  // elements of k in a tile of an operand
  // A sum over no k needs a step of zeros, because the first step initializes the results.
  static constexpr int kLeastSteps = 1;

  // Weights [L, K, 2 I] have I gate columns and then I up columns. A tile has some gate columns and
  // the corresponding up columns, so its results have half as many columns.
  static constexpr bool kIsGated = kEpilogue == Epilogue::kActivateGated;
  static constexpr bool kDerives =
      kEpilogue == Epilogue::kDerive || kEpilogue == Epilogue::kDeriveGated;
  static constexpr bool kAdds = kEpilogue == Epilogue::kAdd;
  // After a tile's operands, the stages transport an array for the epilogue, 64 columns each.
  static constexpr bool kReads = kDerives || kAdds;
  static constexpr int kReadStages = kReads ? kTileN / kBoxElements : 0;
  static constexpr int kResultM = kIsGated && kRows == Axis::kN ? kTileM / 2 : kTileM;
  static constexpr int kResultN = kIsGated && kRows == Axis::kM ? kTileN / 2 : kTileN;
  static constexpr int kBoxesA = kTileM / kBoxElements;
  // Operand b has boxes of up to 64 rows, or two larger boxes if 3, 5, ... would be needed, because
  // each of two blocks loads half of the boxes.
  static constexpr int kRowsOfBoxB = kTileN < kBoxElements ? kTileN
                                     : kTileN / kBoxElements % 2 == 0 || kTileN == kBoxElements
                                         ? kBoxElements
                                         : kTileN / 2;
  static constexpr int kBoxesB = kTileN / kRowsOfBoxB;
  // If kVaries, large tiles load one more box of operand b, with fewer rows.
  static constexpr int kRowsOfLastBoxB = kTileN - kBoxesB * kRowsOfBoxB;
  static constexpr int kBytesA = kTileM * kTileK * 2, kBytesB = kTileN * kTileK * 2;
  // The number of products of a warp group for each 16 of k.
  static constexpr int kProducts = kTileM / (64 * kConsumerGroups);
  static constexpr bool kHasRaggedA = kRows != Axis::kN, kHasRaggedB = kRows != Axis::kM;
  static constexpr bool kHasRaggedD = kRows != Axis::kK;
  static constexpr bool kWeightsAreA = !kHasRaggedA;
  // If rows lie along n, stores transpose the tile, because results in memory are [rows, columns].
  static constexpr bool kIsTurned = kRows == Axis::kN;
  // Results are stored in boxes. A box has results of one warp group: 64 indices of m.
  static constexpr int kStoreColumns = kAdds ? kBoxElements / 2 : kBoxElements;
  static constexpr int kStoreRows = kVaries ? kTileN / 3 : kIsTurned ? kTileN : 64;
  // The bytes of a box. A box of float32 results of an FP8 product has half as many columns.
  static constexpr int kStoreBytes = kStoreColumns * kStoreRows * (kAdds ? 4 : 2);
  static_assert(!kAdds || kRows == Axis::kK);
  static_assert(kBlocks == 1 || (kBlocks == 2 && kBoxesA % 2 == 0 && kBoxesB % 2 == 0));
  static_assert(!kVaries || (kRows == Axis::kN && kBlocks == 2));
  static_assert(kMajorB == Major::kK || kRowsOfBoxB == kBoxElements);
  static_assert(kTileM % (64 * kConsumerGroups) == 0);
  static_assert(kResultM >= (kRows == Axis::kM ? kLeastTileRows : kLeastTileColumns) &&
                kResultN >= (kRows == Axis::kN ? kLeastTileRows : kLeastTileColumns));
  // If kVaries: an estimate of the time that this form saves for a group, in steps of the form for
  // many rows times rows. That form also multiplies the idle rows of its last tile. A tile of this
  // form takes kMoreSteps steps longer.
  MOE_A2A_HOST_DEVICE static int32_t gain(int32_t size, int32_t k) {
    constexpr int kMoreSteps =
        kEpilogue == Epilogue::kStore ? Tuning::kFewMoreSteps : Tuning::kFewMoreStepsToActivate;
    return (-size & (kBaseRows - 1)) * (k / kTileK) - kMoreSteps * size;
  }
  static_assert(kStages >= 2, "a warp may release a stage after it has waited for the next");
  static_assert(kBytesA + kBytesB < 1 << 20, "a phase of an mbarrier counts up to 2^20 - 1 bytes");
};

// Multiplies rows [C, K] by weights [L, K, N]. A cluster's two tiles share each load of weights.
template <Epilogue E>
using Forward = Form<Axis::kM, Major::kK, Major::kMN, Tuning::kForward.m, Tuning::kForward.n,
                     Tuning::kForward.blocks, Tuning::kForward.stages, E>;
// Multiplies rows [C, N] by transposed weights.
template <Epilogue E>
using Transposed =
    Form<Axis::kM, Major::kK, Major::kK, Tuning::kTransposed.m, Tuning::kTransposed.n,
         Tuning::kTransposed.blocks, Tuning::kTransposed.stages, E>;
// Computes the product of Forward or Transposed for groups of few rows. Rows lie along n, because
// instructions accept any multiple of 8 as the extent along n. A tile has only as many rows as its
// group needs. Operand a is the weights.
template <Major kMajorA, Epilogue E>
using Few = Form<Axis::kN, kMajorA, Major::kK, Tuning::kFew.m, Tuning::kFew.n, Tuning::kFew.blocks,
                 Tuning::kFew.stages, E, true>;
template <Epilogue E>
using ForwardFew = Few<Major::kMN, E>;
template <Epilogue E>
using TransposedFew = Few<Major::kK, E>;
// For each group, multiplies transposed rows [K, C] by rows [C, N].
template <Epilogue E>
using WeightGradient =
    Form<Axis::kK, Major::kMN, Major::kMN, Tuning::kWeightGradient.m, Tuning::kWeightGradient.n,
         Tuning::kWeightGradient.blocks, Tuning::kWeightGradient.stages, E>;

// A ragged tensor is an array [C, columns] of the rows of groups. Outside of a group, the hardware
// loads zeros and stores nothing. The tensor map has an axis of kRaggedRows rows, which ends where
// the group ends. Two more axes choose this end. A step along the first of the two is one row. A
// step along the second is kRaggedWrap bytes minus one row, so kRaggedRows steps are -kRaggedRows
// rows modulo 2^64.
constexpr int32_t kRaggedRows = 1 << 30;
constexpr int64_t kRaggedWrap = int64_t{1} << 35;
constexpr int32_t kRaggedEnds = 0x7fff0000;  // the size of the two other axes
static_assert(static_cast<uint64_t>(kRaggedRows) * static_cast<uint64_t>(kRaggedWrap) == 0);

// The activation and the arrays of an epilogue. P = I, or P = 2 I for a gated activation.
struct ActivationParams {
  Activation function;
  float alpha, limit;        // of kClampedSwiglu
  const float* row_weights;  // [C]
  const void* bias;          // kActivate: [L + num_spare, P], or null
  float* partial_dots;       // kDerive: [tiles of I, C]
  int32_t num_columns;       // I
  int32_t keeps;             // kActivate: store the pre-activations
  int64_t num_rows;          // C
};

struct GemmParams {
  CUtensorMap a, b, d;
  // The gate columns and the up columns of an array [C, P] that the epilogue stores:
  // pre-activations, or their gradient. If the activation is not gated, pre[0] has all columns.
  CUtensorMap pre[2];
  CUtensorMap read[2];  // kDerive: pre-activations
  CUtensorMap spare;    // the weight matrices from index first_spare on
  CUtensorMap last_b;   // b, with boxes of kRowsOfLastBoxB rows
  int32_t m, n, k;      // the axis of the rows is 0; gated results have I columns
  ActivationParams activation;
  const int32_t *starts, *sizes, *weights;  // [groups] (GroupedGemm)
  int32_t num_groups;
  int32_t first_spare;
  int32_t* next_tile;  // 0 before the launch; null: clusters take tiles in turn
};

// The parameters of a kernel: those of each of its forms.
template <typename Params, typename... Forms>
struct ParamsOf {
  Params of[sizeof...(Forms)];
};

}  // namespace moe_a2a::gemm
