// The devices of all processes, by the ids that JAX assigns, and the process that holds each.
#pragma once

#include <cstdint>

#include "runtime/handoff.h"

namespace moe_a2a {

constexpr int kElsewhere = -1;

struct DevicePlace {
  int process = 0;
  int ordinal = kElsewhere;  // of the CUDA runtime; kElsewhere if another process holds the device
};

// Python registers every device of a mesh before it lowers a program with that mesh, and every
// process before this process requests memory from it.
void AddDevice(int64_t id, DevicePlace place);
void AddProcess(int process, Endpoint endpoint);

// These functions return false if nothing is registered.
bool FindDevice(int64_t id, DevicePlace* place);
bool FindOwnDevice(int ordinal, int64_t* id);  // of this process
bool FindProcess(int process, Endpoint* endpoint);

// SetEnded() marks a process that did not exist when it was sent a request. It may have been
// restarted with another socket, so Python calls HasEnded(), reads its notice, and calls
// AddProcess().
void SetEnded(int process);
bool HasEnded(int process);

}  // namespace moe_a2a
