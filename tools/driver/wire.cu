// Measures the link limit: a plain kernel on every GPU stores to all its peers at the same time.
//
//   wire N BYTES...   each of the first N GPUs sends BYTES in total, an equal part to each peer
//
// Prints JSON: `gpus`, `name` and `results`. Each result has `bytes`, `blocks` (the fastest number
// of blocks), `median_us`, `min_us`, `max_us` and `gb_per_s`. benchmarks/wire.py builds and runs
// this program. A launch sends the bytes many times, so the latencies of the launch and of the last
// store do not affect the result.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "driver.h"

namespace moe_a2a {
namespace {

constexpr int kMaxPeers = 15;
constexpr int kThreads = 1024;
constexpr int kUnroll = 4;
constexpr int kSamples = 7;
constexpr int kBlocks[] = {8, 16, 32, 64};
constexpr double kLaunchBytes = 3e9;  // per launch: about 10 ms at the speed of NVLink 4
constexpr double kMaxRounds = 5000;
// The least size of the arrays, so that they do not fit in the L2 cache.
constexpr int64_t kLeastBytes = 192 << 20;

struct Peers {
  int count;
  uint4* zone[kMaxPeers];  // addresses at which the peers receive this GPU's words
};

// Stores `count` words to each peer, `rounds` times. Each peer gets a different segment of `from`.
__global__ void __launch_bounds__(kThreads)
    StoreToPeers(const __grid_constant__ Peers peers, const uint4* from, int64_t count,
                 int rounds) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  const int64_t first = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (int round = 0; round < rounds; ++round) {
    for (int64_t base = first; base < count; base += kUnroll * stride) {
      for (int peer = 0; peer < peers.count; ++peer) {
        uint4 v[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const int64_t i = base + u * stride;
          if (i < count) v[u] = from[peer * count + i];
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const int64_t i = base + u * stride;
          if (i >= count) continue;
          asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(peers.zone[peer] + i),
                       "r"(v[u].x), "r"(v[u].y), "r"(v[u].z), "r"(v[u].w)
                       : "memory");
        }
      }
    }
  }
}

struct Gpu {
  TimedStream stream;
  uint4* from;
  uint4* zone;  // receives words: a segment for each peer, in the order of ranks
};

// The first `num_gpus` GPUs, with access to each other, and the measurements on them.
class Machine {
 public:
  Machine(int num_gpus, int64_t most_words) : size_(num_gpus), most_(most_words) {
    for (int g = 0; g < num_gpus; ++g) {
      CHECK(cudaSetDevice(g));
      gpus_.push_back(std::make_unique<Gpu>());
      SetUp(g, *gpus_[g]);
    }
  }

  int num_peers() const { return size_ - 1; }
  double bytes(int64_t words) const { return 16.0 * words * num_peers(); }

  // Measures one round, in which each GPU stores `words` words to each peer.
  Summary TimeStores(int64_t words, int blocks) {
    const int rounds = static_cast<int>(std::clamp(kLaunchBytes / bytes(words), 4.0, kMaxRounds));
    const auto store = [&](int g) { Store(g, blocks, words, rounds); };
    std::vector<double> us;
    Time(store);
    for (int i = 0; i < kSamples; ++i) us.push_back(Time(store) / rounds);
    return Summary(us);
  }

 private:
  void SetUp(int g, Gpu& gpu) {
    for (int other = 0; other < size_; ++other) {
      if (other == g) continue;
      int reachable = 0;
      CHECK(cudaDeviceCanAccessPeer(&reachable, g, other));
      CHECK(reachable ? Problem() : "a GPU cannot access GPU " + std::to_string(other));
      CHECK(cudaDeviceEnablePeerAccess(other, 0));
    }
    CHECK(cudaMalloc(&gpu.from, bytes(most_)));
    CHECK(cudaMalloc(&gpu.zone, bytes(most_)));
    FillRandom<<<256, 256>>>(reinterpret_cast<float*>(gpu.from), 4 * most_ * num_peers(), g);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
  }

  // Calls launch(g) for all GPUs at the same time. Returns the longest time on a GPU, in
  // microseconds.
  template <typename Launch>
  double Time(const Launch& launch) {
    std::vector<double> us(size_);
    ForEachGpu(size_, [&](int g) {
      gpus_[g]->stream.Begin();
      launch(g);
      CHECK(cudaGetLastError());
      gpus_[g]->stream.End();
      us[g] = gpus_[g]->stream.Microseconds();
    });
    return *std::max_element(us.begin(), us.end());
  }

  // Returns the address in the memory of `peer` to which GPU g stores.
  uint4* ZoneOf(int g, int peer) const {
    return gpus_[peer]->zone + (g < peer ? g : g - 1) * most_;
  }

  void Store(int g, int blocks, int64_t words, int rounds) {
    Peers peers{num_peers(), {}};  // each GPU begins with a different peer
    for (int i = 0; i < num_peers(); ++i) peers.zone[i] = ZoneOf(g, (g + 1 + i) % size_);
    StoreToPeers<<<blocks, kThreads, 0, gpus_[g]->stream>>>(peers, gpus_[g]->from, words, rounds);
  }

  int size_;
  int64_t most_;  // the number of words for each peer that fit in the arrays
  std::vector<std::unique_ptr<Gpu>> gpus_;
};

// Tries all numbers of blocks. Prints the times with the fastest number.
void PrintStores(Machine& machine, int64_t asked_bytes, int64_t words) {
  int best = kBlocks[0];
  Summary us = machine.TimeStores(words, best);
  for (int blocks : kBlocks) {
    const Summary found = machine.TimeStores(words, blocks);
    if (found.median >= us.median) continue;
    us = found;
    best = blocks;
  }
  std::printf(
      "{\"bytes\": %lld, \"blocks\": %d, \"median_us\": %.4f, \"min_us\": %.4f, \"max_us\": %.4f, "
      "\"gb_per_s\": %.2f}",
      static_cast<long long>(asked_bytes), best, us.median, us.least, us.greatest,
      machine.bytes(words) / us.median / 1e3);
  std::fflush(stdout);
}

void MeasureAll(int num_gpus, const std::vector<int64_t>& sizes) {
  const int64_t part = 16 * (num_gpus - 1);
  const int64_t most = std::max(*std::max_element(sizes.begin(), sizes.end()), kLeastBytes);
  Machine machine(num_gpus, (most + part - 1) / part);
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 0));
  std::printf("{\"gpus\": %d, \"name\": \"%s\", \"results\": [", num_gpus, properties.name);
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (i > 0) std::printf(", ");
    PrintStores(machine, sizes[i], (sizes[i] + part - 1) / part);
  }
  std::printf("]}\n");
}

}  // namespace
}  // namespace moe_a2a

int main(int argc, char** argv) {
  using namespace moe_a2a;
  int visible = 0;
  CHECK(cudaGetDeviceCount(&visible));
  const int num_gpus = argc > 1 ? ToInt(argv[1]) : 0;
  const int most = std::min(visible, kMaxPeers + 1);
  CHECK(argc > 2 && num_gpus >= 2 && num_gpus <= most
            ? Problem()
            : "needs 2 to " + std::to_string(most) + " GPUs, and a list of bytes");
  std::vector<int64_t> sizes;
  for (int i = 2; i < argc; ++i) {
    sizes.push_back(std::max<int64_t>(1, static_cast<int64_t>(ToNumber(argv[i]))));
  }
  MeasureAll(num_gpus, sizes);
}
