// The differences between the variants of the emulator, except the kernels.
#pragma once

#include "kernels/launch.h"

namespace emulation {

extern const bool kColocated;     // all ranks share a device
extern const bool kHasSanitizer;  // ThreadSanitizer
const moe_a2a::Kernels& variant_kernels();

}  // namespace emulation
