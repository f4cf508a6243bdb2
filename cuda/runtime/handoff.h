// Shares memory between processes of one host and user. Requests, answers and file descriptors of
// allocations travel over a unix socket. This file does not use CUDA.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "runtime/descriptor.h"
#include "runtime/problem.h"

namespace moe_a2a {

using Deadline = std::chrono::steady_clock::time_point;

// The address at which a process answers requests. The socket's name is abstract: it disappears
// when the process ends, and then any process may take it. Therefore both sides check the other's
// user. The requesting process also checks the process id before it sends the secret.
struct Endpoint {
  std::string socket;
  std::string secret;  // of kSecretBytes
  int pid = 0;         // 0: not known
};

constexpr char kSocketPrefix[] = "jax_moe_a2a-";
constexpr size_t kSecretBytes = 32;

// `bytes` of memory, to be mapped at `offset` in a slab.
struct Allocation {
  int64_t offset, bytes;
  Descriptor memory;
};

enum class Status : int64_t {
  kGiven = 0,
  kLater = 1,    // the other process has closed the group fewer times; ask again later
  kRefused = 2,  // the request failed; see `why`
  kNoMemory = 3  // a device has too little memory; see `why`
};

struct Answer {
  Status status = Status::kGiven;
  std::string why;
  std::vector<Allocation> allocations;
  bool has_ended = false;  // no answer, because the process no longer exists
};

using Request = std::vector<int64_t>;

// Starts a thread that answers one request after another until this process ends. Call this once.
Problem Listen(std::function<Answer(const Request&)> answer, Endpoint* endpoint);

Problem Ask(const Endpoint& endpoint, const Request& request, Deadline deadline, Answer* answer);

}  // namespace moe_a2a
