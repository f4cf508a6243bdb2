// Registers the devices of all processes, by the ids that JAX assigns to them, and the process that holds each.
#ifndef MOE_A2A_RUNTIME_DEVICES_H_
#define MOE_A2A_RUNTIME_DEVICES_H_

#include <cstdint>

#include "runtime/handoff.h"

namespace moe_a2a {

constexpr int kElsewhere = -1;

struct DevicePlace {
  int process = 0;
  int ordinal = kElsewhere;  // of the CUDA runtime, in the process that holds it
};

// Python registers every device of a mesh before a program with it is lowered, and every process before its memory is
// asked for.
void AddDevice(int64_t id, DevicePlace place);
void AddProcess(int process, Endpoint endpoint);

// False: it was not registered.
bool FindDevice(int64_t id, DevicePlace* place);
bool FindOwnDevice(int ordinal, int64_t* id);  // of this process
bool FindProcess(int process, Endpoint* endpoint);

// A process that no longer existed when it was asked. It may have been started again and answer elsewhere. Python
// calls HasEnded(), reads its notice again, and calls AddProcess().
void SetEnded(int process);
bool HasEnded(int process);

}  // namespace moe_a2a

#endif  // MOE_A2A_RUNTIME_DEVICES_H_
