/* kernels.h's matmul with AMX; the thread's process must have been granted the tile registers (dispatch.c). */
#ifndef COLIBRI_MATMUL_AMX_H
#define COLIBRI_MATMUL_AMX_H

#include <stddef.h>
#include <stdint.h>

void colibri_matmul_amx(uint32_t format, const void *weights, size_t tile_begin, size_t tile_end, size_t k, const void *acts, size_t n_rows, float *y,
                        size_t ldy);

#endif
