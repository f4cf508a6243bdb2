// A registry of the devices of all processes, by the ids that JAX assigns, and of the process that
// holds each device.
#pragma once

#include <cstdint>

#include "runtime/handoff.h"

namespace moe_a2a {

constexpr int kElsewhere = -1;

struct DevicePlace {
  int process = 0;
  int ordinal = kElsewhere;  // of the CUDA runtime; kElsewhere if another process holds the device
};

// Python registers every device of a mesh before it lowers a program with that mesh. It registers
// every process before this process requests memory from that process.
void AddDevice(int64_t id, DevicePlace place);
void AddProcess(int process, Endpoint endpoint);

// These functions return false if nothing is registered.
bool FindDevice(int64_t id, DevicePlace* place);
bool FindOwnDevice(int ordinal, int64_t* id);  // of this process
bool FindProcess(int process, Endpoint* endpoint);

// SetEnded() marks a process that no longer existed when this process sent it a request. The marked
// process may have been restarted with another socket. Python therefore calls HasEnded(), reads
// that process's notice again, and calls AddProcess().
void SetEnded(int process);
bool HasEnded(int process);

}  // namespace moe_a2a
