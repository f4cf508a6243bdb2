// The library for inter-node ranks. It exports the kernels that are built with NVSHMEM, and
// functions of NVSHMEM.
#include <cstring>

#include "kernels/launch.h"
#include "runtime/network.h"

#include <nvshmem.h>
#include <nvshmemx.h>

namespace moe_a2a {
namespace {

static_assert(sizeof(nvshmemx_uniqueid_t) == kUniqueIdBytes);

int MakeUniqueId(char* id) {
  nvshmemx_uniqueid_t unique = NVSHMEMX_UNIQUEID_INITIALIZER;
  const int status = nvshmemx_get_uniqueid(&unique);
  std::memcpy(id, &unique, sizeof(unique));
  return status;
}

int Start(const char* id, int process, int num_processes) {
  nvshmemx_uniqueid_t unique;
  std::memcpy(&unique, id, sizeof(unique));
  nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
  const int status = nvshmemx_set_attr_uniqueid_args(process, num_processes, &unique, &attributes);
  if (status != 0) return status;
  // nvshmemx_init_attr() calls this function too, but ends the process if it fails.
  int provided;
  return nvshmemi_init_thread(
      NVSHMEM_THREAD_SERIALIZED, &provided, NVSHMEMX_INIT_WITH_UNIQUEID, &attributes,
      {NVSHMEM_VENDOR_MAJOR_VERSION, NVSHMEM_VENDOR_MINOR_VERSION, NVSHMEM_VENDOR_PATCH_VERSION});
}

void* Allocate(size_t bytes) { return nvshmem_calloc(1, bytes); }

void* AddressAt(const void* address, int process) { return nvshmem_ptr(address, process); }

cudaError_t Quiet() {
  nvshmemx_quiet_on_stream(cudaStreamPerThread);
  return cudaStreamSynchronize(cudaStreamPerThread);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const NetworkLibrary* moe_a2a_network() {
  static const NetworkLibrary library = {kProtocolVersion, NetworkKernels(), MakeUniqueId, Start,
                                         Allocate,         AddressAt,        Quiet};
  return &library;
}

}  // namespace moe_a2a
