// Constants in which the variants of the emulator differ, besides the kernels.
#pragma once

#include "kernels/launch.h"

namespace emulation {

extern const bool kColocated;     // all ranks share a device
extern const bool kHasSanitizer;  // ThreadSanitizer
const moe_a2a::Kernels& variant_kernels();

}  // namespace emulation
