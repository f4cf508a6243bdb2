// A run can leave out one call that orders memory or waits, and a test must detect this.
#pragma once

namespace emulation {

struct Site {
  const char* file;
  int line;

  // As a default argument, here() is the caller's place.
  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

// True if the run leaves out this place. Also records that the run has reached the place.
bool is_left_out(const Site& site);

// `place` is `file:line`, without a folder.
void leave_out(const char* place);

// swap() makes the run swap the stores at `file:line` (swaps.py).
bool are_swapped(const Site& site);
void swap(const char* place);

void print_sites();

}  // namespace emulation
