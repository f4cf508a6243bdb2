#include "runtime/side_stream.h"

#include <algorithm>
#include <string>

#include "runtime/cuda_error.h"

namespace moe_a2a {

static Problem Check(cudaError_t error, const std::string& doing) {
  return ProblemOf(error, "side stream: " + doing);
}

Problem SideStream::Open() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (stream_ != nullptr) return {};
  // The priority is the highest, so that an exchange's few blocks start before other queued work.
  int least, greatest;
  MOE_A2A_TRY(Check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "asking for priorities"));
  if (forked_ == nullptr) {
    MOE_A2A_TRY(
        Check(cudaEventCreateWithFlags(&forked_, cudaEventDisableTiming), "making an event"));
  }
  return Check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest),
               "making a stream");
}

Problem SideStream::Fork(cudaStream_t stream, int64_t run, cudaStream_t* side) {
  std::lock_guard<std::mutex> lock(mutex_);
  bool is_in_order = true;
  for (Flight& flight : flights_) {
    if (!flight.is_under_way || flight.run == run) continue;
    is_in_order = false;  // report this once only
    flight.is_under_way = false;
  }
  if (!is_in_order) {
    return "an earlier execution has started an exchange that was never done. Every dispatch_start "
           "and combine_start needs its done in the same program; otherwise rows arrive in memory "
           "that belongs to other arrays. (An execution that failed in between causes the same "
           "error.)";
  }
  // One event serves all forks, because cudaStreamWaitEvent() reads the event's state at once.
  MOE_A2A_TRY(Check(cudaEventRecord(forked_, stream), "recording XLA's stream"));
  *side = stream_;
  return Check(cudaStreamWaitEvent(stream_, forked_, 0), "waiting for XLA's stream");
}

SideStream::Flight* SideStream::Find(const char* name) {
  for (Flight& flight : flights_) {
    if (flight.is_under_way && flight.arrays.back() == name) return &flight;
  }
  return nullptr;
}

Problem SideStream::Started(int64_t run, Addresses arrays) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto flight = std::find_if(flights_.begin(), flights_.end(),
                             [](const Flight& e) { return !e.is_under_way; });
  if (flight == flights_.end()) {
    cudaEvent_t end;
    MOE_A2A_TRY(Check(cudaEventCreateWithFlags(&end, cudaEventDisableTiming), "making an event"));
    flight = flights_.insert(flights_.end(), Flight{false, 0, {}, end});
  }
  MOE_A2A_TRY(Check(cudaEventRecord(flight->end, stream_), "recording the exchange"));
  flight->arrays.assign(arrays.begin(), arrays.end());
  if (Find(flight->arrays.back()) != nullptr) {
    return "an exchange was started into memory that another exchange still writes to; the other "
           "exchange has no done";
  }
  flight->is_under_way = true;
  flight->run = run;
  return {};
}

Problem SideStream::Join(cudaStream_t stream, int64_t run, Addresses arrays) {
  std::lock_guard<std::mutex> lock(mutex_);
  Flight* flight = arrays.size() == 0 ? nullptr : Find(arrays[arrays.size() - 1]);
  if (flight == nullptr || flight->run != run) {
    return "done of an exchange that this execution has not started, or that is done already. Call "
           "start and done once each in the same function; an InFlight cannot leave its program, "
           "loop or branch";
  }
  if (!std::equal(arrays.begin(), arrays.end(), flight->arrays.begin(), flight->arrays.end())) {
    return "done of an exchange whose arrays XLA has moved since its start. Call start and done in "
           "the same function";
  }
  flight->is_under_way = false;
  return Check(cudaStreamWaitEvent(stream, flight->end, 0), "waiting for the exchange");
}

void SideStream::JoinAll(cudaStream_t stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (stream_ == nullptr) return;
  if (cudaEventRecord(forked_, stream_) == cudaSuccess) cudaStreamWaitEvent(stream, forked_, 0);
}

void SideStream::Clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (Flight& flight : flights_) flight.is_under_way = false;
}

}  // namespace moe_a2a
