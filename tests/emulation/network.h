// NVSHMEM's puts as a network may deliver them: at random times, in any order that fences allow.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emulation {

// Returns where the symmetric memory of a rank begins.
char*& network_base(int rank);

// Puts bytes to a rank, then a signal word; each is optional. `to` and `signal` are addresses in
// the calling rank's own symmetric memory. The put reads its source when it is delivered.
void put(void* to, const void* from, size_t bytes, uint64_t* signal, uint64_t value, int to_rank);

// Orders the calling rank's puts to each rank: puts after the fence do not overtake puts before it.
void fence_network();

// Starts the threads that deliver puts. end_network() ends them after the last put. Without
// `keeps_fences`, puts overtake fences, too, which the tests must notice.
void start_network(int num_ranks, bool keeps_fences, uint64_t seed);
void end_network();

}  // namespace emulation
