// Measures the link limit: in a plain kernel, every GPU stores to all its peers at the same time. Also measures the
// time that a flag takes from one GPU to another, and the rate of a GPU's own memory.
//
//   wire GPUS BYTES...   BYTES: what each of the first GPUS sends in total, evenly to all its peers. Prints JSON.
//
// A launch sends the bytes many times, so that neither the launch nor the latency of the last store counts. The result
// is the throughput of the links; no exchange of these bytes can take less time.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#define CHECK(call)                                                                                \
  do {                                                                                             \
    const cudaError_t error = (call);                                                              \
    if (error != cudaSuccess) {                                                                    \
      throw std::runtime_error(std::string(#call) + ": " + cudaGetErrorString(error) + " (line " + \
                               std::to_string(__LINE__) + ")");                                    \
    }                                                                                              \
  } while (false)

constexpr int kMaxPeers = 15;
constexpr int kThreads = 1024;
constexpr int kUnroll = 4;
constexpr int kSamples = 7;
constexpr int kBlocks[] = {8, 16, 32, 64};
constexpr double kLaunchBytes = 3e9;  // per launch: about 10 ms at the speed of NVLink 4
constexpr int kMaxRounds = 5000;
constexpr int kPings = 5000;
constexpr uint64_t kPatienceNs = 2000000000;
constexpr int64_t kLeastBytes = 192
                                << 20;  // of the arrays, so that they do not fit in the L2 cache

struct Peers {
  int count;
  uint4* zone[kMaxPeers];  // where each peer receives this GPU's words
};

__device__ uint32_t mix(uint64_t i, uint32_t rank) {
  uint32_t h = static_cast<uint32_t>(i) * 2654435761u + rank * 40503u + 1u;
  h ^= h >> 15;
  return h * 2246822519u;
}

__global__ void fill(uint4* words, int64_t count, uint32_t rank) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    words[i] = {mix(i, rank), mix(i + 1, rank), mix(i + 2, rank), mix(i + 3, rank)};
  }
}

__device__ void store(uint4* to, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

// Stores `count` words to each peer, `rounds` times. Every peer receives a different segment of `from`.
__global__ void __launch_bounds__(kThreads)
    store_to_peers(const __grid_constant__ Peers peers, const uint4* from, int64_t count,
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
          if (i < count) store(peers.zone[peer] + i, v[u]);
        }
      }
    }
  }
}

__global__ void count_wrong(const uint4* words, int64_t count, int64_t skip, uint32_t rank,
                            unsigned long long* wrong) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    const uint4 v = words[i];
    const int64_t j = i + skip;
    if (v.x != mix(j, rank) || v.y != mix(j + 1, rank) || v.z != mix(j + 2, rank) ||
        v.w != mix(j + 3, rank)) {
      atomicAdd(wrong, 1ull);
    }
  }
}

__device__ uint64_t now_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// Two GPUs send a counter to each other in turn. `done` receives the number of messages that have arrived.
__global__ void ping(uint32_t* mine, uint32_t* theirs, int serves, uint32_t* done) {
  const uint64_t deadline = now_ns() + kPatienceNs;
  for (uint32_t i = 1; i <= kPings; ++i) {
    if (serves)
      asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(theirs), "r"(i) : "memory");
    uint32_t seen = 0;
    while (seen < i) {
      asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(mine) : "memory");
      if (now_ns() > deadline) return;
    }
    if (!serves)
      asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(theirs), "r"(i) : "memory");
    *done = i;
  }
}

struct Gpu {
  int sms;
  cudaStream_t stream;
  cudaEvent_t start, stop;
  uint4* from;
  uint4* zone;  // a segment per peer, in the order of ranks
  uint32_t* flags;
};

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

// Runs `launch(gpu index)` on all GPUs at the same time. Returns the longest time of a GPU in microseconds.
template <typename Launch>
double time_us(const std::vector<Gpu>& gpus, int count, Launch&& launch) {
  for (int g = 0; g < count; ++g) {
    CHECK(cudaSetDevice(g));
    CHECK(cudaEventRecord(gpus[g].start, gpus[g].stream));
    launch(g);
    CHECK(cudaGetLastError());
    CHECK(cudaEventRecord(gpus[g].stop, gpus[g].stream));
  }
  double longest = 0;
  for (int g = 0; g < count; ++g) {
    CHECK(cudaSetDevice(g));
    CHECK(cudaEventSynchronize(gpus[g].stop));
    float ms = 0;
    CHECK(cudaEventElapsedTime(&ms, gpus[g].start, gpus[g].stop));
    longest = std::max(longest, ms * 1e3);
  }
  return longest;
}

// The first GPUs of the machine, with access to each other's memory, and the measurements.
class Machine {
 public:
  Machine(int num_gpus, int64_t most_words) : gpus_(num_gpus), most_(most_words) {
    for (int g = 0; g < size(); ++g) set_up(g);
  }

  int size() const { return static_cast<int>(gpus_.size()); }
  int num_peers() const { return size() - 1; }

  // Checks that the stores reach the peers, before anything is timed.
  void check_stores() {
    clear_zones();
    time_us(gpus_, size(), [&](int g) { store(g, 32, most_, 1); });
    check_zones("plain stores");
  }

  double flag_us() {
    const double us = time_us(gpus_, 2, [&](int g) {
      ping<<<1, 1, 0, gpus_[g].stream>>>(gpus_[g].flags, gpus_[1 - g].flags, g == 0,
                                         gpus_[g].flags + 16);
    });
    for (int g = 0; g < 2; ++g) {
      uint32_t caught = 0;
      CHECK(cudaSetDevice(g));
      CHECK(cudaMemcpy(&caught, gpus_[g].flags + 16, sizeof(caught), cudaMemcpyDeviceToHost));
      if (caught != kPings) {
        throw std::runtime_error("GPU " + std::to_string(g) + " waited too long for a flag");
      }
    }
    return us / (2.0 * kPings);
  }

  // Returns the GB/s of a copy within each GPU's memory; reads and writes both count.
  double local_gb_per_s() {
    std::vector<double> us;
    for (int sample = -1; sample < kSamples; ++sample) {
      const double t = time_us(gpus_, size(), [&](int g) {
        Peers self{num_peers(), {}};
        for (int i = 0; i < num_peers(); ++i) self.zone[i] = gpus_[g].zone + i * most_;
        store_to_peers<<<2 * gpus_[g].sms, kThreads, 0, gpus_[g].stream>>>(self, gpus_[g].from,
                                                                           most_, 4);
      });
      if (sample >= 0) us.push_back(t / 4);
    }
    return 2.0 * most_ * num_peers() * sizeof(uint4) / median(us) / 1e3;
  }

  // Returns the times of one round of plain stores of `words` words to each peer.
  std::vector<double> time_stores(int64_t words, int blocks) {
    const int rounds = rounds_of(words, kLaunchBytes);
    std::vector<double> us;
    for (int sample = -1; sample < kSamples; ++sample) {
      const double t = time_us(gpus_, size(), [&](int g) { store(g, blocks, words, rounds); });
      if (sample >= 0) us.push_back(t / rounds);
    }
    return us;
  }

  double bytes(int64_t words) const { return 16.0 * words * num_peers(); }

 private:
  void set_up(int g) {
    Gpu& gpu = gpus_[g];
    CHECK(cudaSetDevice(g));
    for (int other = 0; other < size(); ++other) {
      if (other == g) continue;
      int reachable = 0;
      CHECK(cudaDeviceCanAccessPeer(&reachable, g, other));
      if (!reachable) {
        throw std::runtime_error("GPU " + std::to_string(g) + " cannot access GPU " +
                                 std::to_string(other));
      }
      CHECK(cudaDeviceEnablePeerAccess(other, 0));
    }
    CHECK(cudaStreamCreateWithFlags(&gpu.stream, cudaStreamNonBlocking));
    CHECK(cudaEventCreate(&gpu.start));
    CHECK(cudaEventCreate(&gpu.stop));
    CHECK(cudaDeviceGetAttribute(&gpu.sms, cudaDevAttrMultiProcessorCount, g));
    CHECK(cudaMalloc(&gpu.from, most_ * num_peers() * sizeof(uint4)));
    CHECK(cudaMalloc(&gpu.zone, most_ * num_peers() * sizeof(uint4)));
    CHECK(cudaMalloc(&gpu.flags, 256));
    CHECK(cudaMemset(gpu.flags, 0, 256));
    // The kernel is loaded now. Later, loading it could wait for the partner, which already spins.
    cudaFuncAttributes attributes;
    CHECK(cudaFuncGetAttributes(&attributes, ping));
    fill<<<256, 256>>>(gpu.from, most_ * num_peers(), g);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
  }

  // The index of GPU g's segment at peer p. Segments lie in the order of ranks, without p.
  static int part_of(int g, int p) { return g < p ? g : g - 1; }
  // The index of p among g's peers. Every GPU begins with another peer.
  int index_of(int g, int p) const { return (p - g - 1 + size()) % size(); }
  int peer_of(int g, int index) const { return (g + 1 + index) % size(); }

  int rounds_of(int64_t words, double launch_bytes) const {
    return static_cast<int>(std::clamp(launch_bytes / bytes(words), 4.0, double{kMaxRounds}));
  }

  void store(int g, int blocks, int64_t words, int rounds) {
    Peers peers{num_peers(), {}};
    for (int i = 0; i < num_peers(); ++i) {
      const int p = peer_of(g, i);
      peers.zone[i] = gpus_[p].zone + part_of(g, p) * most_;
    }
    store_to_peers<<<blocks, kThreads, 0, gpus_[g].stream>>>(peers, gpus_[g].from, words, rounds);
  }

  void clear_zones() {
    for (int g = 0; g < size(); ++g) {
      CHECK(cudaSetDevice(g));
      CHECK(cudaMemset(gpus_[g].zone, 0xA5, most_ * num_peers() * sizeof(uint4)));
      CHECK(cudaDeviceSynchronize());
    }
  }

  // Checks all words of all zones after each peer has sent `most_` words.
  void check_zones(const char* what) {
    unsigned long long wrong = 0;
    for (int p = 0; p < size(); ++p) {
      CHECK(cudaSetDevice(p));
      unsigned long long* counter = nullptr;
      CHECK(cudaMalloc(&counter, sizeof(wrong)));
      CHECK(cudaMemset(counter, 0, sizeof(wrong)));
      for (int g = 0; g < size(); ++g) {
        if (g == p) continue;
        count_wrong<<<256, 256>>>(gpus_[p].zone + part_of(g, p) * most_, most_,
                                  index_of(g, p) * most_, g, counter);
        CHECK(cudaGetLastError());
      }
      unsigned long long here = 0;
      CHECK(cudaMemcpy(&here, counter, sizeof(here), cudaMemcpyDeviceToHost));
      CHECK(cudaFree(counter));
      wrong += here;
    }
    if (wrong != 0) {
      throw std::runtime_error(std::to_string(wrong) + " words did not arrive by " + what);
    }
  }

  std::vector<Gpu> gpus_;
  int64_t most_;  // the most words for each peer that fit in the arrays
};

// Prints `name: {...}` of a measurement, without the closing brace.
void print_times(double bytes, int blocks, const std::vector<double>& us) {
  std::printf(
      "\"blocks\": %d, \"median_us\": %.4f, \"min_us\": %.4f, \"max_us\": %.4f, "
      "\"gb_per_s\": %.2f",
      blocks, median(us), *std::min_element(us.begin(), us.end()),
      *std::max_element(us.begin(), us.end()), bytes / median(us) / 1e3);
}

void print_stores(Machine& machine, int64_t asked_bytes, int64_t words) {
  std::vector<double> best;
  int best_blocks = 0;
  for (int blocks : kBlocks) {
    const std::vector<double> us = machine.time_stores(words, blocks);
    if (best.empty() || median(us) < median(best)) {
      best = us;
      best_blocks = blocks;
    }
  }
  std::printf("{\"bytes\": %lld, ", static_cast<long long>(asked_bytes));
  print_times(machine.bytes(words), best_blocks, best);
  std::printf("}");
  std::fflush(stdout);
}

void run(int num_gpus, const std::vector<int64_t>& sizes) {
  const int num_peers = num_gpus - 1;
  const auto words_per_peer = [&](int64_t bytes) {
    const int64_t part = 16ll * num_peers;
    return (bytes + part - 1) / part;
  };
  const int64_t greatest = *std::max_element(sizes.begin(), sizes.end());
  Machine machine(num_gpus, words_per_peer(std::max(greatest, kLeastBytes)));
  machine.check_stores();
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 0));
  const double flag_us = machine.flag_us();
  std::printf("{\"gpus\": %d, \"name\": \"%s\", \"flag_us\": %.3f, \"local_gb_per_s\": %.1f, ",
              num_gpus, properties.name, flag_us, machine.local_gb_per_s());
  std::printf("\"results\": [");
  for (size_t s = 0; s < sizes.size(); ++s) {
    if (s > 0) std::printf(", ");
    print_stores(machine, sizes[s], words_per_peer(sizes[s]));
  }
  std::printf("]}\n");
}

int main(int argc, char** argv) {
  try {
    int found = 0;
    CHECK(cudaGetDeviceCount(&found));
    const int num_gpus = argc > 1 ? std::atoi(argv[1]) : 0;
    if (argc < 3 || num_gpus < 2 || num_gpus > std::min(found, kMaxPeers + 1)) {
      throw std::runtime_error("needs 2 to " + std::to_string(std::min(found, kMaxPeers + 1)) +
                               " GPUs, and a list of bytes");
    }
    std::vector<int64_t> sizes;
    for (int i = 2; i < argc; ++i) sizes.push_back(std::max(1ll, std::atoll(argv[i])));
    run(num_gpus, sizes);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "wire: %s\n", error.what());
    return 1;
  }
  return 0;
}
