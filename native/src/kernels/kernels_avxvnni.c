#include "lanes_avx2.h"

#include "kernels.inc"

extern const struct colibri_kernels colibri_kernels_avxvnni;
const struct colibri_kernels colibri_kernels_avxvnni = KERNELS_TABLE("avxvnni", matmul);
