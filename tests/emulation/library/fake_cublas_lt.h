// Exported as "fake_counts".
#pragma once

struct FakeCounts {
  long calls_until_failure;  // negative: none fails
  long searches;
};
