// Bulk copies between global and shared memory, which a GPU carries out on its own. Here they happen as late as the
// thread's waits allow, or earlier, at random.
//
// They go through a proxy: what the thread has written or acquired is ordered before them only by a fence for them.
// What they do is ordered before the thread's next accesses by a wait.
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

// Orders what this thread has done and acquired before its next bulk copies.
void fence_global_for_bulk();
// Orders what this thread has done before the next bulk copies of the block.
void fence_shared_for_bulk();

}  // namespace emulation
