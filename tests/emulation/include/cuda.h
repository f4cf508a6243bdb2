// What gemm/form.h needs of the CUDA driver's header.
#pragma once

#include <cstdint>

struct alignas(64) CUtensorMap {
  uint64_t opaque[16];
};
