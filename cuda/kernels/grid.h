// How many blocks a launch has, and how many of them begin as senders; one block alone does both.
#ifndef MOE_A2A_KERNELS_GRID_H_
#define MOE_A2A_KERNELS_GRID_H_

#include <algorithm>

#include "params.h"

namespace moe_a2a {

struct Grid {
  int blocks, send_blocks;
};

// For pieces of work that a block's `teams` take one at a time.
inline Grid make_grid(int64_t num_sms, int64_t send_items, int64_t receive_items, int teams) {
  const int64_t send_useful = ceil_div(send_items, teams);
  const int64_t useful = send_useful + ceil_div(receive_items, teams);
  const int64_t blocks = std::max<int64_t>(1, std::min(num_sms, useful));
  const int64_t send_blocks = std::max<int64_t>(1, std::min(blocks / 2, send_useful));
  return {static_cast<int>(blocks), static_cast<int>(send_blocks)};
}

inline int64_t num_chunks(const RoutingView& routing) {
  return ceil_div(routing.num_tokens, slots_per_chunk(routing.num_tokens));
}

inline Grid grid_of(const RouteParams& p, int64_t num_sms) {
  const int64_t chunks = int64_t{p.batch} * p.chunks;
  return make_grid(num_sms, chunks, chunks * p.view.num_ranks, 1);
}

inline Grid grid_of(const DispatchParams& p, int64_t num_sms) {
  const int64_t chunks = num_chunks(p.routing);
  return make_grid(num_sms, chunks * (p.view.num_ranks - 1),
                   chunks * p.view.num_ranks + p.routing.capacity / kWarpThreads, teams_of(p));
}

// Every team finds its own share of tokens and rows; those to zero are the many.
inline Grid grid_of(const RoutedDispatchParams& p, int64_t num_sms) {
  constexpr int64_t kRowsToZero = 8;  // for a team
  const RoutingView& routing = p.exchange.routing;
  const int64_t receive_items =
      int64_t{p.exchange.view.num_ranks} * routing.num_tokens + routing.capacity / kRowsToZero;
  return make_grid(num_sms, 1 + routing.num_tokens, receive_items,
                   teams_per_block(routing.num_tokens));
}

inline Grid grid_of(const CombineParams& p, int64_t num_sms) {
  return make_grid(num_sms, num_chunks(p.routing) * (p.view.num_ranks - 1), p.routing.num_tokens,
                   teams_per_block(p.routing.num_tokens));
}

}  // namespace moe_a2a

#endif  // MOE_A2A_KERNELS_GRID_H_
