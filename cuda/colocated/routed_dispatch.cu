// routed_dispatch, for ranks that share one GPU: see device/ranks.cuh.
#define MOE_A2A_COLOCATED
#include "kernels/routed_dispatch.cu"
