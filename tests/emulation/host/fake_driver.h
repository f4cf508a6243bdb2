// A fake CUDA driver and runtime for the host code. Device memory consists of in-memory files at
// the addresses that the host code reserves. Work on a stream runs immediately.
#pragma once

#include <atomic>
#include <cstdint>

namespace fake_driver {

constexpr int kMaxDevices = 16;

// `room` is the memory of each device, and `used` is its allocated memory, in bytes.
extern std::atomic<int64_t> room[kMaxDevices], used[kMaxDevices];

// Numbers of existing handles and mappings. If they are not 0 at the end, memory has leaked.
extern std::atomic<int> handles, mappings;

// If true, the devices run work that does not end.
extern std::atomic<bool> are_busy;

// The number of launches of exchanges.
extern std::atomic<long> launches;

// The number of calls of the driver or the runtime before a call fails; negative: no call fails.
// Only calls that can fail count.
extern std::atomic<long> calls_until_failure;

}  // namespace fake_driver
