// The counts that the fake cuBLASLt exports to a check, as the symbol "fake_counts".
#pragma once

struct FakeCounts {
  long calls_until_failure;  // negative: no call fails
  long searches;             // for an algorithm
};
