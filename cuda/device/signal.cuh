// Reads and writes flags between ranks. No other file has a loop that waits for another rank.
//
// Epochs start at 1 and only increase, so flags are never reset, and no kernel argument changes
// from call to call. docs/protocol.md, section 5, describes how flags order memory.
#pragma once

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

#ifdef MOE_A2A_TEST_HOOKS
// Faults that a test requests, to show that checks detect them. tests/gpu/hooks.py reads this list.
enum Mutation : uint32_t {
  kIgnoreCredit = 1,        // write without waiting for the reader
  kFlagBeforeRows = 2,      // raise a chunk's flag before its rows
  kCreditByFirstBlock = 3,  // do the last block's work when the first block leaves
  kIgnoreSignature = 4,     // accept any call of another rank
  kReceiversFirst = 5,      // admit receivers before senders
  kFlagBeforeStored = 6,    // raise a chunk's flag before its bulk stores are complete
  kOtherCall = 7,           // ranks on one GPU: make a different call than the other ranks
  kIgnoreChunk = 8,         // read rows without waiting for their flag
  kIgnoreHead = 9,          // end a launch without waiting for the heads
  kIgnoreIds = 10           // read expert ids without waiting for them
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
#define breaks(view, rule) false  // a macro, because without the hooks the rules have no names
__device__ inline void delay_for_test(const RankView&, Phase) {}
__device__ constexpr uint64_t ring_depth(const RankView&) { return kRingDepth; }
#endif

__device__ inline int ring_half(const RankView& view, uint64_t epoch) {
  return static_cast<int>(epoch % ring_depth(view));
}

__device__ inline bool is_poisoned(const RankView& view) {
  return load_acquire_sys(&header(view, view.rank)->control.poison) != 0;
}

// A peer that has never announced a call may still be compiling, and has a longer timeout. This
// happens only in epoch 1, because no launch ends before all heads have arrived.
__device__ inline uint64_t timeout_of(const RankView& view, uint64_t epoch, int peer) {
  if (epoch > 1) return view.timeout_ns;
  const Head& head = header(view, view.rank)->head[ring_half(view, epoch)][peer];
  return load_relaxed_sys(&head.flag) == 0 ? view.first_timeout_ns : view.timeout_ns;
}

// Records the first failure of this rank, and poisons all ranks. The poison ends every wait.
// Functions for failures and long waits are never inlined, so that kernels stay small.
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
    __threadfence_system();  // The record is complete before its kind and the poison are visible.
    *const_cast<volatile uint32_t*>(&record->kind) = static_cast<uint32_t>(kind);
    __threadfence_system();
  }
  if (kind == ErrorKind::kStopped) return;  // The rank that failed first has poisoned the domain.
#pragma unroll 1
  for (int rank = 0; rank < view.num_ranks; ++rank) {
    store_release_sys(&header(view, rank)->control.poison,
                      make_poison(view.rank, kind, phase, awaited_rank));
  }
}

class Patience {
 public:
  // Call it between polls. Returns true in every 64th call: the caller then checks for failures.
  __device__ bool is_long() {
    // Pause, because other warps of this multiprocessor have work to do.
    if (++polls_ > Tuning::kPollsWithoutPause) __nanosleep(Tuning::kPauseNs);
    return polls_ % 64 == 0;
  }
  // Returns true if `timeout_ns` have elapsed since the first call with this value. When a peer
  // announces its first call, its timeout becomes shorter (timeout_of()), and starts again.
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

// Returns false and reports a failure if the head of `source` announces a different call.
static __device__ __noinline__ bool head_agrees(const RankView& view, uint64_t epoch, int source) {
  const Head& head = header(view, view.rank)->head[ring_half(view, epoch)][source];
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

// Returns true if a wait for a flag must go on. `seen` is the flag's value. Reports failures.
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
  // A peer that makes a different call may never raise this flag.
  if (!head_agrees(view, epoch, awaited_rank)) return false;
  if (!patience.is_over(timeout_of(view, epoch, awaited_rank))) return true;
  fail(view, ErrorKind::kTimeout, phase, awaited_rank, epoch, expected, seen);
  return false;
}

// Waits until `awaited_rank` has raised `flag`. One thread calls it, and a barrier must follow.
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

// Waits for a word from `awaited_rank` whose low 16 bits are data instead of a signature.
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

// Waits until `source` has announced its call of this epoch. Fails if this rank's call differs.
__device__ inline bool wait_for_head(const RankView& view, uint64_t epoch, int source) {
  const Head& head = header(view, view.rank)->head[ring_half(view, epoch)][source];
  return wait_for_flag(view, &head.flag, epoch, Phase::kReceiveHead, source) &&
         head_agrees(view, epoch, source);
}

// Returns true if a wait for a credit must go on. Reports a timeout.
static __device__ __noinline__ bool may_wait_for_credit(const RankView& view, Patience& patience,
                                                        uint64_t epoch, int destination,
                                                        uint64_t seen) {
  if (is_poisoned(view)) return false;
  if (!patience.is_over(view.timeout_ns)) return true;  // only epoch 1 has a longer timeout
  fail(view, ErrorKind::kTimeout, Phase::kSendCredit, destination, epoch, epoch - ring_depth(view),
       seen);
  return false;
}

// One thread waits until `destination` has read this rank's rows of ring_depth() epochs ago.
__device__ inline bool wait_for_credit(const RankView& view, uint64_t epoch, int destination) {
  if (epoch <= ring_depth(view)) return true;
  const uint64_t* credit = &header(view, view.rank)->credit[ring_half(view, epoch)][destination];
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
