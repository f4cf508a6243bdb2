// Places in the device code that order memory or wait. A run can leave out one of these places, and
// the tests must detect that it is left out.
#pragma once

namespace emulation {

struct Site {
  const char* file;
  int line;

  // As a default argument, returns the place of the call.
  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

// Returns true if the run leaves this place out. Records that the run has reached this place.
bool is_left_out(const Site& site);

// Leaves out the place `file:line`; the file has no folder.
void leave_out(const char* place);

// are_swapped() returns true if the run swaps the stores of this place (swaps.py). The next
// function swaps the stores of the place `file:line`.
bool are_swapped(const Site& site);
void swap(const char* place);

// Prints every place that the run has reached, one per line.
void print_sites();

}  // namespace emulation
