#include "site.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace emulation {
namespace {

// The place to leave out. It is set before any kernel runs.
std::string left_out_file;
int left_out_line = 0;

// The places that the run has reached. Threads add to the table without a lock; nothing is removed.
constexpr int kTableSize = 4096;
Site* table[kTableSize];

const char* base_name(const char* path) {
  const char* slash = std::strrchr(path, '/');
  return slash == nullptr ? path : slash + 1;
}

void note(const Site& site) {
  for (unsigned i = static_cast<unsigned>(site.line) % kTableSize;; i = (i + 1) % kTableSize) {
    Site* seen = __atomic_load_n(&table[i], __ATOMIC_ACQUIRE);
    if (seen == nullptr) {
      auto* fresh = new Site(site);
      if (__atomic_compare_exchange_n(&table[i], &seen, fresh, false, __ATOMIC_ACQ_REL,
                                      __ATOMIC_ACQUIRE)) {
        return;
      }
      delete fresh;
    }
    if (seen->line == site.line && std::strcmp(seen->file, site.file) == 0) return;
  }
}

}  // namespace

bool is_left_out(const Site& site) {
  note(site);
  return site.line == left_out_line && left_out_file == base_name(site.file);
}

void leave_out(const char* place) {
  const char* colon = std::strrchr(place, ':');
  if (colon == nullptr) {
    std::fprintf(stderr, "--without must be file:line; got %s\n", place);
    std::exit(2);
  }
  left_out_file.assign(place, colon);
  left_out_line = std::atoi(colon + 1);
}

void print_sites() {
  for (const Site* site : table) {
    if (site != nullptr) std::printf("site %s:%d\n", base_name(site->file), site->line);
  }
}

}  // namespace emulation
