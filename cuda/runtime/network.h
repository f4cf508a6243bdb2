// The interface of the library for inter-node ranks: kernels that are built with NVSHMEM, and
// NVSHMEM's memory. The library is separate, and loaded only if a group needs it, because it needs
// NVSHMEM's libraries.
#ifndef MOE_A2A_RUNTIME_NETWORK_H_
#define MOE_A2A_RUNTIME_NETWORK_H_

#include <cstddef>
#include <string>

#include "kernels/launch.h"
#include "runtime/problem.h"

namespace moe_a2a {

constexpr size_t kUniqueIdBytes = 128;

struct NetworkLibrary {
  int protocol_version;
  Kernels kernels;
  // All functions except `address_at` use the current GPU, the only one of the process. An int that
  // they return is 0 or NVSHMEM's error.
  int (*make_unique_id)(char* id);
  // All processes call this function together, with the same id.
  int (*start)(const char* id, int process, int num_processes);
  // All processes call this function together. Returns zeroed memory, at the same place of each
  // process's symmetric memory, or null if too little is left.
  void* (*allocate)(size_t bytes);
  // Returns the address of another process's memory at `address` for loads and stores of this
  // process; null if that process is inter-node.
  void* (*address_at)(const void* address, int process);
  // Waits until all puts of kernels have arrived.
  cudaError_t (*quiet)();
};

// Returns the functions of the loaded library, or null.
const NetworkLibrary* GetNetwork();

// Loads the library once. NVSHMEM's host library must be loaded already. `path`: the path of
// libmoe_a2a_network.so.
Problem LoadNetwork(const std::string& path);

// Does the steps that can fail in a single process. It precedes StartNetwork(), in which the other
// processes would wait without a bound for a process that failed.
Problem PrepareNetwork(int ordinal);

// Starts NVSHMEM for a device of this process, together with all other processes.
Problem StartNetwork(int ordinal, const char* id, int process, int num_processes);

}  // namespace moe_a2a

#endif  // MOE_A2A_RUNTIME_NETWORK_H_
