// A registry of the devices of all processes, by JAX's ids, and of the processes.
#pragma once

#include <cstdint>

#include "runtime/handoff.h"

namespace moe_a2a {

constexpr int kElsewhere = -1;

struct DevicePlace {
  int process = 0;
  int ordinal = kElsewhere;  // in the CUDA runtime; kElsewhere: of another process
};

// Python registers the devices of a mesh before it lowers a program with this mesh. Python
// registers another process before a workspace requests memory from that process.
void AddDevice(int64_t id, DevicePlace place);
void AddProcess(int process, Endpoint endpoint);

// These functions return false if nothing is registered.
bool FindDevice(int64_t id, DevicePlace* place);
bool FindOwnDevice(int ordinal, int64_t* id);  // of this process
bool FindProcess(int process, Endpoint* endpoint);

// SetEnded() marks a process that no longer exists. If HasEnded() is true, Python looks up the new
// socket that the restarted process has published, and calls AddProcess().
void SetEnded(int process);
bool HasEnded(int process);

}  // namespace moe_a2a
