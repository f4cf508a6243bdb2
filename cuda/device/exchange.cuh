// The frame of every exchange kernel: taking the epoch, the role of a block, and the way out.
//
// Blocks take their role in the order in which they start to run: the first `send_blocks` of them
// take pieces to send until none is left, and then receive like the others. A sender waits only for
// credits, which launches issued earlier give, so what has been taken gets sent; and a block receives
// only when others that have started, or it itself, have taken or will take every piece to send. So one
// resident block is enough for a launch to end: see docs/protocol.md.
#ifndef MOE_A2A_DEVICE_EXCHANGE_CUH_
#define MOE_A2A_DEVICE_EXCHANGE_CUH_

#include "device/signal.cuh"

namespace moe_a2a {

// What the threads of a block share.
struct BlockState {
  uint64_t epoch;
  uint32_t admission;  // 0, 1, 2, ... in the order in which blocks started
  uint32_t item;
  int32_t ok;
  int32_t is_last;
};

__device__ inline Control& control(const RankView& view) {
  return header(view, view.rank)->control;
}

// Where this rank's rows land at `destination`.
__device__ inline char* zone(const RankView& view, int at_rank, uint64_t epoch, int source,
                             int64_t zone_bytes) {
  return view.slab[at_rank] + slot_offset(ring_slot(view, epoch)) + source * zone_bytes;
}

// All threads of the block call it. False: the domain has failed; go straight to leave().
__device__ inline bool enter(const RankView& view, BlockState& block) {
  if (threadIdx.x == 0) {
    block.admission = atomicInc(&control(view).admitted, gridDim.x - 1);
    // Stream order: the previous launch has advanced it, this one's last block will.
    block.epoch = *const_cast<volatile uint64_t*>(&control(view).next_epoch);
    block.ok = !is_poisoned(view);
    if (block.admission == 0 && atomicExch(&control(view).busy, 1u) != 0) {
      fail(view, ErrorKind::kOverlap, Phase::kStart, view.rank, block.epoch, 0, 1);
      block.ok = false;
    }
  }
  __syncthreads();
  return block.ok;
}

// A block's place among the senders; it is one if that is in [0, send_blocks).
__device__ inline int sender_index(const RankView& view, const BlockState& block, int send_blocks) {
  const int admission = static_cast<int>(block.admission);
  return breaks(view, kReceiversFirst) ? admission - static_cast<int>(gridDim.x) + send_blocks
                                       : admission;
}

// The next piece of work of those that `counter` hands out. All threads of the block call it.
__device__ inline uint32_t take_item(uint32_t& counter, BlockState& block) {
  __syncthreads();  // Nobody still reads block.item or works on the last piece.
  if (threadIdx.x == 0) block.item = atomicAdd(&counter, 1u);
  __syncthreads();
  return block.item;
}

// Destinations that have given this epoch's credit, known to all threads of the block.
struct Credits {
  uint64_t granted = 0;
};

// Makes one thread's verdict the block's. All threads call it; only thread 0's `ok` counts.
__device__ inline bool agree(BlockState& block, bool ok) {
  if (threadIdx.x == 0) block.ok = ok;
  __syncthreads();
  const bool verdict = block.ok;
  __syncthreads();  // Nobody overwrites it before all have read it.
  return verdict;
}

// Waits for the credit of `destination`, once per block and epoch. All threads of the block call it.
__device__ inline bool may_write(const RankView& view, BlockState& block, Credits& credits,
                                 int destination) {
  if (credits.granted >> destination & 1) return true;
  const bool free = threadIdx.x != 0 || breaks(view, kIgnoreCredit) ||
                    wait_for_credit(view, block.epoch, destination);
  if (!agree(block, free)) return false;
  credits.granted |= uint64_t{1} << destination;
  return true;
}

// Announces this call to every peer. One block does it, before any wait but that for credits.
__device__ inline void raise_heads(const RankView& view, uint64_t epoch) {
  for (int peer = threadIdx.x; peer < view.num_ranks; peer += blockDim.x) {
    if (peer == view.rank || !wait_for_credit(view, epoch, peer)) continue;
    Head* head = &header(view, peer)->head[ring_slot(view, epoch)][view.rank];
    store_relaxed_sys(&head->signature, view.signature);
    store_relaxed_sys(&head->run, view.run);
    store_release_sys(&head->flag, make_flag(epoch, view.signature));
  }
}

// Waits until every peer has announced the same call. All threads of the block call it.
__device__ inline bool wait_for_heads(const RankView& view, BlockState& block) {
  bool ok = true;
  for (int peer = threadIdx.x; peer < view.num_ranks; peer += blockDim.x) {
    if (peer != view.rank) ok = ok && wait_for_head(view, block.epoch, peer);
  }
  return __syncthreads_and(ok);
}

// Raises the flag of a chunk whose rows all threads of the block have written to `destination`.
__device__ inline void raise_chunk(const RankView& view, uint64_t epoch, int destination,
                                   int chunk) {
  __syncthreads();
  if (threadIdx.x == 0) {
    fence_acq_rel_sys();  // The block's rows are visible before the flag.
    store_relaxed_sys(&header(view, destination)->chunk[ring_slot(view, epoch)][view.rank][chunk],
                      make_flag(epoch, view.signature));
  }
}

// The same for a chunk that has been written to every peer.
__device__ inline void raise_chunk_everywhere(const RankView& view, uint64_t epoch, int chunk) {
  __syncthreads();
  for (int peer = threadIdx.x; peer < view.num_ranks; peer += blockDim.x) {
    if (peer == view.rank) continue;
    fence_acq_rel_sys();
    store_relaxed_sys(&header(view, peer)->chunk[ring_slot(view, epoch)][view.rank][chunk],
                      make_flag(epoch, view.signature));
  }
}

__device__ inline const uint64_t* chunk_flag(const RankView& view, uint64_t epoch, int source,
                                             int chunk) {
  return &header(view, view.rank)->chunk[ring_slot(view, epoch)][source][chunk];
}

// The way out of every exchange kernel, on success and on failure. All threads of the block call it.
// The last block gives the ring slot back to its sources and advances the epoch; after a failure it
// overwrites the outputs, when no other block writes them any more.
__device__ inline void leave(const RankView& view, BlockState& block, const FailureFill* fills,
                             int num_fills) {
  __syncthreads();  // The block has read all that it will read.
  if (threadIdx.x == 0) {
    const uint32_t before = arrive(&control(view).arrived, gridDim.x - 1);
    block.is_last = before == (breaks(view, kCreditByFirstBlock) ? 0 : gridDim.x - 1);
    block.ok = !is_poisoned(view);
  }
  __syncthreads();
  if (!block.is_last) return;
  if (!block.ok) {
    for (int i = 0; i < num_fills; ++i) {
      auto* bytes = static_cast<uint8_t*>(fills[i].data);
      for (int64_t b = threadIdx.x; b < fills[i].bytes; b += blockDim.x) bytes[b] = fills[i].byte;
    }
  }
  for (int source = threadIdx.x; source < view.num_ranks; source += blockDim.x) {
    if (source == view.rank || !block.ok) continue;
    fence_acq_rel_sys();  // Every block's reads are done before the source may overwrite them.
    store_release_sys(&header(view, source)->credit[ring_slot(view, block.epoch)][view.rank],
                      block.epoch);
  }
  if (threadIdx.x == 0) {
    control(view).succeeded = block.ok;
    control(view).next_send = 0;
    control(view).next_receive = 0;
    control(view).busy = 0;
    control(view).next_epoch = block.epoch + 1;
  }
}

}  // namespace moe_a2a

#endif  // MOE_A2A_DEVICE_EXCHANGE_CUH_
