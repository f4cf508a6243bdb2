// A block of a kernel: a thread of the operating system, whose CUDA threads are fibers that take turns in random order.
//
// Lanes of a warp meet at collectives and barriers, warps at named barriers. Barriers order memory; shuffles, votes and
// the other collectives do not, as on a GPU.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emulation {

constexpr int kLanes = 32;

// ---- For the kernel.

unsigned thread_index();
unsigned block_index();
unsigned block_threads();
unsigned grid_blocks();
char* dynamic_shared();  // a multiple of 128

uint64_t shuffle(uint64_t value, int from_lane);
unsigned ballot(bool vote);
unsigned match(uint64_t value);  // the lanes with the same value
int sum_of_warp(int value);

void sync_warp();
// Waits for `num_threads` threads of the block at barrier `index`; 0 is __syncthreads.
void sync_named(int index, unsigned num_threads);
// Joins the votes of all threads of the block. Orders memory only if `is_barrier`.
bool vote_of_block(bool vote, bool is_and, bool is_barrier);

// Lets other threads of the block run: always, or sometimes, where a thread looks at what another may change.
void yield();
void yield_sometimes();

// A fence: the next relaxed store of the thread is a release. ThreadSanitizer knows no fences.
void note_fence();
bool take_fence();

// Returns True once in `n` times, at random.
bool one_in(unsigned n);

// Ends the process: the kernel does what it must not do on a GPU.
[[noreturn]] void die(const char* what);

// ---- For what starts blocks.

struct BlockStart {
  unsigned index, num_blocks, num_threads;
  size_t shared_bytes;
  uint64_t seed;
  int rank;         // of the launch
  int start_order;  // 0, 1, 2, ... in the order in which its blocks start
  const void* kernel;
  void (*call)(const void* kernel, void** arguments);
  void** arguments;
};

// Runs all threads of one block to their ends. The calling thread must be a fresh one.
void run_block(const BlockStart& start);

// The rank whose block the calling thread runs.
int rank_of_block();

// Orders what came before the launch before what the caller does next.
void observe_start();

// The word by which fences of the block order shared memory for bulk copies (publish() in fiber.h).
char* shared_fence_of_block();

// The copies that bulk.cc keeps for the running thread, and a check for copies that the thread
// leaves unfinished.
struct BulkCopies;
BulkCopies*& bulk_copies();
void end_bulk_copies(BulkCopies* copies);

}  // namespace emulation
