// format_dispatch: a dispatch that encodes tokens in a format, and can decode them on arrival.
//
// Holds afterwards: as in dispatch.cu, except that a leaf's outputs are the token's values and
// scales (docs/formats.md), its decoded numbers, or both.
//
// Layout: as in dispatch.cu. Values and scales of a leaf are two arrays of the zone.
//
// Senders: a work item is a token. A team encodes it once in shared memory, and stores it in a zone
// of every rank that needs it, including this rank. If slots share a flag, a work item is a chunk
// of slots at one rank, and a token is encoded once per rank.
//
// Waits: as in dispatch.cu, with two differences. Receivers do not wait for slots without a row on
// this rank, because the flag of a slot without a token may stay unset. Receivers also wait for
// senders of this rank, which wait only for credits and start before any block that only receives.
//
// Why bulk stores: a warp encodes a segment while bulk copies store the previous one.
//
// dispatch.cu is separate, because a common template made a dispatch of 8 and 128 tokens in a
// format 4 to 8 % slower (benchmarks/results/2026-11-26-1xH200-one-dispatch-source.txt).
#include "device/encode.cuh"
#include "device/exchange.cuh"
#include "device/expand.cuh"
#include "kernels/launch.h"
#include "kernels/table.h"

namespace moe_a2a {
namespace {

// For each lane whose `destination` is not negative, sends a token to the lane's `slot` there.
template <TokenFormat F, typename T>
__device__ void send_token(const FormatDispatchParams& p, const Team& team, Stream& stream,
                           BulkSegments& segments, uint64_t epoch, int token, int destination,
                           int slot) {
  const DispatchParams& exchange = p.exchange;
  const RankView& view = exchange.view;
  if (destination >= view.num_ranks ||
      (destination >= 0 && (slot < 0 || slot >= exchange.routing.num_tokens))) {
    fail(view, ErrorKind::kBounds, Phase::kSend, destination, epoch, exchange.routing.num_tokens,
         slot);
    destination = -1;
  }
  StreamShared& list = *stream.shared;  // its `destinations_end` has the slots
  const uint32_t all = __ballot_sync(kAllLanes, destination >= 0);
  if (destination >= 0) {
    const int place = __popc(all & ((1u << lane_index()) - 1));
    list.destinations[place] = zone(view, destination, epoch, view.rank, exchange.zone_bytes);
    list.destinations_end[place] = slot;
  }
  __syncwarp();
  const int count = __popc(all);
  if (count == 0) return;
  encode_leaves<F, T>(exchange, p.encoding, team, {list.destinations, list.destinations_end, count},
                      segments, token);
  for (int a = 2 * p.encoding.num_leaves; a < exchange.num_arrays; ++a) {
    const MovedArray& array = exchange.arrays[a];
    for (int i = 0; i < count; ++i) {
      const int64_t at = list.destinations_end[i] * row_stride(array.row_bytes);
      copy_row(team, list.destinations[i] + array.zone_offset + at,
               array.in + token * array.row_bytes, array.row_bytes, array.width);
    }
  }
  __syncwarp();  // All lanes have read the list.
}

// Sends a token to all ranks of its choices, and raises the flags of its slots there.
template <TokenFormat F, typename T>
__device__ void send_everywhere(const FormatDispatchParams& p, const Team& team, Stream& stream,
                                BulkSegments& segments, uint64_t epoch, int token) {
  const RankView& view = p.exchange.view;
  const RoutingView& routing = p.exchange.routing;
  int destination = -1;
  if (lane_index() < routing.top_k) {
    destination = routing.choice_rank[int64_t{token} * routing.top_k + lane_index()];
  }
  // If several choices are on one rank, only the lane of the first choice sends.
  const uint32_t same = __match_any_sync(kAllLanes, destination);
  if (lane_index() != __ffs(same) - 1) destination = -1;
  const bool is_sent = destination >= 0 && destination < view.num_ranks;
  const int slot = is_sent ? routing.token_slot[int64_t{token} * view.num_ranks + destination] : 0;
  const auto raise_flags = [&] {
    team.sync();
    if (team.is_first_warp() && is_sent && slot >= 0 && slot < routing.num_tokens) {
      store_chunk_flag(view, epoch, destination, slot);
    }
  };
  if (breaks(view, kFlagBeforeRows)) raise_flags();
  fence_global_for_bulk();  // This thread has acquired the credits of the zones.
  send_token<F, T>(p, team, stream, segments, epoch, token, destination, slot);
  wait_until_stored();
  raise_flags();
}

template <TokenFormat F, typename T>
__device__ void send_chunk(const FormatDispatchParams& p, const Team& team, Stream& stream,
                           BulkSegments& segments, uint64_t epoch, int destination, int chunk) {
  const RankView& view = p.exchange.view;
  const RoutingView& routing = p.exchange.routing;
  const int64_t per_chunk = slots_per_chunk(routing.num_tokens);
  const int end = min((chunk + 1) * per_chunk, int64_t{routing.num_tokens});
  if (breaks(view, kFlagBeforeRows)) raise_chunk(view, team, epoch, destination, chunk);
  fence_global_for_bulk();  // This thread has acquired the credit of the zone.
  for (int slot = chunk * per_chunk; slot < end; ++slot) {
    const int token = routing.slot_token[int64_t{destination} * routing.num_tokens + slot];
    if (token < 0) continue;  // later slots may have tokens if routings were batched
    if (token >= routing.num_tokens) {
      fail(view, ErrorKind::kBounds, Phase::kSend, destination, epoch, routing.num_tokens, token);
      break;
    }
    send_token<F, T>(p, team, stream, segments, epoch, token, lane_index() == 0 ? destination : -1,
                     slot);
  }
  wait_until_stored();
  raise_chunk(view, team, epoch, destination, chunk);
}

// Decodes landed rows of one leaf. Lanes have `row` and `slot` in the order of expand_rows().
template <TokenFormat F, typename T>
__device__ void decode_rows(const FormatDispatchParams& p, int leaf, const Team& team,
                            Stream& stream, BulkSegments& segments, int row, int slot,
                            const char* from_zone) {
  const int top_k = p.exchange.routing.top_k;
  for (uint32_t left = __ballot_sync(kAllLanes, row >= 0); left != 0;) {
    const int first = __ffs(left) - 1;
    const uint32_t of_slot = left & (kAllLanes >> (kWarpThreads - top_k)) << first / top_k * top_k;
    left &= ~of_slot;
    decode_leaf<F, T>(p.exchange, p.encoding, leaf, team, stream.shared->destinations, segments,
                      row, of_slot, from_zone, __shfl_sync(kAllLanes, slot, first));
  }
}

template <TokenFormat F, typename T>
__device__ void expand_chunk(const FormatDispatchParams& p, const Team& team, Stream& stream,
                             BulkSegments& segments, uint64_t epoch, int source, int chunk) {
  const DispatchParams& exchange = p.exchange;
  const RankView& view = exchange.view;
  const RoutingView& routing = exchange.routing;
  const int top_k = routing.top_k;
  const int64_t per_chunk = slots_per_chunk(routing.num_tokens);
  const int end = min((chunk + 1) * per_chunk, int64_t{routing.num_tokens});
  const char* from_zone = zone(view, view.rank, epoch, source, exchange.zone_bytes);
  bool landed = false;
  for (int first = chunk * per_chunk; first < end; first += slots_per_look(top_k)) {
    const int slot = first + lane_index() / top_k;
    int row = -1;
    if (slot < min(end, first + slots_per_look(top_k))) {
      row = routing.slot_rows[(int64_t{source} * routing.num_tokens + slot) * top_k +
                              lane_index() % top_k];
    }
    if (row >= routing.capacity) {
      fail(view, ErrorKind::kBounds, Phase::kReceiveChunk, source, epoch, routing.capacity, row);
      row = -1;
    }
    if (__ballot_sync(kAllLanes, row >= 0) == 0) continue;
    if (!landed) {
      if (!wait_for_chunk(view, team, epoch, source, chunk)) return;
      fence_global_for_bulk();  // This thread has acquired the chunk's flag.
      landed = true;
    }
    int a = 0;
    if (p.encoding.decode) {
      for (int leaf = 0; leaf < p.encoding.num_leaves; ++leaf) {
        decode_rows<F, T>(p, leaf, team, stream, segments, row, slot, from_zone);
      }
      a = 2 * p.encoding.num_leaves;
    }
    for (; a < exchange.num_arrays; ++a) {
      const MovedArray& array = exchange.arrays[a];
      if (array.out == nullptr) continue;
      const char* from = from_zone + array.zone_offset + slot * row_stride(array.row_bytes);
      expand_rows(array, team, stream, top_k, row, from);
    }
  }
}

template <TokenFormat F, typename T>
__device__ void zero_rows(const FormatDispatchParams& p, const Team& team, const char* zeros,
                          int first, int count) {
  const DispatchParams& exchange = p.exchange;
  const int64_t my_row = first + lane_index();
  const bool is_empty =
      lane_index() < count && my_row < exchange.routing.capacity && is_zeroed(exchange, my_row);
  const uint32_t empty = __ballot_sync(kAllLanes, is_empty);
  for (int a = 0; a < exchange.num_arrays; ++a) {
    const MovedArray& array = exchange.arrays[a];
    if (array.out == nullptr) continue;
    zero_rows_of(array, team, zeros, first, is_empty, empty);
  }
  if (!p.encoding.decode) return;
  for (int leaf = 0; leaf < p.encoding.num_leaves; ++leaf) {
    zero_rows_of(decoded_rows(exchange, p.encoding, leaf), team, zeros, first, is_empty, empty);
  }
}

template <TokenFormat F, typename T>
__device__ void receive(const FormatDispatchParams& p, const Team& team, Stream& stream,
                        const char* zeros, uint64_t epoch) {
  const RankView& view = p.exchange.view;
  const int num_ranks = view.num_ranks;
  const int zero_count = rows_per_zero_item(p.exchange.routing.capacity, num_blocks());
  const int zero_items = ceil_div(p.exchange.routing.capacity, zero_count);
  const int num_chunks = num_chunks_of(p.exchange.routing.num_tokens);
  BulkSegments segments(stream.shared);
  delay_for_test(view, Phase::kReceiveChunk);
  while (true) {
    const int item = take_item(control(view).next_receive, team);
    if (item >= zero_items + num_chunks * num_ranks) return;
    if (item < zero_items) {
      zero_rows<F, T>(p, team, zeros, item * zero_count, zero_count);
      continue;
    }
    const int chunk_item = item - zero_items;
    const int source = (view.rank + num_ranks - 1 - chunk_item % num_ranks) % num_ranks;
    expand_chunk<F, T>(p, team, stream, segments, epoch, source, chunk_item / num_ranks);
  }
}

template <TokenFormat F, typename T>
__device__ void send(const FormatDispatchParams& p, const Team& team, Stream& stream,
                     const BlockState& block, uint32_t asked) {
  const RankView& view = p.exchange.view;
  if (!begin_sending(view, block, p.exchange.roles, team, asked)) return;
  const uint64_t epoch = block.epoch;
  const int num_ranks = view.num_ranks;
  const int num_items = num_format_items(p.exchange.routing.num_tokens, num_ranks);
  const bool by_token = slots_per_chunk(p.exchange.routing.num_tokens) == 1;
  BulkSegments segments(stream.shared);
  send_items(view, team, epoch, num_items, asked, [&](int item) {
    if (by_token) {
      send_everywhere<F, T>(p, team, stream, segments, epoch, item);
    } else {
      const int destination = (view.rank + 1 + item % num_ranks) % num_ranks;
      send_chunk<F, T>(p, team, stream, segments, epoch, destination, item / num_ranks);
    }
  });
}

template <TokenFormat F, typename T>
__global__ void __launch_bounds__(kThreads, 1)
    format_dispatch_kernel(const __grid_constant__ Launched<FormatDispatchParams> launched) {
  MOE_A2A_OWN_PARAMS(FormatDispatchParams, p, launched);
  MOE_A2A_DYNAMIC_SHARED(128, char, dynamic_shared);
  __shared__ __align__(128) char zeros[kSegmentBytes];
  __shared__ BlockState block;
  const DispatchParams& exchange = p.exchange;
  Stream stream(dynamic_shared);
  for (int i = threadIdx.x; i < kSegmentBytes; i += kThreads) zeros[i] = 0;
  fence_shared_for_bulk();
  const Team senders(exchange.roles.send_teams, block.mailboxes);
  const uint32_t asked = ask_before_entering(exchange.view, exchange.roles, senders);
  // enter() has a barrier, after which all threads see the initialized mbarriers and zeros.
  if (enter(exchange.view, block)) {
    send<F, T>(p, senders, stream, block, asked);
    change_teams(exchange.roles);
    const Team receivers(exchange.roles.receive_teams, block.mailboxes);
    receive<F, T>(p, receivers, stream, zeros, block.epoch);
  }
  wait_until_stored();  // The block leaves after its bulk stores are complete.
  leave(exchange.view, block, exchange.fills, p.num_results);
}

struct FormatDispatchKernels {
  using Key = std::tuple<TokenFormat, ElementType>;
  using Kernel = void (*)(Launched<FormatDispatchParams>);

  template <typename Add>
  static void list(Add&& add) {
    for_each(TokenFormats{}, [&](auto format) {
      for_each(Elements{}, [&](auto element) {
        using T = typename decltype(element)::type;
        add({format, Element<T>::kType}, format_dispatch_kernel<format, T>, kStreamSharedBytes);
      });
    });
  }
};

}  // namespace

cudaError_t MOE_A2A_FORM::LaunchFormatDispatch(const FormatDispatchParams* ranks, int num_blocks,
                                               cudaStream_t stream) {
  const Encoding& encoding = ranks->encoding;
  return LaunchListed<FormatDispatchKernels>({encoding.format, encoding.type}, ranks, num_blocks,
                                             kStreamSharedBytes, stream);
}

cudaError_t MOE_A2A_FORM::LoadFormatDispatch() { return LoadListed<FormatDispatchKernels>(); }

}  // namespace moe_a2a
