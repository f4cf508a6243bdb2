// The steps that all exchange kernels share.
//
// The first `send_blocks` blocks to start are senders: they send until no item is left, and then
// receive. A sender waits only for credits, which other ranks' earlier launches post. When a block
// begins to receive, no item waits for a block that has not started. A launch therefore ends even
// if only one block is resident at a time (docs/protocol.md, section 6).
#pragma once

#include "device/ranks.cuh"
#include "device/signal.cuh"
#include "device/team.cuh"

namespace moe_a2a {

struct BlockState {
  uint64_t epoch;
  uint32_t admission;      // 0, 1, 2, ... in the order in which blocks start
  int32_t is_only_launch;  // no other launch of this rank is under way
  int32_t ok;              // is_only_launch, and the domain had not failed when the block entered
  int32_t stopped;         // the domain had failed when the block finished its work
  uint32_t mailboxes[kMaxTeams];
};

__device__ inline Control& control(const RankView& view) {
  return header(view, view.rank)->control;
}

// Returns this rank's address of the zone of `source` in the slab of `at_rank`.
__device__ inline char* zone(const RankView& view, int at_rank, uint64_t epoch, int source,
                             int64_t zone_bytes) {
  return view.slab[at_rank] + half_offset(ring_half(view, epoch)) + source * zone_bytes;
}

// A warp looks up this number of slots at a time, with one lane for each choice.
__device__ inline int slots_per_look(int top_k) { return kWarpThreads / top_k; }

// Begins the work of a block. Returns false if the domain has failed or if another launch of this
// rank is under way. The block must then call leave() at once. All threads call it.
__device__ inline bool enter(const RankView& view, BlockState& block) {
  if (threadIdx.x == 0) {
    Control& own = control(view);
    // These accesses do not depend on each other, so together they take as long as one.
    const uint32_t admission = atomicInc(&own.admitted, num_blocks() - 1);
    // The last block that left the previous launch on the stream has advanced the epoch.
    const uint64_t epoch = *const_cast<volatile uint64_t*>(&own.next_epoch);
    const uint64_t poison = load_relaxed_sys(&own.poison);
    // Every block checks for another launch, whose blocks would take work of this launch.
    const uint64_t owner =
        atomicCAS(reinterpret_cast<unsigned long long*>(&own.owner), 0ull, view.launch);
    block.admission = admission;
    block.epoch = epoch;
    block.is_only_launch = owner == 0 || owner == view.launch;
    block.ok = poison == 0 && block.is_only_launch;
    if (poison == 0 && !block.is_only_launch) {
      fail(view, ErrorKind::kOverlap, Phase::kStart, view.rank, epoch, view.launch, owner);
    }
  }
  __syncthreads();
  return block.ok;
}

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

// Requests a work item. Only the team's first thread receives the item's number.
__device__ inline uint32_t ask_for_item(uint32_t& counter, const Team& team) {
  return team.thread() == 0 ? atomicAdd(&counter, 1u) : 0;
}

__device__ inline uint32_t take_item(uint32_t& counter, const Team& team) {
  return team.broadcast(ask_for_item(counter, team));
}

// If all blocks send, requests the first send item before enter(). Receivers must not request one.
__device__ inline uint32_t ask_before_entering(const RankView& view, const Roles& roles,
                                               const Team& senders) {
  return all_send(roles) ? ask_for_item(control(view).next_send, senders) : 0;
}

// Waits until no team of the block sends, because teams of senders and of receivers share barriers.
__device__ inline void change_teams(const Roles& roles) {
  if (roles.send_teams != roles.receive_teams) __syncthreads();
}

// Waits until this rank may overwrite its zones at all peers. All threads of the team call it.
__device__ inline bool wait_for_credits(const RankView& view, const Team& team, uint64_t epoch) {
  bool free = true;
  for (int peer = team.thread(); peer < view.num_ranks; peer += team.threads()) {
    if (peer == view.rank || breaks(view, kIgnoreCredit)) continue;
    free = free && wait_for_credit(view, epoch, peer);
  }
  return team.all(free);
}

// Announces this call to every peer. Must come after wait_for_credits().
__device__ inline void raise_heads(const RankView& view, const Team& team, uint64_t epoch) {
  for (int peer = team.thread(); peer < view.num_ranks; peer += team.threads()) {
    if (peer == view.rank) continue;
    Head* head = &header(view, peer)->head[ring_half(view, epoch)][view.rank];
    store_relaxed_sys(&head->signature, view.signature);
    store_relaxed_sys(&head->run, view.run);
    store_release_sys(&head->flag, make_flag(epoch, view.signature));
  }
}

__device__ inline void store_chunk_flag(const RankView& view, uint64_t epoch, int destination,
                                        int chunk) {
  fence_acq_rel_sys();  // The team's rows are visible before the flag.
  uint64_t* flag = &header(view, destination)->chunk[ring_half(view, epoch)][view.rank][chunk];
  store_relaxed_sys(flag, make_flag(epoch, view.signature));
}

// Raises a chunk's flag after the team has written the chunk. All threads of the team call it.
__device__ inline void raise_chunk(const RankView& view, const Team& team, uint64_t epoch,
                                   int destination, int chunk) {
  team.sync();
  if (team.thread() == 0) store_chunk_flag(view, epoch, destination, chunk);
}

__device__ inline void raise_chunk_everywhere(const RankView& view, const Team& team,
                                              uint64_t epoch, int chunk) {
  team.sync();
  for (int peer = team.thread(); peer < view.num_ranks; peer += team.threads()) {
    if (peer != view.rank) store_chunk_flag(view, epoch, peer, chunk);
  }
}

__device__ inline const uint64_t* chunk_flag(const RankView& view, uint64_t epoch, int source,
                                             int chunk) {
  return &header(view, view.rank)->chunk[ring_half(view, epoch)][source][chunk];
}

// Waits until a chunk has landed. All threads of the team call it.
__device__ inline bool wait_for_chunk(const RankView& view, const Team& team, uint64_t epoch,
                                      int source, int chunk) {
  const bool landed =
      team.thread() != 0 || wait_for_flag(view, chunk_flag(view, epoch, source, chunk), epoch,
                                          Phase::kReceiveChunk, source);
  return team.broadcast(landed);
}

// Waits for the credits of all peers. Returns false if the block is not a sender, or if a wait
// failed. Sets `asked` to the request for the first item.
__device__ __forceinline__ bool begin_sending(const RankView& view, const BlockState& block,
                                              const Roles& roles, const Team& team,
                                              uint32_t& asked) {
  if (!is_sender(view, block, roles)) return false;
  delay_for_test(view, Phase::kSend);
  if (!all_send(roles)) asked = ask_for_item(control(view).next_send, team);
  return wait_for_credits(view, team, block.epoch);
}

// Sends work items until none is left. Raises heads last, because receivers read heads only in long
// waits and at the end. `send_item(item)` writes an item and raises its flags.
template <typename SendItem>
__device__ __forceinline__ void send_items(const RankView& view, const Team& team, uint64_t epoch,
                                           int num_items, uint32_t asked, SendItem&& send_item) {
  int item = team.broadcast(asked);
  while (item < num_items) {
    send_item(item);
    item = take_item(control(view).next_send, team);
  }
  if (item == num_items) raise_heads(view, team, epoch);
}

// If the block is a sender, sends chunks. `send_chunk(destination, chunk)` writes a chunk's rows.
template <typename SendChunk>
__device__ __forceinline__ void send_chunks(const RankView& view, const BlockState& block,
                                            const Roles& roles, const Team& team, int num_chunks,
                                            uint32_t asked, SendChunk&& send_chunk) {
  if (!begin_sending(view, block, roles, team, asked)) return;
  const uint64_t epoch = block.epoch;
  const int peers = view.num_ranks - 1;
  send_items(view, team, epoch, num_chunks * peers, asked, [&](int item) {
    const int destination = (view.rank + 1 + item % peers) % view.num_ranks;
    const int chunk = item / peers;
    if (breaks(view, kFlagBeforeRows)) {
      raise_chunk(view, team, epoch, destination, chunk);
      __nanosleep(20000);  // Otherwise, on one GPU, the rows would still land in time.
    }
    send_chunk(destination, chunk);
    raise_chunk(view, team, epoch, destination, chunk);
  });
}

static __device__ __noinline__ void fill_outputs(const FailureFill* fills, int num_fills) {
  for (int i = 0; i < num_fills; ++i) {
    auto* bytes = static_cast<uint8_t*>(fills[i].data);
    for (int64_t b = threadIdx.x; b < fills[i].bytes; b += blockDim.x) bytes[b] = fills[i].byte;
  }
}

// Ends the work of a block. All threads of every exchange kernel call it. The last block that
// leaves posts the credits of the ring half and advances the epoch. After a failure, this block
// overwrites the outputs, because no other block writes them any more.
//
// If another launch of this rank is running, Control::arrived does not count this block. The launch
// may then have no last block, so every block that sees a failure overwrites the outputs.
__device__ inline void leave(const RankView& view, BlockState& block, const FailureFill* fills,
                             int num_fills, const FailureFill* more_fills = nullptr,
                             int num_more_fills = 0) {
  // No launch succeeds before all heads agree, even if it expects no rows. The block with the
  // highest index waits for the heads, because it has the least work if items are few.
  if (block_index() == num_blocks() - 1 && block.ok) {
    for (int peer = threadIdx.x; peer < view.num_ranks; peer += blockDim.x) {
      if (peer != view.rank) wait_for_head(view, block.epoch, peer);
    }
  }
  __syncthreads();  // The block has finished its reads.
  bool is_last = false;
  if (threadIdx.x == 0 && block.is_only_launch) {
    const uint32_t before = arrive(&control(view).arrived, num_blocks() - 1);
    is_last = before == (breaks(view, kCreditByFirstBlock) ? 0 : num_blocks() - 1);
    const uint64_t poison = is_last ? load_relaxed_sys(&control(view).poison) : 0;
    block.ok = poison == 0;
    // Record that another rank has failed, because this process may have no other error record.
    if (!block.ok) {
      fail(view, ErrorKind::kStopped, Phase::kStart, poisoner(poison), block.epoch, 0, poison);
    }
  } else if (threadIdx.x == blockDim.x - 1) {  // another warp than above, at the same time
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
    // The release orders the reads of all blocks before the source's next writes.
    store_release_sys(&header(view, source)->credit[ring_half(view, block.epoch)][view.rank],
                      block.epoch);
  }
  if (threadIdx.x == 0) {
    Control& own = control(view);
    own.next_send = 0;
    own.next_receive = 0;
    if (!failed) own.owner = 0;  // After a failure, every launch in this workspace fails.
    own.next_epoch = block.epoch + 1;
  }
}

}  // namespace moe_a2a
