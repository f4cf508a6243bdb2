// On a GPU, bulk copies are asynchronous. Here, a copy happens at a random time, at the latest when
// the thread waits for it. A proxy fence orders earlier accesses before a copy, and a wait orders a
// copy before later accesses. Nothing else orders a copy.
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

// The fence also covers stores of other threads that an acquire has made visible to the thread.
void fence_global_for_bulk();
// The fence covers all bulk copies of the block.
void fence_shared_for_bulk();

}  // namespace emulation
