// Boxes of results on their way from a warp group to global memory.
//
// A warp group writes boxes to shared memory, and another warp stores them. If the warp group
// stored its boxes, each store would need a fence that waits for these writes, and the warp group's
// next products would start later. Boxes are in buffers, which a warp group fills in turn. If an
// epilogue reads an array, they are in the stages of this array, which the storing warp releases.
#pragma once

#include "gemm/hopper.cuh"

namespace moe_a2a::gemm {

template <typename F>
using StoreBuffers = char[2][F::kReads ? 1 : F::kStoreBytes];  // unused if F::kReads

// Boxes to store. If they are in a stage, `released` is the barrier of its release.
template <typename F>
struct StoreRequest {
  struct alignas(32) Store {
    const CUtensorMap* map;  // null: nothing to store
    const char* from;        // in the first store of a request, null: no requests follow
    Box box;
  };
  Store stores[F::kDerives ? 3 : F::kAdds ? 2 : 1];
  uint64_t* released;  // unused unless F::kReads
};

template <typename F>
struct StoreQueue {
  static constexpr int kSize = F::kReads ? F::kStages : 2;
  StoreRequest<F> requests[kSize];
  // filled: all warps of the group have written. emptied: the stores have read what was written.
  uint64_t filled[kSize], emptied[kSize];

  __device__ void init() {
    for (int i = 0; i < kSize; ++i) {
      init_barrier(&filled[i], kWarpsOfGroup);
      init_barrier(&emptied[i], 1);
    }
  }
};

// Returns the index of this warp in its warp group.
__device__ inline int warp_of_group() { return threadIdx.x % kGroupThreads / kWarpThreads; }

// The warp group's side of a queue. All its warps make the same calls.
template <typename F>
class BoxBuffers {
 public:
  __device__ BoxBuffers(StoreBuffers<F>& buffers, StoreQueue<F>& queue)
      : buffers_(buffers), queue_(queue) {}

  // Waits until the next request is possible.
  __device__ void wait() { wait_for(&queue_.emptied[next_.place], next_.parity ^ 1); }
  // Does so, and returns an empty buffer for the request.
  __device__ char* next() {
    wait();
    return buffers_[next_.place];
  }
  // Requests the store of the buffer, to which this warp has written its part of a box.
  __device__ void store(const CUtensorMap& map, const Box& box) {
    request(
        [&](StoreRequest<F>& request) { request.stores[0] = {&map, buffers_[next_.place], box}; });
  }
  // Makes a request that `fill` writes. Call it after wait().
  template <typename Fill>
  __device__ void request(Fill&& fill) {
    __syncwarp();
    if (lane_index() == 0) {
      if (threadIdx.x % kGroupThreads == 0) fill(queue_.requests[next_.place]);
      arrive(&queue_.filled[next_.place]);
    }
    next_.advance();
  }
  // Makes serve_stores() return after it has stored all boxes.
  __device__ void end() {
    wait();
    request([](StoreRequest<F>& request) { request.stores[0].from = nullptr; });
  }

 private:
  StoreBuffers<F>& buffers_;
  StoreQueue<F>& queue_;
  Cursor<StoreQueue<F>::kSize> next_;
};

// The other side of a queue: stores all boxes. One thread calls it.
template <typename F>
__device__ inline void serve_stores(StoreQueue<F>& queue) {
  Cursor<StoreQueue<F>::kSize> next;
  int unread = -1;  // the buffer that the last store may still read; or -1
  while (true) {
    // Do not let the warp group wait for this buffer until it has filled the next one.
    if (unread >= 0 && !is_complete(&queue.filled[next.place], next.parity)) {
      wait_until_read<0>();
      arrive(&queue.emptied[unread]);
      unread = -1;
    }
    wait_until_loaded(&queue.filled[next.place], next.parity);
    const StoreRequest<F>& request = queue.requests[next.place];
    if (request.stores[0].from == nullptr) break;
    fence_shared_for_bulk();
    for (const auto& store : request.stores) {
      if (store.map != nullptr) store_box(store.map, store.box, store.from);
    }
    end_store_group();
    if constexpr (F::kReads) {
      wait_until_read<0>();
      for (int i = 0; i < kWarpsOfGroup * F::kBlocks; ++i) {
        arrive_at(request.released, i % F::kBlocks);  // for each warp of the group
      }
      arrive(&queue.emptied[next.place]);
    } else {
      if (unread >= 0) {
        wait_until_read<1>();
        arrive(&queue.emptied[unread]);
      }
      unread = next.place;
    }
    next.advance();
  }
  wait_until_stored();
}

}  // namespace moe_a2a::gemm
