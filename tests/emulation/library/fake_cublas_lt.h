// Counts of the fake cuBLASLt, which exports them to a check as "fake_counts".
#pragma once

struct FakeCounts {
  long calls_until_failure;  // negative: no call fails
  long searches;             // the number of searches for an algorithm
};
