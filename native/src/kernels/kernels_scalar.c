#include "lanes_scalar.h"

#include "kernels.inc"

extern const struct colibri_kernels colibri_kernels_scalar;
const struct colibri_kernels colibri_kernels_scalar = KERNELS_TABLE("scalar", matmul);
