// The frame of every exchange kernel: taking the epoch, the role of a block, and the way out.
//
// Blocks take their role in the order in which they start to run: the teams of the first `send_blocks`
// take pieces to send until none is left, and then receive like the others. A sender waits only for
// credits, which launches issued earlier give, so what has been taken gets sent; and a block receives
// only when others that have started, or it itself, have taken or will take every piece to send. So one
// resident block is enough for a launch to end: see docs/protocol.md.
#ifndef MOE_A2A_DEVICE_EXCHANGE_CUH_
#define MOE_A2A_DEVICE_EXCHANGE_CUH_

#include "device/ranks.cuh"
#include "device/signal.cuh"
#include "device/team.cuh"
#include "device/timeline.cuh"

namespace moe_a2a {

// What the threads of a block share.
struct BlockState {
  uint64_t epoch;
  uint32_t admission;  // 0, 1, 2, ... in the order in which blocks started
  int32_t is_alone;    // no other launch of this rank is under way
  int32_t ok;          // and the domain had not failed when the block started
  int32_t stopped;     // the domain had failed when the block had done its work
  uint32_t mailboxes[kMaxTeams];
};

__device__ inline Control& control(const RankView& view) {
  return header(view, view.rank)->control;
}

// Where the rows of `source` land at `at_rank`, by the address at which this rank writes or reads them.
__device__ inline char* zone(const RankView& view, int at_rank, uint64_t epoch, int source,
                             int64_t zone_bytes) {
  const int slot = ring_slot(view, epoch);
  if (is_beyond(view, at_rank)) return outgoing_zone(view, at_rank, slot, zone_bytes);
  return view.slab[at_rank] + slot_offset(slot, slot_stride(view)) + source * zone_bytes;
}

// All threads of the block call it. False: the domain has failed; go straight to leave().
__device__ inline bool enter(const RankView& view, BlockState& block) {
  mark(view, Mark::kStart);
  if (threadIdx.x == 0) {
    Control& own = control(view);
    // Nothing here waits for the access before it: one latency for all.
    const uint32_t admission = atomicInc(&own.admitted, num_blocks() - 1);
    // Stream order: the previous launch has advanced it, this one's last block will.
    const uint64_t epoch = *const_cast<volatile uint64_t*>(&own.next_epoch);
    const uint64_t poison = load_relaxed_sys(&own.poison);
    // Every block, for the other launch would do a part of this one's work.
    const uint64_t owner =
        atomicCAS(reinterpret_cast<unsigned long long*>(&own.owner), 0ull, view.launch);
    block.admission = admission;
    block.epoch = epoch;
    block.is_alone = owner == 0 || owner == view.launch;
    block.ok = poison == 0 && block.is_alone;
    if (poison == 0 && !block.is_alone) {
      fail(view, ErrorKind::kOverlap, Phase::kStart, view.rank, epoch, view.launch, owner);
    }
  }
  __syncthreads();
  mark(view, Mark::kEntered);
  return block.ok;
}

// Whether this block sends before it receives.
__device__ inline bool is_sender(const RankView& view, const BlockState& block,
                                 const Roles& roles) {
  const int admission = static_cast<int>(block.admission);
  const int blocks = static_cast<int>(num_blocks());
  return breaks(view, kReceiversFirst) ? admission >= blocks - roles.send_blocks
                                       : admission < roles.send_blocks;
}

__device__ inline bool all_send(const Roles& roles) {
  return roles.send_blocks == static_cast<int>(num_blocks());
}

// Asks for the next piece of work of those that `counter` hands out: the answer is the first thread's, for
// the team's broadcast(). All threads of the team call it.
__device__ inline uint32_t ask_for_item(uint32_t& counter, const Team& team) {
  return team.thread() == 0 ? atomicAdd(&counter, 1u) : 0;
}

__device__ inline uint32_t take_item(uint32_t& counter, const Team& team) {
  return team.broadcast(ask_for_item(counter, team));
}

// The team's first piece to send, asked for while the block enters: only where every block sends, for what
// is taken must be sent.
__device__ inline uint32_t ask_before_entering(const RankView& view, const Roles& roles,
                                               const Team& senders) {
  return all_send(roles) ? ask_for_item(control(view).next_send, senders) : 0;
}

// Stands between the last call of a sending team and the first of a receiving team.
__device__ inline void change_teams(const Roles& roles) {
  if (roles.send_teams != roles.receive_teams) __syncthreads();
}

// Waits until every peer has read what this rank wrote into the ring slot before. All threads of the
// team call it, once per launch.
__device__ inline bool wait_for_credits(const RankView& view, const Team& team, uint64_t epoch) {
  bool free = true;
  for (int peer = team.thread(); peer < view.num_ranks; peer += team.threads()) {
    if (peer == view.rank || breaks(view, kIgnoreCredit)) continue;
    free = free && wait_for_credit(view, epoch, peer);
  }
  return team.all(free);
}

// Announces this call to every peer; the zones at all of them are free to write.
__device__ inline void raise_heads(const RankView& view, const Team& team, uint64_t epoch) {
  for (int peer = team.thread(); peer < view.num_ranks; peer += team.threads()) {
    if (peer == view.rank) continue;
    Head* head = &header(view, peer)->head[ring_slot(view, epoch)][view.rank];
    if (is_beyond(view, peer)) {
      put_word(view, peer, &head->signature, view.signature);
      put_word(view, peer, &head->run, view.run);
      fence_puts();
    } else {
      store_relaxed_sys(&head->signature, view.signature);
      store_relaxed_sys(&head->run, view.run);
    }
    raise_word(view, peer, &head->flag, make_flag(epoch, view.signature));
  }
}

__device__ inline void store_chunk_flag(const RankView& view, uint64_t epoch, int destination,
                                        int chunk) {
  fence_acq_rel_sys();  // The team's rows are visible before the flag.
  uint64_t* flag = &header(view, destination)->chunk[ring_slot(view, epoch)][view.rank][chunk];
  if (is_beyond(view, destination)) {  // A test breaks a rule: rows cross with their flag.
    put_word(view, destination, flag, make_flag(epoch, view.signature));
  } else {
    store_relaxed_sys(flag, make_flag(epoch, view.signature));
  }
}

// Neighbouring slots of a zone.
struct Slots {
  int first, count;
};

// Those of a chunk from the first to the last that carries something: a batch of routings, or what crosses to
// another host, has holes. A warp calls it.
template <typename IsTaken>
__device__ inline Slots taken_slots(int num_slots, int chunk, IsTaken&& is_taken) {
  const int per_chunk = static_cast<int>(slots_per_chunk(num_slots));
  const int begin = chunk * per_chunk;
  const int end = min(begin + per_chunk, num_slots);
  int first = end, last = begin;
  for (int base = begin; base < end; base += kWarpThreads) {
    const int slot = base + lane_index();
    const uint32_t taken = __ballot_sync(kAllLanes, slot < end && is_taken(slot));
    if (taken == 0) continue;
    first = min(first, base + __ffs(taken) - 1);
    last = base + kWarpThreads - __clz(taken);
  }
  return {first, max(0, last - first)};
}

// Puts a chunk whose rows lie in the outgoing memory to a rank beyond, and raises its flag there. One warp
// calls it. `each_piece(destination, chunk, add)` calls add(offset in the zone, bytes) for all that is in the
// chunk.
template <typename EachPiece>
__device__ inline void put_chunk(const RankView& view, uint64_t epoch, int destination, int chunk,
                                 int64_t zone_bytes, EachPiece&& each_piece) {
  fence_acq_rel_sys();  // What the team has written is read by whoever carries it.
  const int slot = ring_slot(view, epoch);
  char* to = view.slab[destination] + slot_offset(slot, slot_stride(view)) + view.rank * zone_bytes;
  Puts puts(view, destination, to, zone(view, destination, epoch, view.rank, zone_bytes));
  each_piece(destination, chunk, [&](int64_t offset, int64_t bytes) { puts.add(offset, bytes); });
  puts.end(&header(view, destination)->chunk[slot][view.rank][chunk],
           make_flag(epoch, view.signature));
}

// Raises the flag of a chunk whose rows all threads of the team have written to `destination`, which shares
// memory with this rank.
__device__ inline void raise_chunk(const RankView& view, const Team& team, uint64_t epoch,
                                   int destination, int chunk) {
  team.sync();
  if (team.thread() == 0) store_chunk_flag(view, epoch, destination, chunk);
}

// The same for any rank.
template <typename EachPiece>
__device__ inline void deliver_chunk(const RankView& view, const Team& team, uint64_t epoch,
                                     int destination, int chunk, int64_t zone_bytes,
                                     EachPiece&& each_piece) {
  if (!is_beyond(view, destination)) return raise_chunk(view, team, epoch, destination, chunk);
  team.sync();
  if (team.is_first_warp()) put_chunk(view, epoch, destination, chunk, zone_bytes, each_piece);
}

// The same for a chunk that has been written to every peer.
template <typename EachPiece>
__device__ inline void deliver_chunk_everywhere(const RankView& view, const Team& team,
                                                uint64_t epoch, int chunk, int64_t zone_bytes,
                                                EachPiece&& each_piece) {
  team.sync();
  for (int peer = team.thread(); peer < view.num_ranks; peer += team.threads()) {
    if (peer != view.rank && !is_beyond(view, peer)) store_chunk_flag(view, epoch, peer, chunk);
  }
  if (!team.is_first_warp()) return;
  for (int peer = 0; peer < view.num_ranks; ++peer) {
    if (is_beyond(view, peer)) put_chunk(view, epoch, peer, chunk, zone_bytes, each_piece);
  }
}

__device__ inline const uint64_t* chunk_flag(const RankView& view, uint64_t epoch, int source,
                                             int chunk) {
  return &header(view, view.rank)->chunk[ring_slot(view, epoch)][source][chunk];
}

// Waits for a chunk of `source`. All threads of the team call it.
__device__ inline bool wait_for_chunk(const RankView& view, const Team& team, uint64_t epoch,
                                      int source, int chunk) {
  mark(view, Mark::kAwait);
  const bool landed =
      team.thread() != 0 || wait_for_flag(view, chunk_flag(view, epoch, source, chunk), epoch,
                                          Phase::kReceiveChunk, source);
  mark(view, Mark::kLanded);
  return team.broadcast(landed);
}

// Whether this team is to send: its block is a sender, and the zones at all peers are free. `asked` is the
// answer to ask_before_entering(), and becomes that to the team's first ask_for_item().
__device__ __forceinline__ bool begin_sending(const RankView& view, const BlockState& block,
                                              const Roles& roles, const Team& team,
                                              uint32_t& asked) {
  if (!is_sender(view, block, roles)) return false;
  delay_for_test(view, Phase::kSend);
  if (!all_send(roles)) asked = ask_for_item(control(view).next_send, team);
  return wait_for_credits(view, team, block.epoch);
}

// Sends pieces until none is left, to zones that are free; `send_item(item)` writes one and raises its
// flags. `asked` is the answer to the team's first ask_for_item(). The heads come when all pieces have been
// taken: receivers look at them only when something is amiss, and at the end.
template <typename SendItem>
__device__ __forceinline__ void send_items(const RankView& view, const Team& team, uint64_t epoch,
                                           int num_items, uint32_t asked, SendItem&& send_item) {
  int item = team.broadcast(asked);
  mark(view, Mark::kCredit);
  while (item < num_items) {
    send_item(item);
    mark(view, Mark::kRaised);
    item = take_item(control(view).next_send, team);
  }
  if (item == num_items) {
    raise_heads(view, team, epoch);
    mark(view, Mark::kHeads);
  }
}

// Sends the chunks of all peers, if this block is a sender; `send_chunk(destination, chunk)` writes the
// rows, and `each_piece` says where (put_chunk()). `asked` is the answer to ask_before_entering().
template <typename SendChunk, typename EachPiece>
__device__ __forceinline__ void send_chunks(const RankView& view, const BlockState& block,
                                            const Roles& roles, const Team& team, int num_chunks,
                                            int64_t zone_bytes, uint32_t asked,
                                            SendChunk&& send_chunk, EachPiece&& each_piece) {
  if (!begin_sending(view, block, roles, team, asked)) return;
  const uint64_t epoch = block.epoch;
  const int peers = view.num_ranks - 1;
  send_items(view, team, epoch, num_chunks * peers, asked, [&](int item) {
    const int destination = (view.rank + 1 + item % peers) % view.num_ranks;
    const int chunk = item / peers;
    if (breaks(view, kFlagBeforeRows)) {
      deliver_chunk(view, team, epoch, destination, chunk, zone_bytes, [](int, int, auto&&) {});
      __nanosleep(20000);  // On one GPU the rows would still come before anybody reads them.
    }
    send_chunk(destination, chunk);
    mark(view, Mark::kWritten);
    deliver_chunk(view, team, epoch, destination, chunk, zone_bytes, each_piece);
  });
}

static __device__ __noinline__ void fill_outputs(const FailureFill* fills, int num_fills) {
  for (int i = 0; i < num_fills; ++i) {
    auto* bytes = static_cast<uint8_t*>(fills[i].data);
    for (int64_t b = threadIdx.x; b < fills[i].bytes; b += blockDim.x) bytes[b] = fills[i].byte;
  }
}

// The way out of every exchange kernel, on success and on failure. All threads of the block call it.
// The last block gives the ring slot back to its sources and advances the epoch; after a failure it
// overwrites the outputs, when no other block writes them any more. A block that is not alone does not count
// among those of the other launch. Then its own launch may have no last block: hence every block that sees a
// failure overwrites the outputs.
__device__ inline void leave(const RankView& view, BlockState& block, const FailureFill* fills,
                             int num_fills, const FailureFill* more_fills = nullptr,
                             int num_more_fills = 0) {
  // No call runs ahead of a peer that makes another one, whatever it had to wait for. The last block, for
  // it has the least to do where there is little.
  if (block_index() == num_blocks() - 1 && block.ok) {
    for (int peer = threadIdx.x; peer < view.num_ranks; peer += blockDim.x) {
      if (peer != view.rank) wait_for_head(view, block.epoch, peer);
    }
  }
  __syncthreads();  // The block has read all that it will read.
  mark(view, Mark::kArrive);
  bool is_last = false;
  if (threadIdx.x == 0 && block.is_alone) {
    const uint32_t before = arrive(&control(view).arrived, num_blocks() - 1);
    is_last = before == (breaks(view, kCreditByFirstBlock) ? 0 : num_blocks() - 1);
    const uint64_t poison = is_last ? load_relaxed_sys(&control(view).poison) : 0;
    block.ok = poison == 0;
    // Its process may hold no rank that knows more.
    if (!block.ok) {
      fail(view, ErrorKind::kStopped, Phase::kStart, poisoner(poison), block.epoch, 0, poison);
    }
  } else if (threadIdx.x == blockDim.x - 1) {  // at the same time, in another warp
    block.stopped = load_relaxed_sys(&control(view).poison) != 0;
  }
  is_last = __syncthreads_or(is_last);
  const bool failed = !block.ok || block.stopped;
  if (failed) {
    fill_outputs(fills, num_fills);
    fill_outputs(more_fills, num_more_fills);
  }
  if (!is_last) return;
  for (int source = threadIdx.x; source < view.num_ranks; source += blockDim.x) {
    if (source == view.rank || failed) continue;
    // Release: every block's reads are done before the source may overwrite them.
    raise_word(view, source, &header(view, source)->credit[ring_slot(view, block.epoch)][view.rank],
               block.epoch);
  }
  if (threadIdx.x == 0) {
    Control& own = control(view);
    own.succeeded = !failed;
    own.next_send = 0;
    own.next_receive = 0;
    if (!failed) own.owner = 0;  // Else no launch follows in this workspace.
    own.next_epoch = block.epoch + 1;
  }
  mark(view, Mark::kEnd);
}

}  // namespace moe_a2a

#endif  // MOE_A2A_DEVICE_EXCHANGE_CUH_
