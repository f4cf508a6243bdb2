// Constants that differ between the variants of the emulator.
#pragma once

#include "kernels/launch.h"

namespace emulation {

extern const bool kColocated;     // true if all ranks share a device
extern const bool kHasSanitizer;  // true under ThreadSanitizer
const moe_a2a::Kernels& variant_kernels();

}  // namespace emulation
