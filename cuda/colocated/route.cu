#define MOE_A2A_COLOCATED
#include "kernels/route.cu"
