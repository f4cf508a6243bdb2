// A CUDA driver and runtime for the host code: device memory is files in memory, mapped where the code reserves
// addresses. Work on a stream is done at once.
#pragma once

#include <atomic>
#include <cstdint>

namespace fake_driver {

constexpr int kMaxDevices = 16;

// Bytes that a device has, and has given away.
extern std::atomic<int64_t> room[kMaxDevices], used[kMaxDevices];

// Handles and mappings that exist: what is left of them at the end has leaked.
extern std::atomic<int> handles, mappings;

// True if the devices run work that does not end.
extern std::atomic<bool> are_busy;

// Launches of exchanges.
extern std::atomic<long> launches;

// The call of the driver or the runtime that fails, counted down to 0; negative: none. Every call that can fail counts.
extern std::atomic<long> calls_until_failure;

}  // namespace fake_driver
