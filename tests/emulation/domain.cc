#include "domain.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace emulation {
namespace {

using namespace moe_a2a;

constexpr unsigned char kNan = 0xFF;  // 0xFF: a float is NaN, and an index is -1

int64_t whole_pages(int64_t bytes) { return round_up(std::max<int64_t>(bytes, 1), getpagesize()); }

char* reserve(int64_t bytes) {
  void* memory = mmap(nullptr, static_cast<size_t>(bytes), PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    std::perror("mmap of a slab");
    std::exit(2);
  }
  return static_cast<char*>(memory);
}

void back(char* at, int64_t bytes, unsigned char value) {
  mprotect(at, static_cast<size_t>(whole_pages(bytes)), PROT_READ | PROT_WRITE);
  if (value != 0) std::memset(at, value, static_cast<size_t>(whole_pages(bytes)));
}

}  // namespace

Domain::Domain(int num_ranks, int64_t half_bytes)
    : num_ranks_(num_ranks), half_bytes_(half_bytes), records_(num_ranks) {
  for (int rank = 0; rank < num_ranks; ++rank) {
    char* slab = reserve(kSlabAddressBytes);
    back(slab, kHeaderBytes, 0);
    for (int half = 0; half < kRingDepth; ++half) {
      back(slab + half_offset(half), half_bytes, kNan);
    }
    slabs_.push_back(slab);
    control(rank).next_epoch = 1;
  }
}

RankView Domain::view(int rank, Operation operation, uint64_t signature, double timeout,
                      double first_timeout) {
  RankView view = {};
  view.rank = rank;
  view.num_ranks = num_ranks_;
  for (int peer = 0; peer < num_ranks_; ++peer) view.slab[peer] = slabs_[peer];
  view.error = &records_[rank];
  view.timeout_ns = static_cast<uint64_t>(timeout * 1e9);
  view.first_timeout_ns = static_cast<uint64_t>(first_timeout * 1e9);
  view.signature = signature;
  view.operation = operation;
  return view;
}

std::string Domain::damage() {
  for (int rank = 0; rank < num_ranks_; ++rank) {
    for (int half = 0; half < kRingDepth; ++half) {
      const auto* bytes = reinterpret_cast<unsigned char*>(slabs_[rank] + half_offset(half));
      for (int64_t i = half_bytes_; i < whole_pages(half_bytes_); ++i) {
        if (bytes[i] != kNan) {
          return "rank " + std::to_string(rank) + ", ring half " + std::to_string(half) +
                 ": byte " + std::to_string(i - half_bytes_) + " after the zones was written";
        }
      }
    }
  }
  return "";
}

}  // namespace emulation
