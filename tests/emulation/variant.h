#pragma once

#include "kernels/launch.h"

namespace emulation {

extern const bool kColocated;
extern const bool kHasSanitizer;
const moe_a2a::Kernels& variant_kernels();

}  // namespace emulation
