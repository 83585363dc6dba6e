#include "lanes_avx2.h"

#include "kernels.inc"

extern const struct colibri_kernels colibri_kernels_avx2;
const struct colibri_kernels colibri_kernels_avx2 = KERNELS_TABLE("avx2", matmul);
