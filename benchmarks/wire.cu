// The wire's own limit: every GPU stores to all its peers at once, from a plain kernel, and nothing
// else happens. Also the time a flag takes from one GPU to another.
//
//   wire BYTES...      bytes that each GPU sends in all, spread evenly over its peers; JSON on stdout
//
// Bytes are sent over and over inside one launch, so that neither the launch nor the latency of the
// last store counts: this is throughput, below which no exchange of those bytes can be.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(call)                                                                      \
  do {                                                                                   \
    const cudaError_t error = (call);                                                    \
    if (error != cudaSuccess) {                                                          \
      std::fprintf(stderr, "wire: %s: %s (line %d)\n", #call, cudaGetErrorString(error), \
                   __LINE__);                                                            \
      std::exit(1);                                                                      \
    }                                                                                    \
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

struct Peers {
  int count;
  uint4* zone[kMaxPeers];  // where this GPU's words land at each peer
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

// Stores `count` words to each peer, a part of `from` of its own for each, `rounds` times.
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

// Two GPUs throw a counter to and fro. `done` receives the number of catches.
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
  cudaStream_t stream;
  cudaEvent_t start, stop;
  uint4* from;
  uint4* zone;  // one part per peer, in the order of ranks
  uint32_t* flags;
};

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

// Runs `launch(gpu index)` on the GPUs at once; the longest time on any of them, in microseconds.
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

int main(int argc, char** argv) {
  int num_gpus = 0;
  CHECK(cudaGetDeviceCount(&num_gpus));
  const int num_peers = num_gpus - 1;
  if (num_peers < 1 || num_peers > kMaxPeers || argc < 2) {
    std::fprintf(stderr, "wire: needs 2 to %d GPUs and a list of bytes; got %d GPUs\n",
                 kMaxPeers + 1, num_gpus);
    return 1;
  }
  std::vector<int64_t> sizes;
  for (int i = 1; i < argc; ++i) sizes.push_back(std::max(1ll, std::atoll(argv[i])));
  const auto words_per_peer = [&](int64_t bytes) {
    const int64_t part = 16ll * num_peers;
    return (bytes + part - 1) / part;
  };
  const int64_t most = words_per_peer(*std::max_element(sizes.begin(), sizes.end()));

  std::vector<Gpu> gpus(num_gpus);
  for (int g = 0; g < num_gpus; ++g) {
    CHECK(cudaSetDevice(g));
    for (int other = 0; other < num_gpus; ++other) {
      if (other == g) continue;
      int reachable = 0;
      CHECK(cudaDeviceCanAccessPeer(&reachable, g, other));
      if (!reachable) {
        std::fprintf(stderr, "wire: GPU %d cannot access GPU %d\n", g, other);
        return 1;
      }
      CHECK(cudaDeviceEnablePeerAccess(other, 0));
    }
    CHECK(cudaStreamCreateWithFlags(&gpus[g].stream, cudaStreamNonBlocking));
    CHECK(cudaEventCreate(&gpus[g].start));
    CHECK(cudaEventCreate(&gpus[g].stop));
    CHECK(cudaMalloc(&gpus[g].from, most * num_peers * sizeof(uint4)));
    CHECK(cudaMalloc(&gpus[g].zone, most * num_peers * sizeof(uint4)));
    CHECK(cudaMalloc(&gpus[g].flags, 256));
    CHECK(cudaMemset(gpus[g].flags, 0, 256));
    CHECK(cudaMemset(gpus[g].zone, 0xA5, most * num_peers * sizeof(uint4)));
    // Loaded now: loading it while its partner spins could wait for the partner.
    cudaFuncAttributes attributes;
    CHECK(cudaFuncGetAttributes(&attributes, ping));
    fill<<<256, 256>>>(gpus[g].from, most * num_peers, g);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
  }
  // GPU g's part at peer p: parts lie in the order of ranks, without p's own.
  const auto part_of = [](int g, int p) { return g < p ? g : g - 1; };
  const auto peers_of = [&](int g) {
    Peers peers{num_peers, {}};
    for (int i = 0; i < num_peers; ++i) {
      const int p = (g + 1 + i) % num_gpus;  // another first peer for each GPU
      peers.zone[i] = gpus[p].zone + part_of(g, p) * most;
    }
    return peers;
  };
  const auto send = [&](int g, int blocks, int64_t words, int rounds) {
    store_to_peers<<<blocks, kThreads, 0, gpus[g].stream>>>(peers_of(g), gpus[g].from, words,
                                                            rounds);
  };

  time_us(gpus, num_gpus, [&](int g) { send(g, 32, most, 1); });
  unsigned long long wrong = 0;
  for (int p = 0; p < num_gpus; ++p) {
    CHECK(cudaSetDevice(p));
    unsigned long long* counter = nullptr;
    CHECK(cudaMalloc(&counter, sizeof(wrong)));
    CHECK(cudaMemset(counter, 0, sizeof(wrong)));
    for (int g = 0; g < num_gpus; ++g) {
      if (g == p) continue;
      const int index = (p - g - 1 + num_gpus) % num_gpus;  // of p among g's peers
      count_wrong<<<256, 256>>>(gpus[p].zone + part_of(g, p) * most, most, index * most, g,
                                counter);
      CHECK(cudaGetLastError());
    }
    unsigned long long here = 0;
    CHECK(cudaMemcpy(&here, counter, sizeof(here), cudaMemcpyDeviceToHost));
    CHECK(cudaFree(counter));
    wrong += here;
  }
  if (wrong != 0) {
    std::fprintf(stderr, "wire: %llu words did not arrive\n", wrong);
    return 1;
  }

  const double pings_us = time_us(gpus, 2, [&](int g) {
    ping<<<1, 1, 0, gpus[g].stream>>>(gpus[g].flags, gpus[1 - g].flags, g == 0, gpus[g].flags + 16);
  });
  for (int g = 0; g < 2; ++g) {
    uint32_t caught = 0;
    CHECK(cudaSetDevice(g));
    CHECK(cudaMemcpy(&caught, gpus[g].flags + 16, sizeof(caught), cudaMemcpyDeviceToHost));
    if (caught != kPings) {
      std::fprintf(stderr, "wire: GPU %d waited too long for a flag, after %u of them\n", g,
                   caught);
      return 1;
    }
  }

  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 0));
  std::printf("{\"gpus\": %d, \"name\": \"%s\", \"flag_us\": %.3f, \"results\": [", num_gpus,
              properties.name, pings_us / (2.0 * kPings));
  for (size_t s = 0; s < sizes.size(); ++s) {
    const int64_t words = words_per_peer(sizes[s]);
    const double bytes = 16.0 * words * num_peers;
    const int rounds = static_cast<int>(std::clamp(kLaunchBytes / bytes, 4.0, double{kMaxRounds}));
    std::vector<double> best;
    int best_blocks = 0;
    for (int blocks : kBlocks) {
      std::vector<double> us;
      for (int sample = -1; sample < kSamples; ++sample) {
        const double t = time_us(gpus, num_gpus, [&](int g) { send(g, blocks, words, rounds); });
        if (sample >= 0) us.push_back(t / rounds);
      }
      if (best.empty() || median(us) < median(best)) {
        best = us;
        best_blocks = blocks;
      }
    }
    std::printf(
        "%s{\"bytes\": %lld, \"blocks\": %d, \"median_us\": %.4f, \"min_us\": %.4f, "
        "\"max_us\": %.4f, \"gb_per_s\": %.2f}",
        s == 0 ? "" : ", ", static_cast<long long>(sizes[s]), best_blocks, median(best),
        *std::min_element(best.begin(), best.end()), *std::max_element(best.begin(), best.end()),
        bytes / median(best) / 1e3);
    std::fflush(stdout);
  }
  std::printf("]}\n");
  return 0;
}
