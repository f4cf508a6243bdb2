// Implements fake_runtime.h, launches of kernels on its streams, and a grouped GEMM with plain loops.
#include "fake_runtime.h"

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "gemm/grouped_gemm.h"
#include "launch.h"
#include "numbers.h"

// The emulator's launch, which returns after the last block has ended. launch.cc is compiled with this name.
extern "C" cudaError_t emulated_launch(const void* kernel, dim3 blocks, dim3 threads,
                                       void** arguments, size_t shared_bytes, cudaStream_t stream);

namespace {

using Task = std::function<void()>;

constexpr int kNumSms = 4;
constexpr int kDefaultStream = 40;  // its number in the emulator's launches

class Stream {
 public:
  explicit Stream(int number) : number_(number), thread_([this] { run(); }) {}
  ~Stream() {
    {
      const std::lock_guard lock(mutex_);
      is_ended_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  void add(Task task) {
    {
      const std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    changed_.notify_all();
  }
  bool is_idle() {
    const std::lock_guard lock(mutex_);
    return tasks_.empty();
  }
  int number() const { return number_; }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return is_ended_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      const Task task = tasks_.front();
      lock.unlock();
      task();
      lock.lock();
      tasks_.pop_front();  // after the task has ended, because the stream is not idle before
    }
  }

  const int number_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool is_ended_ = false;
  std::thread thread_;
};

// Records are numbered. A wait is for the last record before it.
struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t num_recorded = 0, num_reached = 0;
};

std::set<Stream*> streams;  // without a lock, because the host has one thread

Stream& of(cudaStream_t stream) { return *reinterpret_cast<Stream*>(stream); }
Event& of(cudaEvent_t event) { return *reinterpret_cast<Event*>(event); }

void enqueue(cudaStream_t stream, Task task) {
  if (stream == nullptr) {
    cudaDeviceSynchronize();
    task();
  } else {
    of(stream).add(std::move(task));
  }
}

}  // namespace

extern "C" cudaError_t cudaLaunchKernel(const void* kernel, dim3 blocks, dim3 threads,
                                        void** arguments, size_t shared_bytes,
                                        cudaStream_t stream) {
  std::vector<std::shared_ptr<std::vector<char>>> copies;
  const std::vector<size_t>& bytes = emulation::param_bytes_of(kernel);
  for (size_t i = 0; i < bytes.size(); ++i) {
    const auto* first = static_cast<const char*>(arguments[i]);
    copies.push_back(std::make_shared<std::vector<char>>(first, first + bytes[i]));
  }
  const int number = stream == nullptr ? kDefaultStream : of(stream).number();
  enqueue(stream, [=] {
    std::vector<void*> pointers;
    for (const auto& copy : copies) pointers.push_back(copy->data());
    const cudaError_t error = emulated_launch(kernel, blocks, threads, pointers.data(),
                                              shared_bytes, emulation::stream_of(number));
    if (error != cudaSuccess) {
      std::fprintf(stderr, "a launch failed\n");
      std::_Exit(1);
    }
  });
  return cudaSuccess;
}

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "an error";
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  std::strcpy(properties->name, "emulator");
  properties->multiProcessorCount = kNumSms;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? kNumSms : 48 << 10;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* low, int* high) {
  *low = *high = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  for (Stream* stream : streams) {
    while (!stream->is_idle()) std::this_thread::yield();
  }
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** data, size_t bytes) {
  *data = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  std::memset(*data, 0xFF, bytes);
  return cudaSuccess;
}
cudaError_t cudaFree(void* data) { return std::free(data), cudaSuccess; }
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  enqueue(nullptr, [=] { std::memcpy(to, from, bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemset(void* data, int value, size_t bytes) {
  enqueue(nullptr, [=] { std::memset(data, value, bytes); });
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(uint64_t** data, size_t bytes, unsigned) {
  *data = static_cast<uint64_t*>(std::calloc(1, bytes));
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* data) { return std::free(data), cudaSuccess; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  static int number = 0;
  auto* made = new Stream(number++ % kDefaultStream);
  streams.insert(made);
  *stream = reinterpret_cast<cudaStream_t>(made);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  streams.erase(&of(stream));
  delete &of(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return of(stream).is_idle() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = reinterpret_cast<cudaEvent_t>(new Event());
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return cudaEventCreate(event);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete &of(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  Event& e = of(event);
  const uint64_t number = ++e.num_recorded;
  enqueue(stream, [&e, number] {
    {
      const std::lock_guard lock(e.mutex);
      e.num_reached = number;
    }
    e.changed.notify_all();
  });
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  Event& e = of(event);
  const uint64_t number = e.num_recorded;
  enqueue(stream, [&e, number] {
    std::unique_lock lock(e.mutex);
    e.changed.wait(lock, [&] { return e.num_reached >= number; });
  });
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) {
  *ms = 1;
  return cudaSuccess;
}

// ---- The grouped GEMM.

namespace moe_a2a {
namespace {

float number(const void* data, int64_t i) {
  return emulation::read_number(static_cast<const char*>(data) + i * 2, ElementType::kBFloat16);
}

void multiply(const GroupedGemm& g) {
  const auto store = [&](int64_t i, float v) {
    emulation::write_number(static_cast<char*>(g.d) + i * 2, ElementType::kBFloat16, v);
  };
  for (int j = 0; j < g.num_groups; ++j) {
    const int64_t w = int64_t{g.weights[j]} * g.k * g.n, first = g.starts[j];
    const int64_t end = first + g.sizes[j];
    if (g.product == GroupedProduct::kWeightGradient) {
      for (int64_t k = 0; k < g.k; ++k) {
        for (int64_t n = 0; n < g.n; ++n) {
          float sum = 0;
          for (int64_t r = first; r < end; ++r)
            sum += number(g.a, r * g.k + k) * number(g.b, r * g.n + n);
          store(w + k * g.n + n, sum);
        }
      }
      continue;
    }
    const bool is_transposed = g.product == GroupedProduct::kTransposed;
    const int64_t columns = is_transposed ? g.k : g.n, inner = is_transposed ? g.n : g.k;
    for (int64_t r = first; r < end; ++r) {
      for (int64_t c = 0; c < columns; ++c) {
        float sum = 0;
        for (int64_t i = 0; i < inner; ++i) {
          const int64_t at = is_transposed ? c * g.n + i : i * g.n + c;
          sum += number(g.a, r * inner + i) * number(g.b, w + at);
        }
        store(r * columns + c, sum);
      }
    }
  }
}

}  // namespace

cudaError_t LoadGroupedGemm() { return cudaSuccess; }
Problem WhyNotGroupedGemm(std::string_view, int64_t, int64_t, int64_t, int64_t) { return {}; }
Problem LaunchGroupedGemm(const GroupedGemm& gemm, cudaStream_t stream) {
  if (gemm.num_sms < 1) return "no multiprocessors for a product";
  enqueue(stream, [gemm] { multiply(gemm); });
  return {};
}

}  // namespace moe_a2a
