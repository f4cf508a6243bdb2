// Limits the time that the caller waits for a call of CUDA, which may block forever. The call runs
// in a separate thread.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>
#include <utility>

namespace moe_a2a {

// Runs `work` in a thread. Returns false if `work` has not ended after `time`. The thread then
// continues, so `work` must own everything that it uses.
inline bool EndsWithin(std::chrono::nanoseconds time, std::function<void()> work) {
  const auto deadline = std::chrono::steady_clock::now() + time;
  auto has_ended = std::make_shared<std::atomic<bool>>(false);
  std::thread([has_ended, work = std::move(work)] {
    work();
    *has_ended = true;
  }).detach();
  while (!*has_ended) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return true;
}

}  // namespace moe_a2a
