// Bulk copies between global and shared memory, which a GPU carries out on its own. Here they happen as late as the
// thread's waits allow, or earlier, at random.
#pragma once

#include <cstdint>

namespace emulation {

void init_load_barrier(uint64_t* barrier);
void start_load(char* to, const char* from, uint32_t bytes, uint64_t* barrier);
void finish_load(uint64_t* barrier, uint32_t parity);

void start_store(char* to, const char* from, uint32_t bytes);
void end_store_group();
void wait_until_read(int pending_groups);
void wait_until_stored();

}  // namespace emulation
