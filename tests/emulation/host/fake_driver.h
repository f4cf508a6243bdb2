// Device memory is a set of in-memory files, mapped where the host code asks. Work on a stream runs
// immediately.
#pragma once

#include <atomic>
#include <cstdint>

namespace fake_driver {

constexpr int kMaxDevices = 16;

// In bytes, of each device.
extern std::atomic<int64_t> room[kMaxDevices], used[kMaxDevices];

// Must be 0 at the end of a check.
extern std::atomic<int> handles, mappings;

// The devices seem to run work that does not end.
extern std::atomic<bool> are_busy;

extern std::atomic<long> launches;

// So many calls succeed before one fails. Calls that cannot fail do not count. Negative: never.
extern std::atomic<long> calls_until_failure;

}  // namespace fake_driver
