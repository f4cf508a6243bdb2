// Boxes of results on their way from a warp group to global memory.
//
// A warp group fills buffers in shared memory in turn, and another warp stores them. If the warp
// group stored its boxes, each store would need a fence that waits for the writes to the buffer,
// and the warp group's next products would start later.
#pragma once

#include "gemm/hopper.cuh"

namespace moe_a2a::gemm {

// A box to store. Without a map, no more boxes follow.
struct StoreRequest {
  const CUtensorMap* map;
  Box box;
};

struct StoreQueue {
  StoreRequest requests[kStoreBuffers];
  // filled: all warps of the group have filled a buffer. emptied: its store has read it.
  uint64_t filled[kStoreBuffers], emptied[kStoreBuffers];

  __device__ void init() {
    for (int i = 0; i < kStoreBuffers; ++i) {
      init_barrier(&filled[i], kConsumerWarps / kConsumerGroups);
      init_barrier(&emptied[i], 1);
    }
  }
};

template <typename F>
using StoreBuffers = char[kStoreBuffers][F::kStoreBytes];

// Returns the index of this warp in its warp group.
__device__ inline int warp_of_group() { return threadIdx.x % kGroupThreads / kWarpThreads; }

// The warp group's side of a queue. All its warps make the same calls.
template <typename F>
class BoxBuffers {
 public:
  __device__ BoxBuffers(StoreBuffers<F>& buffers, StoreQueue& queue)
      : buffers_(buffers), queue_(queue) {}

  // Waits until the next buffer is empty, and returns it.
  __device__ char* next() {
    wait_for(&queue_.emptied[next_.place], next_.parity ^ 1);
    return buffers_[next_.place];
  }
  // Requests the store of the buffer, to which this warp has written its part of a box.
  __device__ void store(const CUtensorMap* map, const Box& box) {
    __syncwarp();
    if (lane_index() == 0) {
      if (threadIdx.x % kGroupThreads == 0) queue_.requests[next_.place] = {map, box};
      arrive(&queue_.filled[next_.place]);
    }
    next_.advance();
  }
  // Makes store_boxes() return after it has stored all boxes.
  __device__ void end() {
    next();
    store(nullptr, {});
  }

 private:
  StoreBuffers<F>& buffers_;
  StoreQueue& queue_;
  Cursor<kStoreBuffers> next_;
};

// The other side of a queue: stores all boxes. One thread calls it.
template <typename F>
__device__ inline void store_boxes(StoreBuffers<F>& buffers, StoreQueue& queue) {
  static_assert(kStoreBuffers == 2);
  Cursor<kStoreBuffers> next;
  for (bool is_first = true;; is_first = false) {
    wait_until_loaded(&queue.filled[next.place], next.parity);
    const StoreRequest request = queue.requests[next.place];
    if (request.map == nullptr) break;
    fence_shared_for_bulk();
    store_box(request.map, request.box, buffers[next.place]);
    end_store_group();
    next.advance();
    if (is_first) continue;
    wait_until_read<1>();
    arrive(&queue.emptied[next.place]);
  }
  wait_until_stored();
}

}  // namespace moe_a2a::gemm
