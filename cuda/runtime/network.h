// The interface of the library for inter-node ranks: the kernels built with NVSHMEM, and its memory. It is a library
// of its own, loaded if a group needs it, because it needs NVSHMEM's.
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
  // All but `address_at` are for one GPU per process, the current one. Not 0: NVSHMEM's status.
  int (*make_unique_id)(char* id);
  // Together with all other processes, which have the same id.
  int (*start)(const char* id, int process, int num_processes);
  // Likewise; zeroed memory, at the same place of the symmetric memory of each process. Null: there is none.
  void* (*allocate)(size_t bytes);
  // The address at which this process loads and stores what another process has at `address`; null if it is inter-node.
  void* (*address_at)(const void* address, int process);
  // Waits until all puts of kernels have arrived.
  cudaError_t (*quiet)();
};

// The functions of the loaded library, or null.
const NetworkLibrary* GetNetwork();

// Loads the library, once; NVSHMEM's host library must be loaded already. `path` is that of libmoe_a2a_network.so.
Problem LoadNetwork(const std::string& path);

// Does what can fail in this process by itself before StartNetwork(), in which the others wait without a bound.
Problem PrepareNetwork(int ordinal);

// Starts NVSHMEM for a device of this process, together with all other processes.
Problem StartNetwork(int ordinal, const char* id, int process, int num_processes);

}  // namespace moe_a2a

#endif  // MOE_A2A_RUNTIME_NETWORK_H_
