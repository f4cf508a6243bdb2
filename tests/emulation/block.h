// Each block is a thread of the operating system. Its CUDA threads are fibers, which run in turns
// in random order. As on a GPU, barriers order memory, but shuffles, votes and other collectives do
// not.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emulation {

constexpr int kLanes = 32;

// ---- For the kernel.

struct Index {
  unsigned x, y;
};

unsigned thread_index();
Index block_index();
unsigned block_threads();
Index grid_blocks();
char* dynamic_shared();  // its address is a multiple of 128

uint64_t shuffle(uint64_t value, int from_lane);
unsigned ballot(bool vote);
unsigned match(uint64_t value);  // the bits of all lanes with this value
int sum_of_warp(int value);

void sync_warp();
// Barrier 0 is __syncthreads.
void sync_named(int index, unsigned num_threads);
// Orders memory if `is_barrier`.
bool vote_of_block(bool vote, bool is_and, bool is_barrier);

// Kernels call these functions where a thread reads memory that another thread may change.
void yield();
void yield_sometimes();
// Called before and after each store that other ranks read, so that these ranks can read memory
// between two stores.
void pause_sometimes();
void pause_often();  // stops the block in one of four calls

// The thread's next relaxed store becomes a release, because ThreadSanitizer does not support
// fences.
void note_fence();
bool take_fence();

bool one_in(unsigned n);

// Ends the process, because the kernel does something that a GPU does not allow.
[[noreturn]] void die(const char* what);

// ---- For the launcher.

struct BlockStart {
  Index index, num_blocks;
  unsigned num_threads;
  size_t shared_bytes;
  uint64_t seed;
  int rank;
  int start_order;  // of the block, among the rank's blocks
  const void* kernel;
  void (*call)(const void* kernel, void** arguments);
  void** arguments;
};

// The caller must be a new thread.
void run_block(const BlockStart& start);

// Orders the caller's next accesses after all accesses before the launch.
void observe_start();

// Fences of shared memory publish this word, and bulk copies of the block observe it.
char* shared_fence_of_block();

// The copies of the running thread. end_bulk_copies() checks that the thread has finished them.
struct BulkCopies;
BulkCopies*& bulk_copies();
void end_bulk_copies(BulkCopies* copies);

}  // namespace emulation
