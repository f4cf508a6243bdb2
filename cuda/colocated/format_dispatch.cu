#define MOE_A2A_COLOCATED
#include "kernels/format_dispatch.cu"
