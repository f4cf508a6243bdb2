// The part of the driver's API that gemm/form.h needs.
#pragma once

#include <cstdint>

struct alignas(64) CUtensorMap {
  uint64_t opaque[16];
};
