// The part of the CUDA driver's header that gemm/form.h needs.
#pragma once

#include <cstdint>

struct alignas(64) CUtensorMap {
  uint64_t opaque[16];
};
