// What a failed exchange says: the record a kernel leaves in host memory, and its text.
#ifndef MOE_A2A_STATUS_H_
#define MOE_A2A_STATUS_H_

#include <cstdint>
#include <string>

#include "layout.h"

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
  kStopped = 7     // another rank has failed, and its process knows more: seen = its poison
};

// What a rank that fails tells its peers, in a word that is not 0: who, what, where, and about whom. It has 16 bits for the
// rank, which counts from 1, and 8 for each of the next two.
static_assert(kMaxRanks < 1 << 16 && static_cast<uint32_t>(ErrorKind::kStopped) < 1 << 8 &&
              static_cast<uint32_t>(Phase::kReceiveChunk) < 1 << 8);
MOE_A2A_HOST_DEVICE constexpr uint64_t make_poison(int rank, ErrorKind kind, Phase phase,
                                                   int awaited_rank) {
  return (uint64_t{1} + static_cast<uint64_t>(rank)) | static_cast<uint64_t>(kind) << 16 |
         static_cast<uint64_t>(phase) << 24 | static_cast<uint64_t>(awaited_rank) << 32;
}
MOE_A2A_HOST_DEVICE constexpr int poisoner(uint64_t poison) {
  return static_cast<int>(poison & 0xFFFF) - 1;
}

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

inline const char* name(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kNone: return "no error";
    case ErrorKind::kTimeout: return "timeout";
    case ErrorKind::kMismatch: return "mismatched calls";
    case ErrorKind::kViolation: return "protocol violation";
    case ErrorKind::kWrongRank: return "wrong rank";
    case ErrorKind::kBounds: return "index out of range";
    case ErrorKind::kOverlap: return "overlapping calls";
    case ErrorKind::kStopped: return "stopped";
  }
  return "unknown error";
}

inline std::string describe_poison(uint64_t poison) {
  return "rank " + std::to_string(poisoner(poison)) + " has reported \"" +
         name(static_cast<ErrorKind>(poison >> 16 & 0xFF)) + "\", " +
         name(static_cast<Phase>(poison >> 24 & 0xFF)) + ", about rank " +
         std::to_string(poison >> 32) + "; see the error of its process";
}

inline std::string describe(const ErrorRecord& r) {
  const auto kind = static_cast<ErrorKind>(r.kind);
  const std::string what = std::string(name(kind)) + ": " +
                           name(static_cast<Operation>(r.operation)) + " on rank " +
                           std::to_string(r.rank) + ", " + name(static_cast<Phase>(r.phase));
  const std::string peer = "rank " + std::to_string(r.awaited_rank);
  const std::string values = " (expected " + std::to_string(r.expected) + ", saw " +
                             std::to_string(r.seen) + ", epoch " + std::to_string(r.epoch) + ")";
  // A credit is an epoch; every other wait is for a flag.
  const int shift = static_cast<Phase>(r.phase) == Phase::kSendCredit ? 0 : kSignatureBits;
  const std::string flags = " (expected epoch " + std::to_string(r.expected >> shift) +
                            ", saw epoch " + std::to_string(r.seen >> shift) + ")";
  switch (kind) {
    case ErrorKind::kNone: return name(kind);
    case ErrorKind::kTimeout:
      return what + ": nothing came from " + peer + " within " +
             std::to_string(static_cast<double>(r.timeout_ns) * 1e-9) + " s" + flags;
    case ErrorKind::kMismatch:
      return what + ": " + peer + " made a call with another operation, shape or step" + values;
    case ErrorKind::kViolation: return what + ": " + peer + " is ahead of this rank" + flags;
    case ErrorKind::kWrongRank:
      return what +
             ": the group's mesh and the program's mesh put different "
             "ranks on this device. Make the group from the program's mesh" +
             values;
    case ErrorKind::kBounds: return what + values;
    case ErrorKind::kOverlap:
      return what +
             ": another exchange runs on this device at the same time; launch the programs of a "
             "group from one thread";
    case ErrorKind::kStopped: return what + ": " + describe_poison(r.seen);
  }
  return "unknown error";
}

}  // namespace moe_a2a

#endif  // MOE_A2A_STATUS_H_
