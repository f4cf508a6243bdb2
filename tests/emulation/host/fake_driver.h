// A fake CUDA driver and runtime for the host code. Device memory is a set of in-memory files,
// mapped where the host code asks. Work on a stream runs immediately.
#pragma once

#include <atomic>
#include <cstdint>

namespace fake_driver {

constexpr int kMaxDevices = 16;

// `room` is the memory of each device, and `used` is its allocated memory, in bytes.
extern std::atomic<int64_t> room[kMaxDevices], used[kMaxDevices];

// Numbers of existing handles and mappings. At the end of a check, both must be 0.
extern std::atomic<int> handles, mappings;

// If true, the devices seem to run work that does not end.
extern std::atomic<bool> are_busy;

// The number of launches of exchanges.
extern std::atomic<long> launches;

// How many calls of the driver or the runtime succeed before one fails, without the calls that
// never fail. Negative: no call fails.
extern std::atomic<long> calls_until_failure;

}  // namespace fake_driver
