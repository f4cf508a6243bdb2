// combine, for ranks that share one GPU: see device/ranks.cuh.
#define MOE_A2A_COLOCATED
#include "kernels/combine.cu"
