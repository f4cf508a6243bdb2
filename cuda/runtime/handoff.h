// Lets processes of one host and user share memory: a request and its answer over a unix socket, allocations as
// file descriptors. This file does not use CUDA.
#ifndef MOE_A2A_RUNTIME_HANDOFF_H_
#define MOE_A2A_RUNTIME_HANDOFF_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "runtime/descriptor.h"
#include "runtime/problem.h"

namespace moe_a2a {

using Deadline = std::chrono::steady_clock::time_point;

// The address at which a process answers requests. The socket's name is abstract: it belongs to no file, and goes when
// its process does. Then any other process may take the name. So both sides check that the other one is of the same
// user, and the process that asks checks the process id, before it sends the secret.
struct Endpoint {
  std::string socket;
  std::string secret;
  int pid = 0;  // 0: not known
};

constexpr char kSocketPrefix[] = "jax_moe_a2a-";
constexpr size_t kSecretBytes = 32;

// An allocation of a slab: `bytes` of memory that belong at `offset`.
struct Piece {
  int64_t offset, bytes;
  Descriptor memory;
};

enum class Status : int64_t {
  kGiven = 0,
  kLater = 1,    // ask again: the process has not come so far
  kRefused = 2,  // `why` says why
  kNoMemory = 3  // the same, of a device that has too little memory
};

struct Answer {
  Status status = Status::kGiven;
  std::string why;
  std::vector<Piece> pieces;
  bool has_ended = false;  // There was no answer, because the process no longer exists.
};

using Request = std::vector<int64_t>;

// Answers the requests of others, one after the other in a thread of its own, for as long as the process
// lives. Called once.
Problem Listen(std::function<Answer(const Request&)> answer, Endpoint* endpoint);

// Asks a process, until the deadline.
Problem Ask(const Endpoint& endpoint, const Request& request, Deadline deadline, Answer* answer);

}  // namespace moe_a2a

#endif  // MOE_A2A_RUNTIME_HANDOFF_H_
