#include "launch.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "block.h"
#include "layout.h"

namespace emulation {
namespace {

struct LoadedKernel {
  CallKernel call;
  size_t dynamic_shared_bytes;
};

std::map<const void*, LoadedKernel>& loaded_kernels() {
  static std::map<const void*, LoadedKernel> kernels;
  return kernels;
}

int residency = 1 << 20;
std::atomic<uint64_t> next_seed{1};

// Accesses are relaxed. ThreadSanitizer would otherwise see an order between blocks that a GPU does
// not have.
std::atomic<int>& running_on(int rank) {
  static std::atomic<int> running[1 + moe_a2a::kMaxRanks];
  return running[rank == kAllRanks ? 0 : 1 + rank];
}

void take_room(int rank) {
  std::atomic<int>& running = running_on(rank);
  int before = running.load(std::memory_order_relaxed);
  while (true) {
    if (before >= residency) {
      usleep(20);
      before = running.load(std::memory_order_relaxed);
    } else if (running.compare_exchange_weak(before, before + 1, std::memory_order_relaxed)) {
      return;
    }
  }
}
void give_room_back(int rank) { running_on(rank).fetch_sub(1, std::memory_order_relaxed); }

}  // namespace

void load_kernel(const void* kernel, CallKernel call, size_t dynamic_shared_bytes) {
  loaded_kernels()[kernel] = {call, std::max(dynamic_shared_bytes, kStaticLimit)};
}

void set_residency(int blocks) { residency = blocks; }

void set_seed(uint64_t seed) { next_seed = seed * 1000003 + 1; }

}  // namespace emulation

cudaError_t cudaLaunchKernel(const void* kernel, dim3 blocks, dim3 threads, void** arguments,
                             size_t shared_bytes, cudaStream_t stream) {
  using namespace emulation;
  const auto found = loaded_kernels().find(kernel);
  if (found == loaded_kernels().end()) {
    std::fprintf(stderr, "EMULATOR: a kernel is launched that its Load function has not loaded\n");
    std::abort();
  }
  const LoadedKernel& loaded = found->second;
  if (blocks.x == 0 || blocks.y == 0 || shared_bytes > loaded.dynamic_shared_bytes)
    return cudaErrorInvalidValue;
  std::mt19937_64 random(next_seed++);
  std::vector<Index> order;
  for (unsigned y = 0; y < blocks.y; ++y) {
    for (unsigned x = 0; x < blocks.x; ++x) order.push_back({x, y});
    std::shuffle(order.end() - blocks.x, order.end(), random);
  }
  const int rank = static_cast<int>(reinterpret_cast<uintptr_t>(stream)) - 1;
  // Threads are detached, because a joinable thread keeps its stack after its end.
  int num_started = 0;
  size_t num_left = order.size();
  std::mutex mutex;
  std::condition_variable is_over;
  for (const Index index : order) {
    take_room(rank);
    const bool has_all_ranks = rank == kAllRanks;
    const BlockStart start = {index,
                              {blocks.x, blocks.y},
                              threads.x,
                              shared_bytes,
                              random(),
                              has_all_ranks ? static_cast<int>(index.x) : rank,
                              static_cast<int>(has_all_ranks ? index.y : num_started),
                              kernel,
                              loaded.call,
                              arguments};
    ++num_started;
    std::thread([&, start] {
      run_block(start);
      give_room_back(rank);
      const std::lock_guard lock(mutex);
      if (--num_left == 0) is_over.notify_all();
    }).detach();
  }
  std::unique_lock lock(mutex);
  is_over.wait(lock, [&] { return num_left == 0; });
  return cudaSuccess;
}
