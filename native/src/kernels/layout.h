/*
 * Where things lie: tiles of weights (docs/numerics.md) and prepared activations (the kernels' own). The same for every instruction set.
 *
 * Activations lie in blocks of COLIBRI_ROW_BLOCK rows, the last one holding what is left: `n` below is the number of rows of the block at
 * hand, so that a single row is contiguous. Within a block, k runs outermost:
 *
 *   f32, f16, bf16   [k][n] float
 *   q8, q4           per group of 32: [n][32] int8, [n] float scale, [n] int32 correction = -128 × sum of the row's 32 integers
 */
#ifndef COLIBRI_KERNELS_LAYOUT_H
#define COLIBRI_KERNELS_LAYOUT_H

#include <stddef.h>
#include <stdint.h>

#include "kernels.h"

/* Of one tile: a group's integers, its scales, and of one row of activations: integers, scale and correction. */
#define Q8_GROUP_BYTES (COLIBRI_GROUP * COLIBRI_TILE_ROWS)
#define Q4_GROUP_BYTES (Q8_GROUP_BYTES / 2)
#define SCALES_BYTES (COLIBRI_TILE_ROWS * sizeof(uint16_t))
#define INTEGER_ACTS_BYTES (COLIBRI_GROUP + sizeof(float) + sizeof(int32_t))

static inline size_t smaller(size_t a, size_t b) { return a < b ? a : b; }
static inline size_t round_up(size_t n, size_t step) { return (n + step - 1) / step * step; }
static inline size_t n_groups(size_t k) { return (k + COLIBRI_GROUP - 1) / COLIBRI_GROUP; }

/*
 * What the 16 values of a q4 weight stand for, as q8 bytes: 128 is zero. Weights are dense around zero and sparse at the ends, and so are these
 * (Lloyd 1982, Max 1960: each is the mean of what is nearest to it), for groups of 32 of normal and of heavier-tailed weights under the scales
 * that convert/tiles.py gives them. Part of the file format.
 */
static const uint8_t q4_bytes[16] = {1, 33, 54, 70, 84, 96, 107, 118, 128, 139, 150, 162, 175, 190, 207, 229};

/* Weights that are multiplied as integers: once looked up, q4 is q8. */
static inline int is_integer(uint32_t format) { return format == COLIBRI_FMT_Q8 || format == COLIBRI_FMT_Q4; }
static inline size_t group_bytes(uint32_t format) { return format == COLIBRI_FMT_Q4 ? Q4_GROUP_BYTES : Q8_GROUP_BYTES; }

/* Bytes that one row takes in prepared activations. */
static inline size_t acts_row_bytes(uint32_t format, size_t k)
{
    return is_integer(format) ? n_groups(k) * INTEGER_ACTS_BYTES : k * sizeof(float);
}

#endif
