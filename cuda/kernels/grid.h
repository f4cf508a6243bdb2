// Chooses how many blocks a launch has, and how these blocks share its work.
#pragma once

#include <algorithm>
#include <cmath>

#include "params.h"

namespace moe_a2a {

struct Grid {
  int blocks;
  Roles roles;
};

// Returns the number of blocks that each of `num_ranks` ranks on one device may have, or 0 if the
// ranks do not fit. Ranks wait for each other, so all blocks of a whole exchange and of a split
// exchange must be resident together, one on each multiprocessor.
constexpr int64_t colocated_blocks(int64_t num_ranks, int64_t num_sms, bool is_split) {
  const int64_t share = num_sms / num_ranks;
  const int64_t of_split = share < 2 ? 0 : std::max<int64_t>(1, share / 5);
  return is_split ? of_split : share - of_split;
}

// Returns the number of blocks that a launch may have on a device with one rank. If there are
// peers, one multiprocessor stays free. Without it, a whole exchange could fill one device and a
// split exchange another, and both would wait forever (docs/protocol_split.md).
constexpr int64_t launch_blocks(int64_t num_ranks, int64_t num_sms) {
  return num_ranks == 1 ? num_sms : num_sms - 1;
}

// Returns the number of teams of a block for `items` rows. Few or large rows get few teams of many
// warps, so that the last rows take less time. With enough rows, there are at least `least` teams.
inline int teams_for(int64_t items, int64_t blocks, int64_t row_bytes, int least) {
  int teams = 1;
  while (teams < kMaxTeams &&
         Tuning::kTeamsPerItems * teams * blocks < Tuning::kTeamItems * items &&
         (teams < least || teams * blocks * row_bytes < items * Tuning::kBytesPerTeam)) {
    teams *= 2;
  }
  return teams;
}

// With at most `few` send items per block, all blocks are senders; otherwise this `share` of them.
struct Senders {
  int64_t few;
  double share;
};

inline int64_t blocks_for(int64_t num_sms, int64_t items) {
  return std::max<int64_t>(1, std::min(num_sms, items));
}

inline Grid make_grid(int64_t num_sms, int64_t send_items, int64_t receive_items, int64_t row_bytes,
                      const Senders& senders) {
  const int64_t blocks = blocks_for(num_sms, send_items + receive_items);
  const int64_t send_blocks = send_items <= senders.few * blocks
                                  ? blocks
                                  : std::max<int64_t>(1, std::llround(blocks * senders.share));
  const int least = row_bytes <= Tuning::kSmallRowBytes ? Tuning::kLeastTeamsSmallRows
                                                        : Tuning::kLeastTeamsLargeRows;
  return {static_cast<int>(blocks),
          {static_cast<int>(send_blocks), teams_for(send_items, send_blocks, row_bytes, least),
           teams_for(receive_items, blocks, row_bytes, least)}};
}

inline int64_t num_zero_items(const RoutingView& routing, int64_t blocks) {
  return ceil_div(routing.capacity, rows_per_zero_item(routing.capacity, blocks));
}

inline int64_t largest_row(const DispatchParams& p) {
  int64_t bytes = 1;
  for (int a = 0; a < p.num_arrays; ++a) bytes = std::max(bytes, p.arrays[a].row_bytes);
  return bytes;
}

inline int64_t largest_row(const CombineParams& p) {
  int64_t elements = 1;
  for (int a = 0; a < p.num_summed; ++a) elements = std::max(elements, p.summed[a].elements);
  return elements * element_bytes(p.type);
}

inline Grid grid_of(const RouteParams& p, int64_t num_sms) {
  // All blocks are senders, and each block is a single team.
  const int64_t chunks = int64_t{p.batch} * p.chunks;
  const int blocks = static_cast<int>(blocks_for(num_sms, chunks * (1 + p.view.num_ranks)));
  return {blocks, {blocks, 1, 1}};
}

// Estimates the rows that a rank writes: all, or with `leaves_tail` the rows of a balanced load.
inline double num_written_rows(const DispatchParams& p) {
  const int64_t balanced = int64_t{p.routing.num_tokens} * p.routing.top_k;
  return static_cast<double>(p.leaves_tail ? std::min<int64_t>(p.routing.capacity, balanced)
                                           : p.routing.capacity);
}

inline Grid grid_of(const DispatchParams& p, int64_t num_sms) {
  // While rows travel, the blocks that do not send write zeros and the rows of this rank's tokens.
  const int64_t chunks = num_chunks_of(p.routing.num_tokens);
  const int64_t peers = p.view.num_ranks - 1;
  const double tokens = p.routing.num_tokens, written = num_written_rows(p);
  Grid grid = make_grid(
      num_sms, chunks * peers, chunks * p.view.num_ranks + num_zero_items(p.routing, num_sms),
      largest_row(p),
      {Tuning::kFewItems, tokens * peers / (tokens * peers + written / Tuning::kRowsPerSent)});
  const bool is_small = p.routing.num_tokens * largest_row(p) <= Tuning::kManySendersBytes;
  if (!p.weighting.is_used() && is_small && num_sms >= Tuning::kFewSms) {
    // With many blocks, memory limits the blocks that write, so more blocks can send.
    const double share = std::min(0.5, tokens / (tokens + written / Tuning::kRowsPerSentOfMany));
    const auto least = static_cast<int32_t>(std::llround(grid.blocks * share));
    grid.roles.send_blocks = std::max(grid.roles.send_blocks, least);
  }
  return grid;
}

inline Grid grid_of(const FormatDispatchParams& p, int64_t num_sms) {
  const RoutingView& routing = p.exchange.routing;
  const int64_t num_ranks = p.exchange.view.num_ranks;
  const double encoded = routing.num_tokens;
  return make_grid(
      num_sms, num_format_items(routing.num_tokens, num_ranks),
      num_chunks_of(routing.num_tokens) * num_ranks + num_zero_items(routing, num_sms),
      largest_row(p.exchange),
      {Tuning::kFewItems,
       encoded / (encoded + num_written_rows(p.exchange) / rows_per_encoded(p.encoding.format))});
}

inline Grid grid_of(const RoutedDispatchParams& p, int64_t num_sms) {
  // A few senders fill the links. More would be slower, because a sender plans only after it sends.
  // Arithmetic limits the encoding, so with enough blocks, a whole block encodes each token.
  const int32_t least_teams =
      p.encoding.format == kNoFormat ? Tuning::kRoutedTeams : Tuning::kRoutedEncodedTeams;
  const RoutingView& routing = p.exchange.routing;
  Grid grid = make_grid(
      num_sms, routing.num_tokens,
      int64_t{p.exchange.view.num_ranks} * routing.num_tokens + num_zero_items(routing, num_sms),
      largest_row(p.exchange), {0, Tuning::kRoutedSenders});
  const int64_t enough =
      std::max<int64_t>(Tuning::kRoutedLeastSenders, ceil_div(routing.num_tokens, least_teams));
  Roles& roles = grid.roles;
  roles.send_blocks = static_cast<int32_t>(std::min<int64_t>(roles.send_blocks, enough));
  roles.send_teams = least_teams;
  while (roles.send_teams < kMaxTeams &&
         roles.send_teams * roles.send_blocks < routing.num_tokens) {
    roles.send_teams *= 2;
  }
  roles.receive_teams = std::max<int32_t>(Tuning::kRoutedTeams, roles.receive_teams);
  return grid;
}

inline Grid grid_of(const CombineParams& p, int64_t num_sms) {
  // Many blocks send, because most of the work is to compute partial sums. Encoded partial sums use
  // the links for half the time, but need more work at the source rank.
  const bool is_encoded = p.wire_format != kNoFormat;
  const int64_t num_tokens = p.routing.num_tokens, row_bytes = largest_row(p);
  const int64_t items = num_chunks_of(num_tokens) * (p.view.num_ranks - 1);
  Grid grid = make_grid(num_sms, items, num_tokens, row_bytes,
                        {Tuning::kFewItemsCombine,
                         is_encoded ? Tuning::kEncodedCombineSenders : Tuning::kCombineSenders});
  if (p.view.num_ranks == 2 && !is_encoded && row_bytes > Tuning::kSmallCombineRowBytes &&
      items > Tuning::kFewItemsOfTwo * grid.blocks) {
    // Half of the partial sums stay on their rank, so only half of the blocks send.
    grid.roles.send_blocks = (grid.blocks + 1) / 2;
  }
  // All partial sums of a token land at about the same time, so many warps sum each token.
  grid.roles.receive_teams = teams_for(num_tokens, grid.blocks, row_bytes, 1);
  return grid;
}

}  // namespace moe_a2a
