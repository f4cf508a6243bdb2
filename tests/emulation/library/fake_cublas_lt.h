// Counts of the fake cuBLASLt, exported as "fake_counts".
#pragma once

struct FakeCounts {
  long calls_until_failure;  // calls before one fails; negative: none fails
  long searches;             // the number of searches for an algorithm
};
