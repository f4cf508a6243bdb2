// Every number that was found by measurement. Within the static_asserts next to their uses they change times and no results,
// except the rounding of inner products of a weighted dispatch, which the warps of a team sum in parts.
//
// For another architecture add a struct that derives from the one it is closest to and redefines what differs, and choose
// it as `Tuning` below. A build has the numbers of one architecture, because host and device must agree on them.
//
// Names in quotation marks are headings or list entries in docs/history/speed.md, which has the figures.
#ifndef MOE_A2A_TUNING_H_
#define MOE_A2A_TUNING_H_

#include <cstdint>

namespace moe_a2a {

// Compute capability 9.0. Measured on H200 and H100 SXM, which have 132 multiprocessors.
struct Sm90 {
  // The shared memory that a block may have; not measured, but other numbers follow from it.
  static constexpr int kMaxSharedBytes = 227 << 10;

  // ---- Blocks of a launch. Python lowers programs with these (kLoweringTuning); handlers reduce them to what a GPU has.

  static constexpr int kDefaultSms = 64;  // "Versions 8 to 10": at 4096 tokens more are no faster
  // "Versions 8 to 10", "Version 11": with few tokens more are faster, and soon free again.
  static constexpr int kFewTokens = 512;
  static constexpr int kFewTokensSms = 128;
  static constexpr int kWeightedSms = 128;  // "Version 11": a weighted dispatch
  static constexpr int kFormatSms = 128;    // "Token formats", "Partial sums of combine"
  static constexpr int kAloneSms = 132;     // all: a single rank waits for no other rank
  static constexpr int kSplitSms = 24;      // "During matrix products": a split exchange

  // ---- How route shares its work. (No figures are in the notes.)

  static constexpr int kRouteTokensPerChunk = 64, kRouteManyTokensPerChunk = 256;
  static constexpr int kRouteFewTokens = 2048;  // up to which chunks have the former

  // ---- How the blocks of a launch divide (kernels/grid.h).

  // "Version 11", "Teams": the factors of teams and of work items in teams_for(), and the bytes of a row for each team.
  static constexpr int kTeamItems = 5, kTeamsPerItems = 7;
  static constexpr int64_t kBytesPerTeam = 2048;
  // The least numbers of teams, for rows up to so many bytes and for larger ones.
  static constexpr int64_t kSmallRowBytes = 16 << 10;
  static constexpr int kLeastTeamsSmallRows = 4, kLeastTeamsLargeRows = 2;
  // All blocks send first if a block has at most so many items to send; otherwise a share of the blocks.
  static constexpr int64_t kFewItems = 1;          // dispatch and route
  static constexpr int64_t kFewItemsCombine = 8;   // "Version 11"
  static constexpr double kRouteSenders = 1. / 2;  // "Versions 8 to 10"
  // "Version 12", "Senders in dispatch": sending a row takes as long as writing so many.
  static constexpr double kRowsPerSent = 3;
  // "Token formats": encoding a token for all of its ranks takes as long as writing so many rows.
  static constexpr double kRowsPerEncodedFp8 = 8, kRowsPerEncodedFp4 = 20;
  static constexpr double kCombineSenders = 2. / 3;         // "Version 11"
  static constexpr double kEncodedCombineSenders = 1. / 2;  // "Partial sums of combine"
  // "Version 12", "Version 13": routed dispatch. A token has a team of a quarter of a block's warps.
  static constexpr double kRoutedSenders = 0.25;
  static constexpr int kRoutedLeastSenders = 4;
  static constexpr int kRoutedTeams = 4;
  // "Few tokens in one launch": encoding is arithmetic, so a token has the whole block.
  static constexpr int kRoutedEncodedTeams = 1;
  // "Version 11": each block zeroes rows in about so many work items.
  static constexpr int kZeroItemsPerBlock = 4;

  // ---- Inside a kernel.

  // "Version 12", "A bulk copy has a price of its own": rings of stages of a warp (device/stream.cuh).
  static constexpr int kStages = 3;
  static constexpr int kLoadsAhead = 2;
  static constexpr int kSegmentBytes = 3584;
  // "Token formats": segments that a warp encodes, of values, and decodes (device/encode.cuh).
  static constexpr int kEncodedValueBytes = 3584;
  static constexpr int kMadeBytes = 4096;
  // Loads of a thread that are under way at a time.
  static constexpr int kLoadsOfVectors = 8, kLoadsOfWords = 4;  // device/copy.cuh
  static constexpr int kLoadsOfEncoded = 4;                     // rows in a format
  static constexpr int kLoadsOfPacks = 2;                       // the general sum
  // "Versions 8 to 10": 16-byte words of a row that is summed through a list.
  static constexpr int kPartWords = 2;
  static constexpr int kPlanLoads = 4;  // "Version 13", "Planning"
  // "What was learned": a warp polls so often before it pauses between polls.
  static constexpr int kPollsWithoutPause = 16;
  static constexpr int kPauseNs = 20;
  // Bytes for each weight from which combine sums a row with several weights through the list, part by part. (No figures
  // are in the notes.)
  static constexpr int64_t kLeastListedBytes = 1024;

  // ---- The grouped GEMM ("Grouped products").

  struct GemmTile {
    int m, n, blocks, stages;
  };
  static constexpr GemmTile kForward = {128, 256, 2, 4};
  static constexpr GemmTile kForwardFew = {256, 32, 1, 5};
  static constexpr GemmTile kTransposed = {128, 256, 2, 4};
  static constexpr GemmTile kWeightGradient = {128, 256, 2, 4};
  static constexpr int kGemmBand = 8;
  // Python chooses the product for few rows up to so many rows in a group, on average. H100: 32 groups of 32 rows take
  // 271 us in place of 283 us, 64 rows take 331 us in place of 287 us.
  static constexpr int kGemmFewRows = 32;
};

// The numbers of this build.
using Tuning = Sm90;

// The numbers that Python reads, by their names there (native.tuning).
struct NamedNumber {
  const char* name;
  int value;
};
constexpr NamedNumber kLoweringTuning[] = {
    {"DEFAULT_NUM_SMS", Tuning::kDefaultSms},
    {"FEW_TOKENS", Tuning::kFewTokens},
    {"FEW_TOKENS_NUM_SMS", Tuning::kFewTokensSms},
    {"WEIGHTED_NUM_SMS", Tuning::kWeightedSms},
    {"FORMAT_NUM_SMS", Tuning::kFormatSms},
    {"ALONE_NUM_SMS", Tuning::kAloneSms},
    {"SPLIT_NUM_SMS", Tuning::kSplitSms},
    {"ROUTE_TOKENS_PER_CHUNK", Tuning::kRouteTokensPerChunk},
    {"ROUTE_MANY_TOKENS_PER_CHUNK", Tuning::kRouteManyTokensPerChunk},
    {"ROUTE_FEW_TOKENS", Tuning::kRouteFewTokens},
    {"GEMM_FEW_ROWS", Tuning::kGemmFewRows},
};

}  // namespace moe_a2a

#endif  // MOE_A2A_TUNING_H_
