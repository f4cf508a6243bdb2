// The paced sender: a kernel of a few blocks on rank 0's GPU that plays all other ranks of a domain. So one GPU shows how
// long a layer of one rank takes while its peers send at the speed of a link.
//
// Holds: for each launch of rank 0 and as each played rank, the player writes rows, flags and a head into rank 0's slab,
// and posts the credits for what rank 0 has sent. It keeps the rules of docs/protocol.md. It writes to a ring half only
// after rank 0's credit, raises a flag only after its rows are stored, and posts a credit only after it has seen all flags
// of rank 0. Its waits are those of device/signal.cuh: they are bounded, and a word of another call is an error.
//
// Rows: a played rank fills the first `used` slots of its zone. The rows are templates that each block keeps in shared
// memory, so the player reads no rows from global memory. template_of() says which slot has which template.
//
// Pace: every byte of a call has a turn, counted from the moment at which the first flag of rank 0 is seen, and is stored
// no earlier. This flag comes a few microseconds after rank 0 has begun, so the played ranks are late by as much. Rank 0's
// own stores are not paced, because they stay in the memory of the GPU.
//
// Launch: once for many launches of rank 0, before the first of them. All blocks must be resident. Each thread takes
// chunks by its number, and stores, waits and raises flags on its own.
#ifndef MOE_A2A_BENCHMARKS_PLAYER_CUH_
#define MOE_A2A_BENCHMARKS_PLAYER_CUH_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "device/exchange.cuh"
#include "device/ptx.cuh"
#include "device/signal.cuh"
#include "layout.h"
#include "params.h"

namespace moe_a2a {

constexpr int kPlayerThreads = 128;
constexpr int kMaxPlayedRanks = 16;  // of the domain
constexpr int kMaxPlayedArrays = 2;
constexpr int kTemplates = 4;

// One exchange, as the played ranks see it: what each of them sends to rank 0. A dispatch and a combine differ in
// nothing else.
struct PlayedCall {
  Operation operation;
  uint64_t signature;
  int32_t num_slots;  // tokens of each rank
  int32_t num_arrays;
  int64_t row_bytes[kMaxPlayedArrays];  // multiples of 16
  int64_t zone_offset[kMaxPlayedArrays];
  int64_t zone_bytes;
  int32_t used[kMaxPlayedRanks];  // slots that each played rank fills at rank 0
};

// The time at which a block of the player saw that a call had begun, and that at which its last row was stored, in ns.
struct PlayedTime {
  uint64_t begin, end;
};

struct PlayerParams {
  RankView view;  // of rank 0; the error records of the played ranks follow its own
  const PlayedCall* calls;
  const int32_t* order;  // [num_launches]: which call each launch of rank 0 is
  int32_t num_launches;
  uint64_t first_epoch;
  const char* templates;   // [kTemplates, template_bytes]
  int64_t template_bytes;  // a multiple of 16; at least that of every row
  double ns_per_byte;      // of all played ranks together
  uint32_t* arrived;       // [2]: zero; blocks that have seen all of a launch
  uint64_t* started;       // [blocks], in host memory: becomes 1 when the block runs
  PlayedTime* times;       // [num_launches, blocks]
};

// Returns the number of the template that a played rank sends in a slot.
MOE_A2A_HOST_DEVICE constexpr int template_of(int rank, int slot) {
  return static_cast<int>((static_cast<uint32_t>(slot) * 2654435761u >> 16) + rank) % kTemplates;
}

// Returns the number of slots that a played rank fills before chunk `chunk`.
MOE_A2A_HOST_DEVICE inline int64_t slots_before(const PlayedCall& call, int rank, int chunk) {
  const int64_t slots = chunk * slots_per_chunk(call.num_slots);
  return slots < call.used[rank] ? slots : call.used[rank];
}

MOE_A2A_HOST_DEVICE inline int64_t played_row_bytes(const PlayedCall& call) {
  int64_t bytes = 0;
  for (int a = 0; a < call.num_arrays; ++a) bytes += call.row_bytes[a];
  return bytes;
}

// Returns the bytes that all played ranks send in a call.
MOE_A2A_HOST_DEVICE inline int64_t played_bytes(const PlayedCall& call, int num_ranks) {
  int64_t slots = 0;
  for (int rank = 1; rank < num_ranks; ++rank) slots += call.used[rank];
  return slots * played_row_bytes(call);
}

namespace player {

// Holds the played ranks' views of a launch, in shared memory.
struct Views {
  RankView of[kMaxPlayedRanks];
};

// Sends one chunk of a played rank when its turn comes.
__device__ inline void send(const PlayerParams& p, const PlayedCall& call, const RankView& view,
                            uint64_t epoch, int chunk, const char* templates, uint64_t begin) {
  const int num_ranks = view.num_ranks;
  int64_t slots = 0;
  for (int rank = 1; rank < num_ranks; ++rank) {
    slots += slots_before(call, rank, rank < view.rank ? chunk + 1 : chunk);
  }
  const auto turn =
      begin +
      static_cast<uint64_t>(static_cast<double>(slots * played_row_bytes(call)) * p.ns_per_byte);
  const int end = static_cast<int>(slots_before(call, view.rank, chunk + 1));
  int slot = static_cast<int>(slots_before(call, view.rank, chunk));
  if (slot < end) {
    while (global_time_ns() < turn) __nanosleep(100);
  }
  char* to = zone(view, 0, epoch, view.rank, call.zone_bytes);
  for (; slot < end; ++slot) {
    const char* from = templates + template_of(view.rank, slot) * p.template_bytes;
    for (int a = 0; a < call.num_arrays; ++a) {
      const int64_t bytes = call.row_bytes[a];
      bulk_store(to + call.zone_offset[a] + slot * row_stride(bytes), from,
                 static_cast<uint32_t>(bytes));
    }
  }
  end_store_group();
  wait_until_stored();
  store_chunk_flag(view, epoch, 0, chunk);
}

// Waits for all that rank 0 sends to the played ranks in this launch. Waits for the heads first, because they come when
// nearly all has been sent. So the player does not poll flags for long.
__device__ inline bool receive(const Views& views, const PlayedCall& call, uint64_t epoch,
                               int num_ranks) {
  bool landed = true;
  for (int rank = 1 + threadIdx.x; rank < num_ranks; rank += blockDim.x) {
    landed = landed && wait_for_head(views.of[rank], epoch, 0);
  }
  if (!__syncthreads_and(landed)) return false;
  const int peers = num_ranks - 1;
  const int num_items = static_cast<int>(num_chunks_of(call.num_slots)) * peers;
  const int thread = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  for (int item = thread; landed && item < num_items; item += gridDim.x * blockDim.x) {
    const RankView& view = views.of[1 + item % peers];
    landed = wait_for_flag(view, chunk_flag(view, epoch, 0, item / peers), epoch,
                           Phase::kReceiveChunk, 0);
  }
  return __syncthreads_and(landed);
}

__global__ void __launch_bounds__(kPlayerThreads) play(const __grid_constant__ PlayerParams p) {
  MOE_A2A_DYNAMIC_SHARED(128, char, templates);
  __shared__ Views views;
  __shared__ uint64_t begin;
  __shared__ int is_last;
  const int num_ranks = p.view.num_ranks, peers = num_ranks - 1;
  const int tid = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(gridDim.x * blockDim.x);
  for (int64_t i = tid; i < kTemplates * p.template_bytes / kVectorBytes; i += blockDim.x) {
    reinterpret_cast<uint4*>(templates)[i] = reinterpret_cast<const uint4*>(p.templates)[i];
  }
  for (int rank = tid; rank < num_ranks; rank += blockDim.x) {
    views.of[rank] = p.view;
    views.of[rank].rank = rank;
    views.of[rank].error = p.view.error + rank;
  }
  fence_shared_for_bulk();
  __syncthreads();
  if (tid == 0) store_release_sys(&p.started[blockIdx.x], 1);
  for (int n = 0; n < p.num_launches; ++n) {
    const uint64_t epoch = p.first_epoch + n;
    const PlayedCall& call = p.calls[p.order[n]];
    for (int rank = tid; rank < num_ranks; rank += blockDim.x) {
      views.of[rank].operation = call.operation;
      views.of[rank].signature = call.signature;
    }
    __syncthreads();
    // Rank 0 sends to rank 1 first: its first flag says that the launch has begun.
    bool ok = true;
    if (tid == 0) {
      ok = wait_for_flag(views.of[1], chunk_flag(views.of[1], epoch, 0, 0), epoch,
                         Phase::kReceiveChunk, 0);
      begin = global_time_ns();
    }
    for (int rank = 1 + tid; rank < num_ranks; rank += blockDim.x) {
      ok = ok && wait_for_credit(views.of[rank], epoch, 0);
    }
    if (!__syncthreads_and(ok)) return;
    fence_global_for_bulk();  // The zones are free: their credits have been acquired.
    const int num_items = static_cast<int>(num_chunks_of(call.num_slots)) * peers;
    const int warp =
        tid / kWarpThreads * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
    // Chunks with neighbouring numbers go to different blocks, in units of a warp.
    for (int item = warp * kWarpThreads + tid % kWarpThreads; item < num_items; item += threads) {
      send(p, call, views.of[1 + item % peers], epoch, item / peers, templates, begin);
    }
    __syncthreads();
    if (tid == 0) {
      p.times[n * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x)] = {begin,
                                                                                 global_time_ns()};
    }
    for (int rank = 1 + tid; blockIdx.x == 0 && rank < num_ranks; rank += blockDim.x) {
      const RankView& view = views.of[rank];
      Head* head = &header(view, 0)->head[ring_half(view, epoch)][rank];
      store_relaxed_sys(&head->signature, view.signature);
      store_relaxed_sys(&head->run, 0);
      raise_word(view, 0, &head->flag, make_flag(epoch, view.signature));
    }
    if (!receive(views, call, epoch, num_ranks)) return;
    // A block is at most one launch ahead of another, so two counters in turn are enough.
    if (tid == 0) is_last = arrive(&p.arrived[n % 2], gridDim.x - 1) == gridDim.x - 1;
    __syncthreads();
    for (int rank = 1 + tid; is_last && rank < num_ranks; rank += blockDim.x) {
      const RankView& view = views.of[rank];
      raise_word(view, 0, &header(view, 0)->credit[ring_half(view, epoch)][rank], epoch);
    }
    __syncthreads();  // All have read `is_last` and the views.
  }
}

}  // namespace player

inline int64_t player_shared_bytes(const PlayerParams& p) { return kTemplates * p.template_bytes; }

inline cudaError_t LoadPlayer(int64_t shared_bytes) {
  return cudaFuncSetAttribute(player::play, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(shared_bytes));
}

// `shared_bytes`: shared memory of each block, at least player_shared_bytes(). If it is all that a multiprocessor has, no
// other block runs there, so that no exchange has the player's multiprocessors for free.
inline cudaError_t LaunchPlayer(const PlayerParams& p, int num_blocks, int64_t shared_bytes,
                                cudaStream_t stream) {
  PlayerParams params = p;
  void* arguments[] = {&params};
  return cudaLaunchKernel(reinterpret_cast<const void*>(player::play), dim3(num_blocks),
                          dim3(kPlayerThreads), arguments, static_cast<size_t>(shared_bytes),
                          stream);
}

}  // namespace moe_a2a

#endif  // MOE_A2A_BENCHMARKS_PLAYER_CUH_
