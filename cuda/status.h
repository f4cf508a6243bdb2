// What a failed exchange says: the record a kernel leaves in host memory, and its text.
#ifndef MOE_A2A_STATUS_H_
#define MOE_A2A_STATUS_H_

#include <cstdint>
#include <string>

namespace moe_a2a {

enum class Operation : uint32_t { kRoute = 1, kDispatch = 2, kCombine = 3, kRoutedDispatch = 4 };

enum class Phase : uint32_t {
  kStart = 1,        // taking the epoch, checking the rank
  kSendCredit = 2,   // a source waits until its destination has read the ring slot
  kSend = 3,         // a source writes rows
  kReceiveHead = 4,  // a destination waits for the announcement of a source
  kReceiveChunk = 5  // a destination waits for a chunk of rows, or for ids
};

enum class ErrorKind : uint32_t {
  kNone = 0,
  kTimeout = 1,    // expected = flag or credit waited for, seen = what stood there
  kMismatch = 2,   // the ranks run different calls: expected and seen are signatures
  kViolation = 3,  // a flag is ahead of this rank: expected and seen are flags
  kWrongRank = 4,  // expected = rank by the group's mesh, seen = rank by the running program
  kBounds = 5,     // seen = index out of range
  kOverlap = 6,    // two exchanges at once on one device
  kStopped = 7     // another rank has failed, and its process knows why
};

// Lies in host memory that the device writes. `kind` is written last.
struct ErrorRecord {
  uint32_t kind;
  uint32_t operation;
  uint32_t phase;
  int32_t rank;
  int32_t awaited_rank;
  uint64_t epoch;
  uint64_t expected;
  uint64_t seen;
  uint64_t timeout_ns;
};

inline const char* name(Operation operation) {
  switch (operation) {
    case Operation::kRoute: return "route";
    case Operation::kDispatch: return "dispatch";
    case Operation::kCombine: return "combine";
    case Operation::kRoutedDispatch: return "routed dispatch";
  }
  return "unknown operation";
}

inline const char* name(Phase phase) {
  switch (phase) {
    case Phase::kStart: return "start";
    case Phase::kSendCredit: return "waiting for the ring slot to be read";
    case Phase::kSend: return "sending rows";
    case Phase::kReceiveHead: return "waiting for the call to begin";
    case Phase::kReceiveChunk: return "waiting for a chunk of rows";
  }
  return "unknown phase";
}

inline std::string describe(const ErrorRecord& r) {
  const std::string where = std::string(name(static_cast<Operation>(r.operation))) + " on rank " +
                            std::to_string(r.rank) + ", " + name(static_cast<Phase>(r.phase));
  const std::string peer = "rank " + std::to_string(r.awaited_rank);
  const std::string values = " (expected " + std::to_string(r.expected) + ", saw " +
                             std::to_string(r.seen) + ", epoch " + std::to_string(r.epoch) + ")";
  // A credit is an epoch; every other wait is for a flag, epoch << 16 | signature.
  const int shift = static_cast<Phase>(r.phase) == Phase::kSendCredit ? 0 : 16;
  const std::string flags = " (expected epoch " + std::to_string(r.expected >> shift) +
                            ", saw epoch " + std::to_string(r.seen >> shift) + ")";
  switch (static_cast<ErrorKind>(r.kind)) {
    case ErrorKind::kNone: return "no error";
    case ErrorKind::kTimeout:
      return "timeout: " + where + ": nothing came from " + peer + " within " +
             std::to_string(static_cast<double>(r.timeout_ns) * 1e-9) + " s" + flags;
    case ErrorKind::kMismatch:
      return "mismatched calls: " + where + ": " + peer +
             " runs another operation, shape or step in the same place" + values;
    case ErrorKind::kViolation:
      return "protocol violation: " + where + ": " + peer + " is ahead of this rank" + flags;
    case ErrorKind::kWrongRank:
      return "wrong rank: " + where +
             ": the group's mesh and the program's mesh place different "
             "ranks on this device" +
             values;
    case ErrorKind::kBounds: return "index out of range: " + where + values;
    case ErrorKind::kOverlap:
      return "overlapping calls: " + where +
             ": another exchange runs on this device at the same time; exchanges of one group must "
             "be ordered";
    case ErrorKind::kStopped:
      return "stopped: " + where + ": " + peer + " has reported a failure; its process says which";
  }
  return "unknown error";
}

}  // namespace moe_a2a

#endif  // MOE_A2A_STATUS_H_
