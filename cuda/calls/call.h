// The context from which the parameters of every kernel follow, together with arrays and attributes, and helpers.
//
// A call is a struct in a file of its own. Its members are the attributes, in the order in which Read() names them. It
// has
//
//   Params                             the kernel's parameters
//   kOperation                         the name in error messages of the kernel
//   Read(read)                         calls read(name, &member) for each attribute; returns False if one is missing
//   Describe(context, args, results, &params)
//                                      checks the arrays, and sets all parameters except addresses; `params` are zeros before
//   Point(args, results, &params)      sets only the addresses, of one rank for one launch
//   ZoneBytes(params)                  returns the bytes of one source's landing zone
//   Launch(kernels, ranks, blocks, stream)
//
// Describe() runs once for a call of a program, Point() at each execution. Ranks that share a GPU have all parameters in
// common except addresses and the number of the rank, so one Describe() serves all of them.
#ifndef MOE_A2A_CALLS_CALL_H_
#define MOE_A2A_CALLS_CALL_H_

#include <cstdint>

#include "kernels/grid.h"
#include "kernels/launch.h"
#include "params.h"

namespace moe_a2a {

// The call as its first rank on the device sees it.
struct CallContext {
  RankView view;    // its signature holds what all calls have in common
  bool is_wide;     // some ranks are outside the load/store domain
  int64_t num_sms;  // blocks that a launch may have for each rank
};

// Mixes a value into a hash (the finalizer of splitmix64, by Steele, Lea and Flood).
inline void Mix(uint64_t& hash, uint64_t value) {
  hash += value + 0x9E3779B97F4A7C15;
  hash = (hash ^ (hash >> 30)) * 0xBF58476D1CE4E5B9;
  hash = (hash ^ (hash >> 27)) * 0x94D049BB133111EB;
  hash ^= hash >> 31;
}

// Takes the next array of a zone; returns its offset.
inline int64_t TakeZone(int64_t& zone_bytes, int64_t num_slots, int64_t row_bytes, RankView& view) {
  Mix(view.signature, row_bytes);
  const int64_t offset = zone_bytes;
  zone_bytes += array_bytes(num_slots, row_bytes);
  return offset;
}

}  // namespace moe_a2a

#endif  // MOE_A2A_CALLS_CALL_H_
