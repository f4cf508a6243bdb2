// Puts of NVSHMEM, which reach inter-node ranks; stores reach all other ranks. Kernels are built
// twice. Without MOE_A2A_NETWORK no rank is inter-node, and kernels contain no code of this file.
//
// All slabs have the same place in the symmetric memory of their processes. So view.slab[rank] of
// an inter-node rank is the address of the own slab, which NVSHMEM translates to the peer's slab.
// Rows go into the own `outgoing` memory first (zone() in device/exchange.cuh), and cross chunk by
// chunk, each before its flag. The credit for a ring half says that the peer has read all that was
// put into it. So its part of `outgoing` is free too.
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

__device__ inline bool is_inter_node(const RankView& view, int rank) {
  return network(view).inter_node >> rank & 1;
}

// Returns where this rank's zone of a ring half at `rank` is laid out before it crosses.
__device__ inline char* outgoing_zone(const RankView& view, int rank, int half,
                                      int64_t zone_bytes) {
  const Network& n = network(view);
  return n.outgoing + half * n.half_stride + rank * zone_bytes;
}

__device__ inline int64_t half_stride(const RankView& view) { return network(view).half_stride; }

// Stores a word at an inter-node rank. Only fence_puts() orders it with other puts.
__device__ inline void put_word(const RankView& view, int rank, uint64_t* address, uint64_t value) {
  nvshmemx_signal_op(address, value, NVSHMEM_SIGNAL_SET, network(view).pe[rank]);
}

// Keeps later puts of a warp from overtaking earlier ones. One thread calls it.
__device__ inline void fence_puts(MOE_A2A_CALL_SITE) {
  if (MOE_A2A_IS_LEFT_OUT) return;
  nvshmem_fence();
}

// The puts of one warp: ranges of bytes of a zone at one rank, and then the chunk's flag.
class Puts {
 public:
  // `to` is the address in the own slab that stands for the zone at `rank`.
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
    // The last range is put with the flag, which must not overtake earlier ranges.
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

__device__ constexpr bool is_inter_node(const RankView&, int) { return false; }
__device__ constexpr char* outgoing_zone(const RankView&, int, int, int64_t) { return nullptr; }
__device__ constexpr int64_t half_stride(const RankView&) { return kHalfStride; }
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
