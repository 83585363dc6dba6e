#include "lanes_avx512.h"

#include "kernels.inc"

extern const struct colibri_kernels colibri_kernels_avx512vnni;
const struct colibri_kernels colibri_kernels_avx512vnni = KERNELS_TABLE("avx512vnni");
