// A second stream of a device for split exchanges, and a table of the exchanges in flight.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <mutex>
#include <vector>

#include "runtime/problem.h"
#include "runtime/slice.h"

namespace moe_a2a {

// A start calls Fork(): the side stream waits for the work that XLA's stream already has. Then the
// exchange runs on the side stream. A done calls Join(): XLA's stream waits for the exchange.
class SideStream {
 public:
  // Creates the stream on the current device.
  Problem Open();

  // Makes the side stream wait for `stream`, and sets `side` to the side stream.
  Problem Fork(cudaStream_t stream, int64_t run, cudaStream_t* side);

  // Adds an exchange to the table. The last of its operands and results identifies the exchange.
  Problem Started(int64_t run, Addresses arrays);

  // Makes `stream` wait for the exchange with these arrays, and removes its entry in the table.
  Problem Join(cudaStream_t stream, int64_t run, Addresses arrays);

  // Makes `stream` wait for all started exchanges. Ignores errors: the caller already has one.
  void JoinAll(cudaStream_t stream);

  // Clears the table. The device must be idle.
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

  std::mutex mutex_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t forked_ = nullptr;
  std::vector<Flight> flights_;
};

}  // namespace moe_a2a
