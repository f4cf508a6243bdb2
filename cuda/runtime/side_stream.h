// A second stream of a device, for split exchanges, and a table of the exchanges in flight.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <mutex>
#include <vector>

#include "runtime/problem.h"
#include "runtime/slice.h"

namespace moe_a2a {

// A start forks: the side stream waits for the work that XLA's stream already has, and then runs
// the exchange. A done joins: XLA's stream waits for that exchange.
class SideStream {
 public:
  // Creates the stream on the current device.
  Problem Open();

  // Makes the side stream wait for `stream`. Returns it, for an exchange of the execution `run`.
  Problem Fork(cudaStream_t stream, int64_t run, cudaStream_t* side);

  // Enters a launched exchange into the table, with the arrays that it reads, and then the arrays
  // that it writes. The last array identifies the exchange.
  Problem Started(int64_t run, Addresses arrays);

  // Makes `stream` wait for the exchange that the same execution has started on these arrays, and
  // removes it from the table.
  Problem Join(cudaStream_t stream, int64_t run, Addresses arrays);

  // Makes `stream` wait for all started exchanges. Ignores errors: the caller already reports one.
  void JoinAll(cudaStream_t stream);

  // Empties the table. The device must be idle.
  void Clear();

 private:
  struct Flight {
    bool is_under_way = false;
    int64_t run = 0;
    std::vector<const char*> arrays;
    cudaEvent_t end = nullptr;
  };

  // Returns the exchange in flight that this array identifies, or null.
  Flight* Find(const char* name);
  Problem Take(Flight** flight);

  std::mutex mutex_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t forked_ = nullptr;
  std::vector<Flight> flights_;
};

}  // namespace moe_a2a
