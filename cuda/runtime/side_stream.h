// A stream next to XLA's on one device, for split exchanges, and a table of the exchanges started on it.
#ifndef MOE_A2A_RUNTIME_SIDE_STREAM_H_
#define MOE_A2A_RUNTIME_SIDE_STREAM_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/slab.h"

namespace moe_a2a {

// A start forks: the side stream waits for what XLA's stream has been given so far, and gets the
// exchange. A done joins: XLA's stream waits for that exchange. Events are reused. So none is created after the largest
// number of exchanges has been under way.
class SideStream {
 public:
  using Arrays = std::vector<const void*>;

  // With the device current.
  Problem Open();

  // Makes the side stream wait for `stream`, and returns it for the launch of an exchange of the
  // execution `run`.
  Problem Fork(cudaStream_t stream, int64_t run, cudaStream_t* side);

  // After the launch. `arrays` are what it reads and then what it writes; the last one names it.
  Problem Started(int64_t run, Arrays arrays);

  // Makes `stream` wait for the exchange that was started in the same execution on these arrays, once.
  Problem Join(cudaStream_t stream, int64_t run, const Arrays& arrays);

  // Makes `stream` wait for everything that has been started, and ignores errors: the caller has an error already.
  void JoinAll(cudaStream_t stream);

  // Forgets what has been started. With the device idle.
  void Clear();

 private:
  struct Exchange {
    int64_t run;
    Arrays arrays;
    cudaEvent_t end;
  };

  Problem TakeEvent(cudaEvent_t* event);

  std::mutex mutex_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t forked_ = nullptr;
  std::vector<cudaEvent_t> free_;
  std::map<const void*, Exchange> started_;  // by the last of their arrays
};

}  // namespace moe_a2a

#endif  // MOE_A2A_RUNTIME_SIDE_STREAM_H_
