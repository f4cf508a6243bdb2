// Flags between ranks: how they are written, and the only places that wait.
//
// A flag is `epoch << 16 | low 16 bits of the call's signature`. Epochs are 64-bit, start at 1 and only
// grow, so nothing is ever reset and no kernel argument changes from call to call. Flags are compared
// for equality; a flag of the same epoch with another signature is a mismatched call.
//
// Ordering. A writer's rows are ordered before its flag by a barrier among the writing threads, a
// system-scope fence by the flag's thread, and the store of the flag. A reader's loads are ordered
// behind its acquire of the flag by a barrier among the reading threads.
#ifndef MOE_A2A_DEVICE_SIGNAL_CUH_
#define MOE_A2A_DEVICE_SIGNAL_CUH_

#include "device/network.cuh"
#include "device/ptx.cuh"
#include "layout.h"
#include "params.h"

namespace moe_a2a {

__device__ inline uint64_t make_flag(uint64_t epoch, uint64_t signature) {
  return epoch << kSignatureBits | (signature & kSignatureMask);
}

__device__ inline Header* header(const RankView& view, int rank) {
  return reinterpret_cast<Header*>(view.slab[rank]);
}

// Stores a word of the header of `rank`, behind all that this thread has read and written; behind what it has put
// only with a fence_puts().
__device__ inline void raise_word(const RankView& view, int rank, uint64_t* address,
                                  uint64_t value) {
  if (is_beyond(view, rank)) {
    fence_acq_rel_sys();
    put_word(view, rank, address, value);
  } else {
    store_release_sys(address, value);
  }
}

#ifdef MOE_A2A_TEST_HOOKS
// Rules that a test may break to see its own check fail. Mirrored in tests/gpu/hooks.py.
enum Mutation : uint32_t {
  kIgnoreCredit = 1,        // write without waiting for the reader
  kFlagBeforeRows = 2,      // raise a chunk's flag before its rows
  kCreditByFirstBlock = 3,  // leave as the last block when the first one leaves
  kIgnoreSignature = 4,     // take every call for the same call
  kReceiversFirst = 5,      // admit receivers before senders
  kFlagBeforeStored = 6,    // raise a chunk's flag when its rows have been read, not stored
  kOtherCall = 7,           // ranks on one GPU: make another call than the other ranks do
  kIgnoreChunk = 8,         // read rows without waiting for their flag
  kIgnoreHead = 9,          // end a launch without waiting for the heads
  kIgnoreIds = 10           // read ids without waiting for them
};
__device__ inline bool breaks(const RankView& view, Mutation rule) {
  return header(view, view.rank)->control.mutation == rule;
}
__device__ inline void delay_for_test(const RankView& view, Phase phase) {
  const Control& control = header(view, view.rank)->control;
  if (control.delay_phase != static_cast<uint32_t>(phase)) return;
  const uint64_t start = global_time_ns();
  while (global_time_ns() - start < control.delay_ns) __nanosleep(1000);
}
__device__ inline uint64_t ring_depth(const RankView& view) {
  const uint32_t depth = header(view, view.rank)->control.depth;
  return depth == 0 ? kRingDepth : depth;
}
#else
#define breaks(view, rule) false  // a macro: the rules have no names without the hooks
__device__ inline void delay_for_test(const RankView&, Phase) {}
__device__ constexpr uint64_t ring_depth(const RankView&) { return kRingDepth; }
#endif

__device__ inline int ring_slot(const RankView& view, uint64_t epoch) {
  return static_cast<int>(epoch % ring_depth(view));
}

__device__ inline bool is_poisoned(const RankView& view) {
  return load_acquire_sys(&header(view, view.rank)->control.poison) != 0;
}

// The bound of a wait for `peer` in this epoch. A peer that has never announced a call here may still compile its
// program. Every launch ends after the heads of all peers, so only the first epoch can meet such a peer.
__device__ inline uint64_t timeout_of(const RankView& view, uint64_t epoch, int peer) {
  if (epoch > 1) return view.timeout_ns;
  const Head& head = header(view, view.rank)->head[ring_slot(view, epoch)][peer];
  return load_relaxed_sys(&head.flag) == 0 ? view.first_timeout_ns : view.timeout_ns;
}

// Records the first failure of this rank and stops the whole domain: every spin looks at `poison`.
// Never inlined, like all that happens only when something is amiss: kernels stay small.
static __device__ __noinline__ void fail(const RankView& view, ErrorKind kind, Phase phase,
                                         int awaited_rank, uint64_t epoch, uint64_t expected,
                                         uint64_t seen) {
  if (atomicExch(&header(view, view.rank)->control.claimed, 1u) == 0) {
    ErrorRecord* record = view.error;
    record->operation = static_cast<uint32_t>(view.operation);
    record->phase = static_cast<uint32_t>(phase);
    record->rank = view.rank;
    record->awaited_rank = awaited_rank;
    record->epoch = epoch;
    record->expected = expected;
    record->seen = seen;
    record->timeout_ns = kind == ErrorKind::kTimeout ? timeout_of(view, epoch, awaited_rank) : 0;
    __threadfence_system();  // The record is whole before its kind is seen, and before the poison.
    *const_cast<volatile uint32_t*>(&record->kind) = static_cast<uint32_t>(kind);
    __threadfence_system();
  }
  if (kind == ErrorKind::kStopped) return;  // by the poison of the rank that knows more
  // Those that share memory first: nothing that the network does can hold these up.
  for (const bool beyond : {false, true}) {
#pragma unroll 1
    for (int rank = 0; rank < view.num_ranks; ++rank) {
      if (is_beyond(view, rank) != beyond) continue;
      raise_word(view, rank, &header(view, rank)->control.poison,
                 make_poison(view.rank, kind, phase, awaited_rank));
    }
  }
}

// Bounds one wait.
class Patience {
 public:
  // Between two polls; every 64th time it is worth a closer look at what may have gone wrong.
  __device__ bool is_long() {
    // Others of this multiprocessor have work to do.
    if (++polls_ > Tuning::kPollsWithoutPause) __nanosleep(Tuning::kPauseNs);
    return polls_ % 64 == 0;
  }
  // Whether `timeout_ns` have passed since this bound was first asked for: a peer that appears after a long wait has
  // its whole time from then on.
  __device__ bool is_over(uint64_t timeout_ns) {
    const uint64_t now = global_time_ns();
    if (timeout_ns != timeout_ns_) start_ = now;
    timeout_ns_ = timeout_ns;
    return now - start_ > timeout_ns;
  }

 private:
  uint64_t start_ = 0, timeout_ns_ = 0;
  uint32_t polls_ = 0;
};

// Checks the announcement of `source`, if it has made one for this epoch.
static __device__ __noinline__ bool head_agrees(const RankView& view, uint64_t epoch, int source) {
  const Head& head = header(view, view.rank)->head[ring_slot(view, epoch)][source];
  if (load_acquire_sys(&head.flag) >> kSignatureBits != epoch || breaks(view, kIgnoreSignature))
    return true;
  const uint64_t signature = load_relaxed_sys(&head.signature);
  const uint64_t run = load_relaxed_sys(&head.run);
  if (signature != view.signature) {
    fail(view, ErrorKind::kMismatch, Phase::kReceiveHead, source, epoch, view.signature, signature);
    return false;
  }
  if (run != view.run && run != 0 && view.run != 0) {
    fail(view, ErrorKind::kMismatch, Phase::kReceiveHead, source, epoch, view.run, run);
    return false;
  }
  return true;
}

// Whether to go on waiting for a flag of `awaited_rank` that stands at `seen`.
static __device__ __noinline__ bool may_wait_on(const RankView& view, Patience& patience,
                                                uint64_t epoch, Phase phase, int awaited_rank,
                                                uint64_t seen) {
  const uint64_t expected = make_flag(epoch, view.signature);
  if (seen >> kSignatureBits == epoch) {
    if (breaks(view, kIgnoreSignature)) return true;
    fail(view, ErrorKind::kMismatch, phase, awaited_rank, epoch, expected & kSignatureMask,
         seen & kSignatureMask);
    return false;
  }
  if (seen >> kSignatureBits > epoch) {
    fail(view, ErrorKind::kViolation, phase, awaited_rank, epoch, expected, seen);
    return false;
  }
  if (is_poisoned(view)) return false;
  // Who makes another call may never raise this flag.
  if (!head_agrees(view, epoch, awaited_rank)) return false;
  if (!patience.is_over(timeout_of(view, epoch, awaited_rank))) return true;
  fail(view, ErrorKind::kTimeout, phase, awaited_rank, epoch, expected, seen);
  return false;
}

// Waits until `flag` says that `awaited_rank` has reached `epoch` with the same call. Called by one
// thread; the caller puts a barrier behind it.
__device__ inline bool wait_for_flag(const RankView& view, const uint64_t* flag, uint64_t epoch,
                                     Phase phase, int awaited_rank) {
  const uint64_t expected = make_flag(epoch, view.signature);
  if (breaks(view, phase == Phase::kReceiveHead ? kIgnoreHead : kIgnoreChunk)) return true;
  Patience patience;
  while (true) {
    const uint64_t seen = load_acquire_sys(flag);
    if (seen == expected || (breaks(view, kIgnoreSignature) && seen >> kSignatureBits == epoch))
      return true;
    if ((patience.is_long() || seen >> kSignatureBits >= epoch) &&
        !may_wait_on(view, patience, epoch, phase, awaited_rank, seen)) {
      return false;
    }
  }
}

// Waits for a word that `awaited_rank` sends in the lower bits of a flag, which make it no signature.
static __device__ __noinline__ bool wait_for_word(const RankView& view, const uint64_t* address,
                                                  uint64_t epoch, int awaited_rank,
                                                  uint64_t* word) {
  Patience patience;
  while (true) {
    *word = load_relaxed_sys(address);
    if (*word >> kSignatureBits == epoch || breaks(view, kIgnoreIds)) return true;
    if (patience.is_long() &&
        !may_wait_on(view, patience, epoch, Phase::kReceiveChunk, awaited_rank, *word)) {
      return false;
    }
  }
}

// Waits until `source` has announced this epoch, and checks what it announces.
__device__ inline bool wait_for_head(const RankView& view, uint64_t epoch, int source) {
  const Head& head = header(view, view.rank)->head[ring_slot(view, epoch)][source];
  return wait_for_flag(view, &head.flag, epoch, Phase::kReceiveHead, source) &&
         head_agrees(view, epoch, source);
}

// Whether to go on waiting for the credit of `destination`, which stands at `seen`.
static __device__ __noinline__ bool may_wait_for_credit(const RankView& view, Patience& patience,
                                                        uint64_t epoch, int destination,
                                                        uint64_t seen) {
  if (is_poisoned(view)) return false;
  if (!patience.is_over(view.timeout_ns)) return true;  // of a peer that has been seen: epoch > 1
  fail(view, ErrorKind::kTimeout, Phase::kSendCredit, destination, epoch, epoch - ring_depth(view),
       seen);
  return false;
}

// Waits until `destination` has read what this rank wrote into the same ring slot a ring's depth of
// epochs ago. Called by one thread.
__device__ inline bool wait_for_credit(const RankView& view, uint64_t epoch, int destination) {
  if (epoch <= ring_depth(view)) return true;
  const uint64_t* credit = &header(view, view.rank)->credit[ring_slot(view, epoch)][destination];
  Patience patience;
  while (true) {
    const uint64_t seen = load_acquire_sys(credit);
    if (seen >= epoch - ring_depth(view)) return true;
    if (patience.is_long() && !may_wait_for_credit(view, patience, epoch, destination, seen)) {
      return false;
    }
  }
}

}  // namespace moe_a2a

#endif  // MOE_A2A_DEVICE_SIGNAL_CUH_
