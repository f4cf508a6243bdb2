// Helpers of the drivers that run on all GPUs: a thread and a timed stream for each, and the
// summary of samples.
#pragma once

#include <algorithm>
#include <thread>
#include <vector>

#include "driver.h"

namespace moe_a2a {

// Calls body(gpu) for each of the first GPUs, with that GPU current. Each call has a separate
// thread, because calls for one GPU may wait for the other GPUs.
template <typename Body>
void ForEachGpu(int num_gpus, const Body& body) {
  std::vector<std::thread> threads;
  for (int gpu = 0; gpu < num_gpus; ++gpu) {
    threads.emplace_back([&body, gpu] {
      CHECK(cudaSetDevice(gpu));
      body(gpu);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// The median of samples, and the least and the greatest of them.
struct Summary {
  explicit Summary(std::vector<double> samples) {
    std::sort(samples.begin(), samples.end());
    median = samples[samples.size() / 2];
    least = samples.front();
    greatest = samples.back();
  }
  double median, least, greatest;
};

// A stream of the current device, and the time between two events on this stream.
class TimedStream {
 public:
  TimedStream() {
    CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    CHECK(cudaEventCreate(&begin_));
    CHECK(cudaEventCreate(&end_));
  }
  TimedStream(const TimedStream&) = delete;
  ~TimedStream() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
    cudaStreamDestroy(stream_);
  }

  operator cudaStream_t() const { return stream_; }
  void Begin(unsigned flags = 0) { CHECK(cudaEventRecordWithFlags(begin_, stream_, flags)); }
  void End(unsigned flags = 0) { CHECK(cudaEventRecordWithFlags(end_, stream_, flags)); }

  // Waits for the stream; returns the time.
  double Microseconds() {
    CHECK(cudaStreamSynchronize(stream_));
    CHECK(cudaGetLastError());
    float ms = 0;
    CHECK(cudaEventElapsedTime(&ms, begin_, end_));
    return ms * 1e3;
  }

 private:
  cudaStream_t stream_;
  cudaEvent_t begin_, end_;
};

}  // namespace moe_a2a
