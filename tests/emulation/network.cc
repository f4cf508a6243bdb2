// Compiled without instrumentation, like block.cc, because a put orders no memory for its caller.
// The mutex of a queue orders the putting thread's accesses before the put, as NVSHMEM does.
#include "network.h"

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <deque>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "block.h"
#include "fiber.h"

namespace emulation {
namespace {

constexpr int kMaxRanks = 64;

struct Put {
  void* to;
  const void* from;
  size_t bytes;
  uint64_t* signal;
  uint64_t value;
  unsigned fences;  // number of its rank's fences before it
};

struct Sender {
  std::mutex mutex;
  std::deque<Put> queue[kMaxRanks];  // by destination
  unsigned fences = 0;
};

char* bases[kMaxRanks];
Sender senders[kMaxRanks];
std::vector<std::thread> carriers;
std::atomic<bool> is_ending{false};
std::atomic<long> num_puts{0}, num_reordered{0};
bool fences_hold = true;
int ranks = 0;

void carry_out(const Put& put, int from_rank, int to_rank) {
  const auto there = [&](void* address) {
    return bases[to_rank] + (static_cast<char*>(address) - bases[from_rank]);
  };
  if (put.bytes > 0) std::memcpy(there(put.to), put.from, put.bytes);
  if (put.signal != nullptr) {
    publish(there(put.signal));
    __atomic_store_n(reinterpret_cast<uint64_t*>(there(put.signal)), put.value, __ATOMIC_RELEASE);
  }
}

// Delivers the puts of one rank until the network ends.
void carry(int rank, uint64_t seed) {
  std::mt19937_64 random(seed);
  Sender& sender = senders[rank];
  while (true) {
    bool any = false;
    for (int to = 0; to < ranks; ++to) {
      Put put;
      bool overtakes;
      {
        std::lock_guard<std::mutex> lock(sender.mutex);
        auto& queue = sender.queue[to];
        any = any || !queue.empty();
        if (queue.empty() || random() % 3 == 0) continue;
        size_t choices = 0;
        while (choices < queue.size() && queue[choices].fences == queue.front().fences) ++choices;
        const size_t chosen = random() % choices;
        overtakes = chosen > 0;
        if (overtakes) ++num_reordered;
        put = queue[chosen];
        queue.erase(queue.begin() + static_cast<long>(chosen));
      }
      carry_out(put, rank, to);
      if (overtakes) usleep(1000);  // long enough for a reader to see that it has overtaken
    }
    if (!any && is_ending) return;
    if (!any || random() % 4 == 0) usleep(static_cast<useconds_t>(random() % 50));
  }
}

}  // namespace

char*& network_base(int rank) { return bases[rank]; }

void put(void* to, const void* from, size_t bytes, uint64_t* signal, uint64_t value, int to_rank) {
  Sender& sender = senders[rank_of_block()];
  ++num_puts;
  std::lock_guard<std::mutex> lock(sender.mutex);
  sender.queue[to_rank].push_back({to, from, bytes, signal, value, sender.fences});
}

void fence_network() {
  if (!fences_hold) return;
  Sender& sender = senders[rank_of_block()];
  std::lock_guard<std::mutex> lock(sender.mutex);
  ++sender.fences;
}

void start_network(int num_ranks, bool keeps_fences, uint64_t seed) {
  ranks = num_ranks;
  fences_hold = keeps_fences;
  for (int rank = 0; rank < num_ranks; ++rank) carriers.emplace_back(carry, rank, seed * 64 + rank);
}

void end_network() {
  is_ending = true;
  for (std::thread& carrier : carriers) carrier.join();
  if (num_puts > 0) {
    std::printf("network: %ld puts, %ld out of order\n", num_puts.load(), num_reordered.load());
  }
}

}  // namespace emulation
