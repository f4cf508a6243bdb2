// Bulk copies between global and shared memory. On a GPU they are asynchronous. In the emulator, a
// copy happens at a random time, at the latest when the thread waits for it.
//
// Copies access memory through a proxy. A proxy fence orders the thread's earlier accesses before
// a copy. A wait orders a copy before the thread's later accesses. Nothing else orders a copy.
#pragma once

#include <cstdint>

namespace emulation {

void init_load_barrier(uint64_t* barrier);
void fence_load_barriers();
void start_load(char* to, const char* from, uint32_t bytes, uint64_t* barrier);
void finish_load(uint64_t* barrier, uint32_t parity);

void start_store(char* to, const char* from, uint32_t bytes);
void end_store_group();
void wait_until_read(int pending_groups);
void wait_until_stored();

// This thread's next bulk copies see its earlier accesses, and what acquires have made visible.
void fence_global_for_bulk();
// The next bulk copies of the block see this thread's earlier accesses.
void fence_shared_for_bulk();

}  // namespace emulation
