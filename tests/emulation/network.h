// NVSHMEM's puts as a network may deliver them: in any order that fences allow, each when it likes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emulation {

// Where the symmetric memory of a rank begins.
char*& network_base(int rank);

// Puts bytes at a rank and then stores a signal word there; either may be missing. `to` and `signal` are addresses of
// the calling rank's own symmetric memory. The source is read when the put is carried out.
void put(void* to, const void* from, size_t bytes, uint64_t* signal, uint64_t value, int to_rank);

// Orders the calling rank's puts: those after the fence to a rank overtake none before it.
void fence_network();

// Starts the threads that carry puts out, and ends them when nothing is under way. Without `keeps_fences` puts
// overtake fences as well, which the tests must notice.
void start_network(int num_ranks, bool keeps_fences, uint64_t seed);
void end_network();

}  // namespace emulation
