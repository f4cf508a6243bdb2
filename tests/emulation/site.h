// Places of the device code that order memory or wait. A run can leave out one place, and a test
// must detect this.
#pragma once

namespace emulation {

struct Site {
  const char* file;
  int line;

  // If a parameter has the default argument here(), its value is the place of the call.
  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

// Returns true if the run leaves this place out. Records that the run has reached this place.
bool is_left_out(const Site& site);

// Leaves out the place `file:line`, where `file` is a name without a folder.
void leave_out(const char* place);

// swap() makes the run swap the stores at the place `file:line` (swaps.py). are_swapped() returns
// true for this place.
bool are_swapped(const Site& site);
void swap(const char* place);

// Prints every place that the run has reached, one per line.
void print_sites();

}  // namespace emulation
