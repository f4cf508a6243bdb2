#include "runtime/side_stream.h"

#include <utility>

namespace moe_a2a {
namespace {

constexpr int kFirstEvents = 16;

Problem Check(cudaError_t error, const char* doing) {
  if (error == cudaSuccess) return {};
  return {std::string("side stream: ") + doing + ": " + cudaGetErrorString(error),
          error == cudaErrorMemoryAllocation};
}

}  // namespace

Problem SideStream::Open() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (stream_ != nullptr) return {};
  // The highest priority: the few blocks of an exchange come before those of the work that is to hide them.
  int least, greatest;
  Problem p = Check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "asking for priorities");
  if (p.empty()) {
    p = Check(cudaEventCreateWithFlags(&forked_, cudaEventDisableTiming), "making an event");
  }
  for (int i = 0; p.empty() && i < kFirstEvents; ++i) {
    cudaEvent_t event;
    p = Check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event");
    if (p.empty()) free_.push_back(event);
  }
  if (p.empty()) {
    p = Check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest),
              "making a stream");
  }
  return p;
}

Problem SideStream::Fork(cudaStream_t stream, int64_t run, cudaStream_t* side) {
  std::lock_guard<std::mutex> lock(mutex_);
  bool is_in_order = true;
  for (auto it = started_.begin(); it != started_.end();) {
    if (it->second.run == run) {
      ++it;
      continue;
    }
    is_in_order = false;  // Reported once, because this execution may be in order.
    free_.push_back(it->second.end);
    it = started_.erase(it);
  }
  if (!is_in_order) {
    return "an earlier execution has started an exchange that was never done. Every dispatch_start "
           "and combine_start needs its done in the same program; otherwise rows arrive in memory "
           "that belongs to other arrays. (An execution that failed in between causes the same "
           "error.)";
  }
  // The wait reads the event's state at once, so one event serves all forks.
  if (Problem p = Check(cudaEventRecord(forked_, stream), "recording XLA's stream"); !p.empty()) {
    return p;
  }
  *side = stream_;
  return Check(cudaStreamWaitEvent(stream_, forked_, 0), "waiting for XLA's stream");
}

Problem SideStream::TakeEvent(cudaEvent_t* event) {
  if (free_.empty()) {
    return Check(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "making an event");
  }
  *event = free_.back();
  free_.pop_back();
  return {};
}

Problem SideStream::Started(int64_t run, Arrays arrays) {
  std::lock_guard<std::mutex> lock(mutex_);
  cudaEvent_t end;
  if (Problem p = TakeEvent(&end); !p.empty()) return p;
  if (Problem p = Check(cudaEventRecord(end, stream_), "recording the exchange"); !p.empty()) {
    free_.push_back(end);
    return p;
  }
  const void* name = arrays.back();
  if (started_.count(name) > 0) {
    free_.push_back(end);
    return "an exchange was started into memory that another exchange still writes to; the other "
           "exchange has no done";
  }
  started_[name] = {run, std::move(arrays), end};
  return {};
}

Problem SideStream::Join(cudaStream_t stream, int64_t run, const Arrays& arrays) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = arrays.empty() ? started_.end() : started_.find(arrays.back());
  if (it == started_.end() || it->second.run != run) {
    return "done of an exchange that this execution has not started, or that is done already. Call "
           "start and done once each in the same function; an InFlight cannot cross the ends of "
           "programs, loops and branches";
  }
  if (it->second.arrays != arrays) {
    return "done of an exchange whose arrays XLA has moved since its start. Call start and done in "
           "the same function";
  }
  const cudaEvent_t end = it->second.end;
  started_.erase(it);
  // As above: from now on another exchange may use the event.
  free_.push_back(end);
  return Check(cudaStreamWaitEvent(stream, end, 0), "waiting for the exchange");
}

void SideStream::JoinAll(cudaStream_t stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (stream_ == nullptr) return;
  // The wait reads the event's state at once, as in Fork().
  if (cudaEventRecord(forked_, stream_) == cudaSuccess) cudaStreamWaitEvent(stream, forked_, 0);
}

void SideStream::Clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [name, exchange] : started_) free_.push_back(exchange.end);
  started_.clear();
}

}  // namespace moe_a2a
