// Places in the device code that order memory or wait: each can be left out, one per run, to see whether the tests
// notice.
#pragma once

namespace emulation {

struct Site {
  const char* file;
  int line;

  // As a default argument: the place of the call.
  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

// Returns true if this is the place that the run leaves out. Notes that the run has come here.
bool is_left_out(const Site& site);

// Leaves out the place `file:line`, of which the file is named without its folder.
void leave_out(const char* place);

// Prints every place that the run has come to, one in a line.
void print_sites();

}  // namespace emulation
