// For gemm/form.h.
#pragma once

#include <cstdint>

struct alignas(64) CUtensorMap {
  uint64_t opaque[16];
};
