// The local sync counters: the words of a header that each kernel waits for or counts in, region by region.
//
// All kernels share the words, for launches of one workspace come one after the other and epochs tell
// them apart. A region says how much of them a kernel of a given shape uses. There is none for each expert:
// slots and rows are computed from ids, not claimed from counters (docs/protocol.md, section 4).
#ifndef MOE_A2A_COUNTERS_H_
#define MOE_A2A_COUNTERS_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "layout.h"

namespace moe_a2a {

// In each ring slot `count` runs of `bytes`, `stride` apart; the first one at `offset` of the header.
struct CounterRegion {
  std::string kernel, words;
  int64_t offset, bytes, count, stride;
  int64_t ring_stride;  // to the same run of the next ring slot; 0 where ring slots share the words
};

// Of exchanges of `num_tokens` per rank with `top_k` choices each; `route` sends ids in `route_chunks`.
inline std::vector<CounterRegion> counter_regions(int64_t num_ranks, int64_t num_tokens,
                                                  int64_t top_k, int64_t route_chunks) {
  constexpr int64_t kWord = sizeof(uint64_t);
  constexpr int64_t kControl = offsetof(Header, control);
  std::vector<CounterRegion> regions;
  const auto add = [&](const std::string& kernel, const char* words, size_t offset, int64_t bytes,
                       int64_t count = 1, int64_t stride = 0, int64_t ring_stride = 0) {
    regions.push_back(
        {kernel, words, static_cast<int64_t>(offset), bytes, count, stride, ring_stride});
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

// What a rank's counters stand at.
struct CounterValues {
  uint64_t next_epoch, poison;
  std::vector<uint64_t> credits, heads;  // epochs, [kRingDepth, num_ranks]
};

}  // namespace moe_a2a

#endif  // MOE_A2A_COUNTERS_H_
