// A stream next to XLA's on one device, for split exchanges, and a table of the exchanges started on it.
#ifndef MOE_A2A_RUNTIME_SIDE_STREAM_H_
#define MOE_A2A_RUNTIME_SIDE_STREAM_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <mutex>
#include <vector>

#include "runtime/problem.h"
#include "runtime/slice.h"

namespace moe_a2a {

// A start forks: the side stream waits for what XLA's stream has been given so far, and gets the
// exchange. A done joins: XLA's stream waits for that exchange. Records and their events are reused. So none is created
// after the largest number of exchanges has been under way.
class SideStream {
 public:
  // With the device current.
  Problem Open();

  // Makes the side stream wait for `stream`, and returns it for the launch of an exchange of the
  // execution `run`.
  Problem Fork(cudaStream_t stream, int64_t run, cudaStream_t* side);

  // After the launch, of what it reads and what it writes; the last one names it.
  Problem Started(int64_t run, Addresses read, Addresses written);

  // Makes `stream` wait for the exchange that was started in the same execution on these arrays, once: what it
  // reads, and then what it writes.
  Problem Join(cudaStream_t stream, int64_t run, Addresses arrays);

  // Makes `stream` wait for everything that has been started, and ignores errors: the caller has an error already.
  void JoinAll(cudaStream_t stream);

  // Forgets what has been started. With the device idle.
  void Clear();

 private:
  struct Exchange {
    bool is_under_way = false;
    int64_t run = 0;
    std::vector<const char*> arrays;
    cudaEvent_t end = nullptr;
  };

  // Returns the exchange under way that the array names, or null.
  Exchange* Find(const char* name);
  // Returns one that is not under way.
  Problem Take(Exchange** exchange);
  Problem Add();

  std::mutex mutex_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t forked_ = nullptr;
  std::vector<Exchange> exchanges_;
};

}  // namespace moe_a2a

#endif  // MOE_A2A_RUNTIME_SIDE_STREAM_H_
