#include "site.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace emulation {
namespace {

struct Place {
  std::string file;
  int line = 0;

  bool is(const Site& site) const;
};

// Both are set before any kernel runs.
Place left_out, swapped;

// Threads add places without a lock, and never remove one.
constexpr int kTableSize = 4096;
Site* table[kTableSize];

const char* base_name(const char* path) {
  const char* slash = std::strrchr(path, '/');
  return slash == nullptr ? path : slash + 1;
}

bool Place::is(const Site& site) const { return site.line == line && file == base_name(site.file); }

Place place_of(const char* option, const char* text) {
  const char* colon = std::strrchr(text, ':');
  if (colon == nullptr) {
    std::fprintf(stderr, "--%s must be file:line; got %s\n", option, text);
    std::exit(2);
  }
  return {std::string(text, colon), std::atoi(colon + 1)};
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
  return left_out.is(site);
}

void leave_out(const char* place) { left_out = place_of("without", place); }

bool are_swapped(const Site& site) { return swapped.is(site); }
void swap(const char* place) { swapped = place_of("swap", place); }

void print_sites() {
  for (const Site* site : table) {
    if (site != nullptr) std::printf("site %s:%d\n", base_name(site->file), site->line);
  }
}

}  // namespace emulation
