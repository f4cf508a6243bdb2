#define MOE_A2A_COLOCATED
#include "kernels/kernels.cc"
