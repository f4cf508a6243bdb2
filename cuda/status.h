// The error record that a kernel writes to host memory, the poison word, and the messages of both.
#pragma once

#include <cstdint>
#include <string>

#include "layout.h"
#include "runtime/problem.h"

namespace moe_a2a {

enum class Operation : uint32_t { kRoute = 1, kDispatch = 2, kCombine = 3, kRoutedDispatch = 4 };

enum class Phase : uint32_t {
  kStart = 1,        // a block starts or ends, without a wait
  kSendCredit = 2,   // a source waits until a destination has read its rows
  kSend = 3,         // a source writes rows
  kReceiveHead = 4,  // a destination waits for the head of a source
  kReceiveChunk = 5  // a destination waits for a chunk of rows, or for ids
};

enum class ErrorKind : uint32_t {
  kNone = 0,
  kTimeout = 1,    // expected: the flag or credit; seen: the last value of this word
  kMismatch = 2,   // different calls; expected, seen: (low bits of) signatures, or runs
  kViolation = 3,  // a flag of a later epoch has arrived; expected, seen: flags
  kWrongRank = 4,  // expected: rank in the group's mesh; seen: rank in the program's mesh
  kBounds = 5,     // expected: upper bound; seen: the index that is out of range
  kOverlap = 6,    // two launches of one rank overlap; expected, seen: RankView::launch of each
  kStopped = 7     // another rank has failed, and its process knows the reason; seen: the poison
};

// The poison is a word that a failing rank stores to all ranks. It is never 0. Its fields, from the
// lowest bit, are: the failing rank plus 1 (16 bits), kind (8), phase (8), awaited rank (32).
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

// The device writes `kind` last.
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
    case Phase::kSendCredit: return "waiting for a free ring half";
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
  const std::string reporter = Concat("rank ", poisoner(poison));
  return Concat(reporter, " has reported \"", name(static_cast<ErrorKind>(poison >> 16 & 0xFF)),
                "\" about rank ", poison >> 32, " in the phase \"",
                name(static_cast<Phase>(poison >> 24 & 0xFF)),
                "\"; see the error of the process of ", reporter);
}

inline std::string describe(const ErrorRecord& r) {
  const auto kind = static_cast<ErrorKind>(r.kind);
  const std::string what = Concat(name(kind), ": ", name(static_cast<Operation>(r.operation)),
                                  " on rank ", r.rank, ", ", name(static_cast<Phase>(r.phase)));
  const std::string peer = Concat("rank ", r.awaited_rank);
  const std::string seconds = Concat(" within ", static_cast<double>(r.timeout_ns) * 1e-9, " s");
  // A credit is an epoch; a flag is an epoch followed by kSignatureBits of the signature.
  const int shift = static_cast<Phase>(r.phase) == Phase::kSendCredit ? 0 : kSignatureBits;
  const std::string flags =
      Concat(" (expected epoch ", r.expected >> shift, ", saw epoch ", r.seen >> shift, ")");
  switch (kind) {
    case ErrorKind::kNone: return name(kind);
    case ErrorKind::kTimeout: return what + ": nothing came from " + peer + seconds + flags;
    case ErrorKind::kMismatch:
      return Concat(what, ": ", peer,
                    " made a call with another operation, shape, name scope or execution. All "
                    "ranks must make the same calls in the same order (expected ",
                    r.expected, ", saw ", r.seen, ", epoch ", r.epoch, ")");
    case ErrorKind::kViolation: return what + ": " + peer + " is ahead of this rank" + flags;
    case ErrorKind::kWrongRank:
      return Concat(what, ": this device is rank ", r.expected, " in the group's mesh, and rank ",
                    r.seen, " in the program's mesh. Make the group from the program's mesh");
    case ErrorKind::kBounds:
      return Concat(what, ": an index or a count of the routing must be at least 0 and less than ",
                    r.expected, "; got ", static_cast<int64_t>(r.seen),
                    ". Use a Routing as ma.route returned it");
    case ErrorKind::kOverlap:
      return what +
             ": another exchange runs on this device at the same time; launch the programs of a "
             "group from one thread";
    case ErrorKind::kStopped: return what + ": " + describe_poison(r.seen);
  }
  return "unknown error";
}

}  // namespace moe_a2a
