// All measured numbers. Other values that pass the static_asserts change only times, and not
// results. The only exception is the number of teams, on which the rounding of the inner products
// of a weighted dispatch depends.
//
// To tune the exchange for another GPU, for example of compute capability 10.0:
//
// 1. Run `python -m benchmarks.tune` on a host with these GPUs. It checks and times candidates, and
//    prints the lines of `struct Sm100 : Sm90`, with the numbers that another value makes faster.
// 2. Paste the struct below Sm90, and name it in the line of `Measured`.
// 3. Commit the record, and refer to it in docs/history/speed.md.
//
// Three kinds of numbers exist. (1) Numbers that the device knows are not here: a launch asks for
// the number of multiprocessors (ffi/call_state.cc), which limits all numbers of SMs below. (2)
// Python lowers programs with the numbers of kLoweringTuning, so benchmarks.tune varies them
// without a rebuild. (3) All other numbers are constants of kernels and of launches. To time another
// value of a constant, build tools/driver/kernels.cu with MOE_A2A_CANDIDATE.
//
// Names in quotation marks are headings or list entries in docs/history/speed.md, which has the
// measurements.
#pragma once

#include <cstdint>
#include <type_traits>

// The lowest compute capability for which the build has kernels, times 10 (CMakeLists.txt). Host
// and device must agree on the numbers, so all kernels of a build use those of this architecture.
// Wheels are for 9.0 and newer, and therefore use the numbers of 9.0 on all GPUs.
#ifndef MOE_A2A_ARCHITECTURE
#define MOE_A2A_ARCHITECTURE 90
#endif

namespace moe_a2a {

// Compute capability 9.0. Measured on H200 and H100 SXM, which have 132 multiprocessors.
struct Sm90 {
  // The limit of a block's shared memory on 9.0, 10.x and 11.0. This number is not measured. It is
  // a constant because it limits the arrays of kernels.
  static constexpr int kMaxSharedBytes = 227 << 10;

  // ---- Blocks of a launch (kLoweringTuning). Handlers reduce the numbers to the multiprocessors
  // that the GPU has.

  static constexpr int kDefaultSms = 64;  // "Blocks"
  // "Blocks": more blocks are faster if a rank has few tokens, or if the bytes of its tokens times
  // the number of ranks are few.
  static constexpr int kFewTokens = 512;
  static constexpr int kFewBytes = 128 << 20;
  static constexpr int kFewSms = 128;
  static constexpr int kWeightedSms = 128;  // "Blocks": a weighted dispatch
  static constexpr int kFormatSms = 128;    // "Token formats"
  static constexpr int kSplitSms = 24;      // "During matrix products": a split exchange

  // ---- Chunks of route ("Route", kLoweringTuning): tokens are divided into kRouteChunks chunks,
  // with the limits below on the tokens of a chunk. The limits and the number of tokens of a chunk
  // are powers of two.

  static constexpr int kRouteChunks = 32;
  static constexpr int kRouteLeastTokens = 64, kRouteMostTokens = 256;

  // ---- Roles of the blocks of a launch (kernels/grid.h).

  // "Teams": a block's teams double while kTeamsPerItems * teams < kTeamItems * items, and while a
  // team has more than one item for each kBytesPerTeam bytes of a row.
  static constexpr int kTeamItems = 5, kTeamsPerItems = 7;
  static constexpr int64_t kBytesPerTeam = 2048;
  // The smallest number of teams of a block, for rows of at most kSmallRowBytes and for larger
  // rows.
  static constexpr int64_t kSmallRowBytes = 16 << 10;
  static constexpr int kLeastTeamsSmallRows = 4, kLeastTeamsLargeRows = 2;
  // All blocks send first if a block has at most this number of send items; otherwise only a share
  // of the blocks sends.
  static constexpr int64_t kFewItems = 1;         // dispatch
  static constexpr int64_t kFewItemsCombine = 8;  // "Senders"
  // "Senders": sending one row takes as long as writing this number of rows.
  static constexpr double kRowsPerSent = 3;
  // The same for a launch of kFewSms blocks or more, if a rank's tokens have at most
  // kManySendersBytes.
  static constexpr double kRowsPerSentOfMany = 8;
  static constexpr int64_t kManySendersBytes = 32 << 20;
  // "Token formats": encoding one token for all its ranks takes as long as writing this number of
  // rows.
  static constexpr double kRowsPerEncodedFp8 = 8, kRowsPerEncodedFp4 = 20;
  static constexpr double kCombineSenders = 2. / 3;         // "Senders"
  static constexpr double kEncodedCombineSenders = 1. / 2;  // "Token formats"
  // "Senders": with two ranks, half of the blocks send if rows are larger than
  // kSmallCombineRowBytes and a block has more than kFewItemsOfTwo send items.
  static constexpr int64_t kSmallCombineRowBytes = 4096, kFewItemsOfTwo = 4;
  // "Senders": routed dispatch. A quarter of a block's warps sends a token.
  static constexpr double kRoutedSenders = 0.25;
  static constexpr int kRoutedLeastSenders = 4;
  static constexpr int kRoutedTeams = 4;
  // "Few tokens in one launch": arithmetic limits the encoding, so the whole block encodes a token.
  static constexpr int kRoutedEncodedTeams = 1;
  // "Senders": work items per block that zero rows (approximate).
  static constexpr int kZeroItemsPerBlock = 4;

  // ---- Inside a kernel.

  // "Copies and sums": the stages through which a warp copies (device/stream.cuh).
  static constexpr int kStages = 3;
  static constexpr int kLoadsAhead = 2;
  static constexpr int kSegmentBytes = 3584;
  // "Token formats": the most bytes of values in an encoded segment, and the most bytes of any
  // segment that a warp makes (device/encode.cuh).
  static constexpr int kEncodedValueBytes = 3584;
  static constexpr int kMadeBytes = 4096;
  // Loads that a thread keeps in flight.
  static constexpr int kLoadsOfVectors = 8, kLoadsOfWords = 4;  // device/copy.cuh
  static constexpr int kLoadsOfEncoded = 4;                     // rows in a format
  static constexpr int kLoadsOfPacks = 2;                       // the general sum
  // "Copies and sums": 16-byte words that a thread sums at a time, if rows are summed through a
  // list.
  static constexpr int kPartWords = 2;
  static constexpr int kPlanLoads = 4;  // "Copies and sums"
  // "Copies and sums": polls of a warp without a pause, and the pause between later polls.
  static constexpr int kPollsWithoutPause = 16;
  static constexpr int kPauseNs = 20;
  // Combine sums a row with several weights through the list if a weight covers at least this
  // number of bytes. (docs/history/speed.md does not mention this number.)
  static constexpr int64_t kLeastListedBytes = 1024;

  // ---- The grouped GEMM ("Grouped products").

  struct GemmTile {
    int m, n, blocks, stages;
  };
  static constexpr GemmTile kForward = {128, 256, 2, 4};
  // The rows of a tile of kForwardFew lie along n, and a tile has at most n of them.
  static constexpr GemmTile kForwardFew = {256, 144, 2, 4};
  static constexpr GemmTile kTransposed = {128, 256, 2, 4};
  static constexpr GemmTile kWeightGradient = {128, 256, 2, 4};
  static constexpr int kGemmBand = 8;
  // "Few tiles": products of few rows take up to this number of tiles of a block, on average, in
  // turn.
  static constexpr int kGemmTilesInTurn = 8;
  // Python chooses kForwardFew if the capacity has at most this number of rows per group. With 96
  // and 256 rows per group, kForwardFew takes 0.77 and 0.99 times as long as kForward (H200,
  // "Between few and many rows").
  static constexpr int kGemmFewRows = 128;
  // The same limit for Fp8Product::kForwardFew, which takes 149 and 187 us for 32 groups of 64 and
  // 128 rows. With tiles of 128 rows by 256 columns, the product takes 150 and 160 us ("FP8").
  static constexpr int kFp8FewRows = 64;
};

// The numbers that were measured for the architecture. With a struct Sm100 for 10.0 and newer:
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

// The numbers that Python reads, with their names in Python (native.tuning).
struct NamedNumber {
  const char* name;
  int value;
};
constexpr NamedNumber kLoweringTuning[] = {
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
    {"GEMM_FEW_ROWS", Tuning::kGemmFewRows},
    {"FP8_FEW_ROWS", Tuning::kFp8FewRows},
};

}  // namespace moe_a2a
