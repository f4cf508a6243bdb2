// How what a rank writes reaches another one: by stores, or, where that lies beyond the load/store domain,
// by puts of NVSHMEM. Kernels are built twice: without MOE_A2A_NETWORK nothing lies beyond, and nothing of
// this is left.
//
// A rank's slab has the same place in the symmetric memory of all processes. So for a rank beyond,
// view.slab[rank] is the own slab's address: what NVSHMEM takes for the other's. Rows go into the own
// `outgoing` memory first (zone() in device/exchange.cuh), and cross chunk by chunk, each before its flag. The
// credit for a ring slot says that all that was put into it has been read, and so that `outgoing` is free too.
#ifndef MOE_A2A_DEVICE_NETWORK_CUH_
#define MOE_A2A_DEVICE_NETWORK_CUH_

#include "device/ptx.cuh"
#include "device/team.cuh"
#include "params.h"

#ifdef MOE_A2A_NETWORK
#include <nvshmem.h>
#include <nvshmemx.h>
#endif

namespace moe_a2a {

#ifdef MOE_A2A_NETWORK

__device__ inline const Network& network(const RankView& view) {
  return reinterpret_cast<const Header*>(view.slab[view.rank])->network;
}

__device__ inline bool is_beyond(const RankView& view, int rank) {
  return network(view).inter_node >> rank & 1;
}

// Where the zone of `ring_slot` at `rank` is laid out before it crosses.
__device__ inline char* outgoing_zone(const RankView& view, int rank, int ring_slot,
                                      int64_t zone_bytes) {
  const Network& n = network(view);
  return n.outgoing + ring_slot * n.slot_stride + rank * zone_bytes;
}

__device__ inline int64_t slot_stride(const RankView& view) { return network(view).slot_stride; }

// Stores a word at a rank beyond, in no order with other puts but for a fence_puts().
__device__ inline void put_word(const RankView& view, int rank, uint64_t* address, uint64_t value) {
  nvshmemx_signal_op(address, value, NVSHMEM_SIGNAL_SET, network(view).pe[rank]);
}

// Between puts of a warp of which the later ones must not overtake the earlier. One thread calls it.
__device__ inline void fence_puts(MOE_A2A_CALL_SITE) {
  if (MOE_A2A_IS_LEFT_OUT) return;
  nvshmem_fence();
}

// What one warp puts into a zone at one rank, piece by piece, and then the flag that says so.
class Puts {
 public:
  // `to`: the address that stands for the other's.
  __device__ Puts(const RankView& view, int rank, char* to, const char* from)
      : pe_(network(view).pe[rank]), to_(to), from_(from) {}

  __device__ void add(int64_t offset, int64_t bytes) {
    if (bytes_ > 0 && bytes > 0) {
      nvshmemx_putmem_nbi_warp(to_ + offset_, from_ + offset_, bytes_, pe_);
      are_several_ = true;
    }
    if (bytes > 0) offset_ = offset, bytes_ = bytes;
  }

  __device__ void end(uint64_t* flag, uint64_t value) {
    // The last piece comes with the flag, which overtakes no piece before it.
    if (are_several_) {
      __syncwarp();
      if (lane_index() == 0) fence_puts();
      __syncwarp();
    }
    if (bytes_ > 0) {
      nvshmemx_putmem_signal_nbi_warp(to_ + offset_, from_ + offset_, bytes_, flag, value,
                                      NVSHMEM_SIGNAL_SET, pe_);
    } else if (lane_index() == 0) {
      nvshmemx_signal_op(flag, value, NVSHMEM_SIGNAL_SET, pe_);
    }
  }

 private:
  const int pe_;
  char* const to_;
  const char* const from_;
  int64_t offset_ = 0, bytes_ = 0;
  bool are_several_ = false;
};

#else

__device__ constexpr bool is_beyond(const RankView&, int) { return false; }
__device__ constexpr char* outgoing_zone(const RankView&, int, int, int64_t) { return nullptr; }
__device__ constexpr int64_t slot_stride(const RankView&) { return kSlotStride; }
__device__ inline void put_word(const RankView&, int, uint64_t*, uint64_t) {}
__device__ inline void fence_puts() {}

struct Puts {
  __device__ Puts(const RankView&, int, char*, const char*) {}
  __device__ void add(int64_t, int64_t) {}
  __device__ void end(uint64_t*, uint64_t) {}
};

#endif

}  // namespace moe_a2a

#endif  // MOE_A2A_DEVICE_NETWORK_CUH_
