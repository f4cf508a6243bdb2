#include "runtime/network.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <atomic>

#include "runtime/driver.h"

namespace moe_a2a {
namespace {

std::atomic<const NetworkLibrary*> loaded{nullptr};

Problem SetDevice(int ordinal) {
  const cudaError_t error = cudaSetDevice(ordinal);
  if (error == cudaSuccess) return {};
  return std::string("choosing a device for NVSHMEM: ") + cudaGetErrorString(error);
}

}  // namespace

const NetworkLibrary* GetNetwork() { return loaded.load(); }

Problem LoadNetwork(const std::string& path) {
  if (GetNetwork() != nullptr) return {};
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return std::string("loading the kernels for several hosts: ") + dlerror();
  const auto get = reinterpret_cast<const NetworkLibrary* (*)()>(dlsym(library, "moe_a2a_network"));
  if (get == nullptr) return path + " has no kernels";
  if (get()->protocol_version != kProtocolVersion) return path + " has another version";
  loaded = get();
  return {};
}

Problem PrepareNetwork(int ordinal) {
  DeviceScope scope;
  return SetDevice(ordinal);
}

Problem StartNetwork(int ordinal, const char* id, int process, int num_processes) {
  DeviceScope scope;
  if (Problem p = SetDevice(ordinal); !p.empty()) return p;
  const int status = GetNetwork()->start(id, process, num_processes);
  if (status == 0) return {};
  return "NVSHMEM does not start (status " + std::to_string(status) +
         "). Set NVSHMEM_DEBUG=INFO to see why, or use a group with "
         "implementation='portable'";
}

}  // namespace moe_a2a
