"""Lower primitives to custom calls of the CUDA kernels, or to the portable path."""
