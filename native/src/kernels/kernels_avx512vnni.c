#include "lanes_avx512.h"

#include "kernels.inc"

extern const struct colibri_kernels colibri_kernels_avx512vnni;
const struct colibri_kernels colibri_kernels_avx512vnni = KERNELS_TABLE("avx512vnni", matmul);

#ifdef COLIBRI_HAVE_AMX
#include "matmul_amx.h"
extern const struct colibri_kernels colibri_kernels_amx;
const struct colibri_kernels colibri_kernels_amx = KERNELS_TABLE("amx", colibri_matmul_amx);
#endif
