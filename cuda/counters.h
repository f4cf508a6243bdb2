// The local sync counters: the words of a header that each kernel waits for or counts in, by
// region.
//
// All kernels use the same words, because launches of a workspace run one after the other, and
// epochs distinguish them. A region holds the words that a kernel of a given shape uses. No
// counters exist per expert: ranks compute slots and rows from ids, and do not claim them from
// counters (docs/protocol.md, section 4).
#ifndef MOE_A2A_COUNTERS_H_
#define MOE_A2A_COUNTERS_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "layout.h"

namespace moe_a2a {

// A region is `count` spans of `bytes` bytes in each ring half. The first span begins at `offset`
// in the header, the others at distances of `stride`.
struct CounterRegion {
  std::string kernel, words;
  int64_t offset, bytes, count, stride;
  int64_t half_stride;  // to the same span of the next ring half; 0 if ring halves share the words
};

// Returns the regions of exchanges of `num_tokens` per rank with `top_k` choices each.
// `route_chunks`: chunks of route.
inline std::vector<CounterRegion> counter_regions(int64_t num_ranks, int64_t num_tokens,
                                                  int64_t top_k, int64_t route_chunks) {
  constexpr int64_t kWord = sizeof(uint64_t);
  constexpr int64_t kControl = offsetof(Header, control);
  std::vector<CounterRegion> regions;
  const auto add = [&](const std::string& kernel, const char* words, size_t offset, int64_t bytes,
                       int64_t count = 1, int64_t stride = 0, int64_t half_stride = 0) {
    regions.push_back(
        {kernel, words, static_cast<int64_t>(offset), bytes, count, stride, half_stride});
  };
  const auto add_kernel = [&](const std::string& name, int64_t num_chunks) {
    const std::string send = name + "_send", receive = name + "_receive";
    add(send, "next_send", kControl + offsetof(Control, next_send), sizeof(uint32_t));
    add(send, "credit", offsetof(Header, credit), num_ranks * kWord, 1, 0, kMaxRanks * kWord);
    add(receive, "next_receive", kControl + offsetof(Control, next_receive), sizeof(uint32_t));
    add(receive, "head", offsetof(Header, head), num_ranks * sizeof(Head), 1, 0,
        kMaxRanks * sizeof(Head));
    add(receive, "chunk", offsetof(Header, chunk), num_chunks * kWord, num_ranks,
        kMaxChunks * kWord, kMaxRanks * kMaxChunks * kWord);
  };
  add_kernel("route", route_chunks);
  add_kernel("dispatch", num_chunks_of(num_tokens));
  add_kernel("combine", num_chunks_of(num_tokens));
  const int64_t choices = num_ranks * num_tokens * top_k;
  if (fits_routed_dispatch(num_tokens, choices, /*local_experts=*/0)) {
    add_kernel("routed_dispatch", num_tokens);
    add("routed_dispatch_receive", "id", offsetof(Header, id), choices * kWord, 1, 0,
        kMaxFusedChoices * kWord);
  }
  return regions;
}

// The values of a rank's counters.
struct CounterValues {
  uint64_t next_epoch, poison;
  std::vector<uint64_t> credits, heads;  // epochs, [kRingDepth, num_ranks]
};

}  // namespace moe_a2a

#endif  // MOE_A2A_COUNTERS_H_
