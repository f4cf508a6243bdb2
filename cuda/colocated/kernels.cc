// The table of all kernels, for ranks that share one GPU: see device/ranks.cuh.
#define MOE_A2A_COLOCATED
#include "kernels/kernels.cc"
