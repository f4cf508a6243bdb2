// All numbers chosen by measurement. Other values that pass the static_asserts change only times.
// Exception: the number of teams changes how a weighted dispatch rounds inner products.
//
// To tune the exchange for another GPU, for example of compute capability 10.0:
//
// 1. Run `python -m benchmarks.tune` on a host with these GPUs. It measures other values, and
//    prints a `struct Sm100 : Sm90` with the values that were faster.
// 2. Paste the struct below Sm90, and name it in the line of `Measured`.
// 3. Commit the record, and refer to it in docs/history/speed.md.
//
// benchmarks.tune varies the numbers of kLoweringTuning, with which Python lowers programs. The
// other numbers are constants of kernels and launches. To time another value of these, build
// tools/driver/kernels.cu with MOE_A2A_CANDIDATE.
//
// Names in quotation marks are headings or list entries of docs/history/speed.md.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

// The lowest compute capability of the build, times 10 (CMakeLists.txt). All kernels of a build use
// the numbers for this capability, because host and device must use equal numbers.
#ifndef MOE_A2A_ARCHITECTURE
#define MOE_A2A_ARCHITECTURE 90
#endif

namespace moe_a2a {

// Compute capability 9.0. Measured on H200 and H100 SXM, which have 132 multiprocessors.
struct Sm90 {
  // The limit of a block's shared memory on 9.0, 10.x and 11.0 (not measured).
  static constexpr int kMaxSharedBytes = 227 << 10;

  // ---- Blocks of a launch. A GPU with fewer multiprocessors gets fewer blocks.

  static constexpr int kDefaultSms = 64;  // "Blocks"
  // "Blocks": a launch has kFewSms blocks if a rank has at most kFewTokens tokens, or if the bytes
  // of its tokens times the number of ranks are at most kFewBytes.
  static constexpr int kFewTokens = 512;
  static constexpr int kFewBytes = 128 << 20;
  static constexpr int kFewSms = 128;
  static constexpr int kWeightedSms = 128;  // "Blocks": a weighted dispatch
  static constexpr int kFormatSms = 128;    // "Token formats"
  static constexpr int kSplitSms = 24;      // "During matrix products": a split exchange

  // ---- Chunks of route ("Route"). The numbers of tokens of a chunk are powers of two.

  static constexpr int kRouteChunks = 32;
  static constexpr int kRouteLeastTokens = 64, kRouteMostTokens = 256;

  // ---- Roles of the blocks of a launch (kernels/grid.h).

  // "Teams": parameters of teams_for().
  static constexpr int kTeamItems = 5, kTeamsPerItems = 7;
  static constexpr int64_t kBytesPerTeam = 2048;
  // The least number of teams of a block: for rows of kSmallRowBytes or less, and for larger rows.
  static constexpr int64_t kSmallRowBytes = 16 << 10;
  static constexpr int kLeastTeamsSmallRows = 4, kLeastTeamsLargeRows = 2;
  // If each block has at most this number of send items, all blocks send first.
  static constexpr int64_t kFewItems = 1;         // dispatch
  static constexpr int64_t kFewItemsCombine = 8;  // "Senders"
  // "Senders": to send one row takes as long as to write this number of rows.
  static constexpr double kRowsPerSent = 3;
  // Replaces kRowsPerSent in launches of kFewSms blocks or more if a rank's tokens have at most
  // kManySendersBytes.
  static constexpr double kRowsPerSentOfMany = 8;
  static constexpr int64_t kManySendersBytes = 32 << 20;
  // "Token formats": to encode a token takes as long as to write this number of rows.
  static constexpr double kRowsPerEncodedFp8 = 8, kRowsPerEncodedFp4 = 20;
  static constexpr double kCombineSenders = 2. / 3;         // "Senders"
  static constexpr double kEncodedCombineSenders = 1. / 2;  // "Token formats"
  // "Senders": with two ranks, half of the blocks send if rows are larger than
  // kSmallCombineRowBytes and a block has more than kFewItemsOfTwo send items.
  static constexpr int64_t kSmallCombineRowBytes = 4096, kFewItemsOfTwo = 4;
  static constexpr double kRoutedSenders = 0.25;  // "Senders": routed dispatch
  static constexpr int kRoutedLeastSenders = 4;
  static constexpr int kRoutedTeams = 4;
  static constexpr int kRoutedEncodedTeams = 1;  // "Few tokens in one launch"
  // "Senders": the approximate number of work items that write zeros to rows, for each block.
  static constexpr int kZeroItemsPerBlock = 4;

  // ---- Inside a kernel.

  // "Copies and sums": the stages through which a warp copies (device/stream.cuh).
  static constexpr int kStages = 3;
  static constexpr int kLoadsAhead = 2;
  static constexpr int kSegmentBytes = 3584;
  // "Token formats": the most bytes of an encoded segment's values, and of a whole segment.
  static constexpr int kEncodedValueBytes = 3584;
  static constexpr int kMadeBytes = 4096;
  // Loads that a thread keeps in flight.
  static constexpr int kLoadsOfVectors = 8, kLoadsOfWords = 4;  // device/copy.cuh
  static constexpr int kLoadsOfEncoded = 4;                     // rows in a token format
  static constexpr int kLoadsOfPacks = 2;                       // the general sum
  // "Copies and sums": 16-byte words that a thread sums at a time, in sums through a list.
  static constexpr int kPartWords = 2;
  static constexpr int kPlanLoads = 4;  // "Copies and sums"
  // "Copies and sums": polls of a warp without a pause, and the pause between later polls.
  static constexpr int kPollsWithoutPause = 16;
  static constexpr int kPauseNs = 20;
  static constexpr int64_t kLeastListedBytes = 1024;  // of one weight, for sums through a list

  // ---- The grouped GEMM ("Grouped products").

  struct GemmTile {
    int m, n, blocks, stages;
  };
  static constexpr GemmTile kForward = {128, 256, 2, 4};
  // The tile for few rows, which lie along n.
  static constexpr GemmTile kFew = {256, 144, 2, 4};
  static constexpr GemmTile kTransposed = {128, 256, 2, 4};
  static constexpr GemmTile kWeightGradient = {128, 256, 2, 4};
  static constexpr int kGemmBand = 8;
  // "Between two tiles": a block takes its next tile this number of steps before it loads the tile.
  static constexpr int kGemmStepsAhead = 8;
  // "Few tiles": with at most this number of tiles per block, clusters take tiles in turn. The
  // number of tiles is estimated for groups that all have rows (TakesInTurn in gemm/launch.cuh).
  // Weight gradients always use a counter.
  static constexpr int kGemmTilesInTurn = 8;
  // "Between few and many rows": a tile of kFew takes as long as this many more steps of the form
  // for many rows, without and with an activation.
  static constexpr int kFewMoreSteps = 5, kFewMoreStepsToActivate = 12;
};

// The numbers for MOE_A2A_ARCHITECTURE. With a struct Sm100 for 10.0 and newer:
//
//   using Measured = std::conditional_t<MOE_A2A_ARCHITECTURE >= 100, Sm100, Sm90>;
using Measured = Sm90;

#ifdef MOE_A2A_CANDIDATE  // for example kPauseNs = 0
struct Candidate : Measured {
  static constexpr auto MOE_A2A_CANDIDATE;
};
using Tuning = Candidate;
#else
using Tuning = Measured;
#endif

// The numbers that Python reads, with their names there (native.tuning).
constexpr std::pair<const char*, int> kLoweringTuning[] = {
    {"DEFAULT_NUM_SMS", Tuning::kDefaultSms},
    {"FEW_TOKENS", Tuning::kFewTokens},
    {"FEW_BYTES", Tuning::kFewBytes},
    {"FEW_NUM_SMS", Tuning::kFewSms},
    {"WEIGHTED_NUM_SMS", Tuning::kWeightedSms},
    {"FORMAT_NUM_SMS", Tuning::kFormatSms},
    {"SPLIT_NUM_SMS", Tuning::kSplitSms},
    {"ROUTE_CHUNKS", Tuning::kRouteChunks},
    {"ROUTE_LEAST_TOKENS", Tuning::kRouteLeastTokens},
    {"ROUTE_MOST_TOKENS", Tuning::kRouteMostTokens},
};

}  // namespace moe_a2a
