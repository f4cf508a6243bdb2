// Calls in the device code that order memory or wait, by their places. A run can leave out the call
// at one place, and a test must detect this.
#pragma once

namespace emulation {

struct Site {
  const char* file;
  int line;

  // As the default argument of a function, here() is the place that calls the function.
  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

// Records that the run has reached this place. Returns true if the run leaves its call out.
bool is_left_out(const Site& site);

// Leaves out the calls at `file:line`, where `file` has no folder.
void leave_out(const char* place);

// swap() makes the run swap the two stores at `file:line` (swaps.py). are_swapped() then returns
// true for this place.
bool are_swapped(const Site& site);
void swap(const char* place);

// Prints every place that the run has reached, one per line.
void print_sites();

}  // namespace emulation
