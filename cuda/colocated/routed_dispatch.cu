#define MOE_A2A_COLOCATED
#include "kernels/routed_dispatch.cu"
