// This file is not instrumented, because a GPU has no counterpart of the block state that it keeps.
// publish() and observe() tell ThreadSanitizer what orders memory on a GPU.
#include "block.h"

#include <link.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "fiber.h"
#include "layout.h"

namespace emulation {
namespace {

constexpr size_t kStackBytes = 128 << 10;
constexpr int kNamedBarriers = 17;  // 0: the block; 1 + i: team i
constexpr unsigned char kGarbage = 0xA5;

enum class State { kReady, kAtWarp, kAtBarrier, kDone };

// A collective of a warp. All lanes of the warp must wait at the same one.
enum class Meeting { kNone, kSync, kShuffle, kBallot, kMatch, kSum };

struct Thread {
  Fiber* fiber;
  unsigned index;
  State state = State::kReady;
  int barrier = -1;
  bool is_fenced = false;
  BulkCopies* bulk = nullptr;
};

struct Warp {
  // Values of the current and the previous collective. Slow lanes may still read the previous.
  uint64_t values[2][kLanes];
  int current = 0, arrived = 0;
  Meeting meeting = Meeting::kNone;
  char order[2];
};

struct Barrier {
  unsigned arrived = 0, generation = 0;
  bool vote = false, result = false;
  char order[2];
};

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u | 1) {}
  unsigned next() {
    state_ ^= state_ << 13, state_ ^= state_ >> 7, state_ ^= state_ << 17;
    return static_cast<unsigned>(state_ >> 32);
  }

 private:
  uint64_t state_;
};

struct Block {
  const BlockStart& start;
  Thread* threads;
  Warp* warps;
  Barrier barriers[kNamedBarriers];
  Thread* running = nullptr;
  char* shared;
  char order;         // orders the launching thread and the block's threads
  char shared_fence;  // orders fences before bulk copies
  Random random;
};

thread_local Block* block;

Warp& own_warp() { return block->warps[block->running->index / kLanes]; }
int own_lane() { return static_cast<int>(block->running->index % kLanes); }

void wait_as(State state) {
  Thread* self = block->running;
  self->state = state;
  self->fiber->switch_back();
}

const uint64_t* meet(Meeting meeting, uint64_t value) {
  Warp& warp = own_warp();
  if (warp.arrived > 0 && warp.meeting != meeting) {
    std::fprintf(stderr, "meetings %d and %d\n", static_cast<int>(warp.meeting),
                 static_cast<int>(meeting));
    die("lanes of a warp meet at different collectives");
  }
  warp.meeting = meeting;
  const int current = warp.current;
  warp.values[current][own_lane()] = value;
  if (++warp.arrived < kLanes) {
    wait_as(State::kAtWarp);
  } else {
    warp.arrived = 0;
    warp.current ^= 1;
    Thread* first = block->threads + block->running->index / kLanes * kLanes;
    for (Thread* t = first; t < first + kLanes; ++t) {
      if (t->state == State::kAtWarp) t->state = State::kReady;
    }
  }
  return warp.values[current];
}

bool meet_at_barrier(int index, unsigned num_threads, bool vote, bool is_and, bool is_barrier) {
  if (index < 0 || index >= kNamedBarriers) die("a barrier that the block does not have");
  Barrier& barrier = block->barriers[index];
  char* order = &barrier.order[barrier.generation & 1];
  if (is_barrier) publish(order);
  if (barrier.arrived == 0) barrier.vote = is_and;
  barrier.vote = is_and ? barrier.vote && vote : barrier.vote || vote;
  if (++barrier.arrived < num_threads) {
    block->running->barrier = index;
    wait_as(State::kAtBarrier);
  } else {
    barrier.arrived = 0;
    barrier.result = barrier.vote;
    ++barrier.generation;
    for (unsigned i = 0; i < block->start.num_threads; ++i) {
      Thread& t = block->threads[i];
      if (t.state == State::kAtBarrier && t.barrier == index) t.state = State::kReady;
    }
  }
  if (is_barrier) observe(order);
  return barrier.result;
}

void run_thread() {
  observe(&block->order);
  block->start.call(block->start.kernel, block->start.arguments);
  end_bulk_copies(block->running->bulk);
  publish(&block->order);
  wait_as(State::kDone);
  die("a thread runs on after its end");
}

// Fills shared memory with garbage, because a GPU does not initialize it. This also overwrites the
// emulator's own thread-local variables, which are not set yet.
int fill_shared(dl_phdr_info* info, size_t, void*) {
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    if (info->dlpi_phdr[i].p_type == PT_TLS && info->dlpi_tls_data != nullptr) {
      std::memset(info->dlpi_tls_data, kGarbage, info->dlpi_phdr[i].p_memsz);
    }
  }
  return 1;  // the first library is the program itself
}

// The n-th block of a launch reuses the fibers of the n-th block of the rank's previous launch.
// ThreadSanitizer therefore orders the two blocks. This is right: the previous launch has ended.
struct Fibers {
  static constexpr unsigned kMost = 512;
  Fiber fibers[kMost];
  char* stacks;

  Fibers() {
    void* memory = mmap(nullptr, kStackBytes * kMost, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) die("no memory for the stacks of a block");
    stacks = static_cast<char*>(memory);
  }
  ~Fibers() { munmap(stacks, kStackBytes * kMost); }
};

class FibersOfBlock {
 public:
  FibersOfBlock(int rank, int start_order) {
    constexpr int kMaxBlocks = 64;
    static std::atomic<Fibers*> all[moe_a2a::kMaxRanks][kMaxBlocks];
    if (rank < moe_a2a::kMaxRanks && start_order < kMaxBlocks) {
      // If launches of a rank overlap, blocks of the second launch make new fibers.
      place_ = &all[rank][start_order];
      fibers_ = place_->exchange(nullptr);
    }
    if (fibers_ == nullptr) fibers_ = new Fibers();
  }
  ~FibersOfBlock() {
    if (place_ == nullptr || place_->load() != nullptr) {
      delete fibers_;
    } else {
      place_->store(fibers_);
    }
  }
  Fiber* start(unsigned index) const {
    Fiber* fiber = &fibers_->fibers[index];
    fiber->start(fibers_->stacks + index * kStackBytes, kStackBytes, run_thread);
    return fiber;
  }

 private:
  std::atomic<Fibers*>* place_ = nullptr;
  Fibers* fibers_ = nullptr;
};

void stop_block() { usleep(20 + block->random.next() % 80); }

void describe_threads() {
  for (unsigned i = 0; i < block->start.num_threads; ++i) {
    const Thread& t = block->threads[i];
    if (t.state == State::kDone) continue;
    std::fprintf(
        stderr, "thread %u waits %s %d\n", i,
        t.state == State::kAtWarp ? "for its warp at meeting" : "at barrier",
        t.state == State::kAtWarp ? static_cast<int>(block->warps[i / kLanes].meeting) : t.barrier);
  }
}

}  // namespace

void die(const char* what) {
  std::fprintf(stderr, "EMULATOR: %s (block %u, thread %u)\n", what,
               block != nullptr ? block->start.index.x + block->start.index.y : 0,
               block != nullptr && block->running != nullptr ? block->running->index : 0);
  std::fflush(stdout);
  std::abort();
}

unsigned thread_index() { return block->running->index; }
Index block_index() { return block->start.index; }
unsigned block_threads() { return block->start.num_threads; }
Index grid_blocks() { return block->start.num_blocks; }
char* dynamic_shared() { return block->shared; }
BulkCopies*& bulk_copies() { return block->running->bulk; }
bool one_in(unsigned n) { return block->random.next() % n == 0; }

uint64_t shuffle(uint64_t value, int from_lane) {
  return meet(Meeting::kShuffle, value)[from_lane];
}

unsigned ballot(bool vote) {
  const uint64_t* votes = meet(Meeting::kBallot, vote);
  unsigned bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= static_cast<unsigned>(votes[i]) << i;
  return bits;
}

unsigned match(uint64_t value) {
  const uint64_t* values = meet(Meeting::kMatch, value);
  unsigned bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= static_cast<unsigned>(values[i] == value) << i;
  return bits;
}

int sum_of_warp(int value) {
  const uint64_t* values = meet(Meeting::kSum, static_cast<uint32_t>(value));
  int sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += static_cast<int>(values[i]);
  return sum;
}

void sync_warp() {
  Warp& warp = own_warp();
  char* order = &warp.order[warp.current];
  publish(order);
  meet(Meeting::kSync, 0);
  observe(order);
}

void sync_named(int index, unsigned num_threads) {
  meet_at_barrier(index, num_threads, false, false, true);
}

bool vote_of_block(bool vote, bool is_and, bool is_barrier) {
  return meet_at_barrier(0, block->start.num_threads, vote, is_and, is_barrier);
}

void yield() { block->running->fiber->switch_back(); }
void yield_sometimes() {
  if (one_in(4)) yield();
}
void pause_sometimes() {
  yield_sometimes();
  if (one_in(16)) stop_block();
}
void pause_often() {
  if (one_in(4)) stop_block();
}

void note_fence() { block->running->is_fenced = true; }
bool take_fence() {
  const bool was = block->running->is_fenced;
  block->running->is_fenced = false;
  return was;
}

void observe_start() { observe(&block->order); }
char* shared_fence_of_block() { return &block->shared_fence; }

void run_block(const BlockStart& start) {
  dl_iterate_phdr(fill_shared, nullptr);
  const unsigned num_threads = start.num_threads;
  Block own = {
      start, new Thread[num_threads], new Warp[num_threads / kLanes], {}, nullptr, nullptr, 0,
      0,     Random(start.seed)};
  auto* memory =
      static_cast<char*>(std::aligned_alloc(128, (start.shared_bytes + 255) / 128 * 128));
  std::memset(memory, kGarbage, start.shared_bytes);
  own.shared = memory;
  block = &own;
  publish(&own.order);
  const FibersOfBlock fibers(start.rank, start.start_order);
  for (unsigned i = 0; i < num_threads; ++i) {
    own.threads[i].index = i;
    own.threads[i].fiber = fibers.start(i);
  }
  unsigned left = num_threads, rounds = 0;
  while (left > 0) {
    bool any = false;
    const unsigned first = own.random.next() % num_threads;
    for (unsigned i = 0; i < num_threads; ++i) {
      Thread& thread = own.threads[(first + i) % num_threads];
      if (thread.state != State::kReady) continue;
      any = true;
      own.running = &thread;
      thread.fiber->switch_to();
      if (thread.state == State::kDone) --left;
      if (own.random.next() % 8 == 0) break;
    }
    if (!any) {
      describe_threads();
      die("all threads of the block wait for each other");
    }
    if (++rounds % 16 == 0) sched_yield();  // this block may wait for other blocks
  }
  observe(&own.order);
  block = nullptr;
  delete[] own.threads;
  delete[] own.warps;
  std::free(memory);
}

}  // namespace emulation
