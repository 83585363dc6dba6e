/*
 * The arithmetic of docs/numerics.md, one table of functions per instruction set.
 *
 * Every function gives the same bits in every table. All are pure: no allocation, no threads, no state. Callers own the memory
 * and its layout; shapes are given beside each function. Buffers that a kernel reads as activations or writes are 64-byte
 * aligned where `aligned` is said, otherwise any float alignment will do; kernels never read or write outside the stated shape (but may
 * prefetch beyond it). Weights may hold any bytes: a wrong file gives wrong numbers, no more.
 *
 * kernels_<isa>.c compiles the one source, kernels.inc, over the 16 lanes of lanes_scalar.h, lanes_avx2.h or lanes_avx512.h; kernels_amx.c
 * is AVX-512 with another way to multiply q8 matrices. dispatch.c alone asks the CPU, and trial.c proves a table before it is used.
 */
#ifndef COLIBRI_KERNELS_H
#define COLIBRI_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include "../file_format.h"

#define COLIBRI_TILE_ROWS 16
#define COLIBRI_GROUP 32       /* quantisation group along k */
#define COLIBRI_ROW_BLOCK 16   /* activations are laid out for this many rows at a time */

/* Bytes of one tile of 16 outputs × k inputs, a multiple of 64. This and the next two: 0 for an unknown format, or if it does not fit size_t. */
size_t colibri_tile_bytes(uint32_t format, size_t k);
/* Bytes of a matrix: all its tiles, the last padded to 16 rows. */
size_t colibri_matrix_bytes(uint32_t format, size_t rows, size_t k);
/* Bytes of prepared activations for n_rows rows of k inputs, a multiple of 64 (whole row blocks are counted). The layout is the kernels' own. */
size_t colibri_acts_bytes(uint32_t format, size_t n_rows, size_t k);

/* One KV head of one layer of a sequence, seen by some query vectors. */
struct colibri_attention {
    const float *q;              /* [n_queries][head_dim], not yet scaled; row stride q_stride floats */
    float *out;                  /* [n_queries][head_dim]; row stride out_stride floats */
    size_t q_stride, out_stride;
    size_t n_queries, head_dim;
    const int32_t *positions;    /* [n_queries] own position of each query, ascending (equal for heads of one row); it sees 0..position */
    float scale;
    uint32_t kv_format;          /* COLIBRI_KV_F32 or COLIBRI_KV_F16 */
    const uint8_t *const *pages; /* base address of each page of the sequence */
    size_t k_offset, v_offset;   /* within a page, of this layer's and head's K [head_dim][32] and V [32][head_dim] */
    float *scratch;              /* colibri_attention_scratch(n_queries, head_dim) floats, 64-byte aligned */
};
size_t colibri_attention_scratch(size_t n_queries, size_t head_dim); /* floats */
#define COLIBRI_MAX_HEAD_DIM 512
#define COLIBRI_MAX_QUERIES 64 /* per attention call */

struct colibri_kernels {
    const char *name;

    /* Prepares rows for matmul with weights of this format. x: [n_rows][k], stride ldx. bad[i] becomes 1 where row i is not finite, else
     * is left. acts: colibri_acts_bytes, aligned. */
    void (*prepare)(uint32_t format, const float *x, size_t ldx, size_t n_rows, size_t k, void *acts, uint8_t *bad);
    /* Picks rows out of prepared activations: to row i comes from row rows[i] of from (which holds n_from rows). */
    void (*gather)(uint32_t format, const void *from, size_t n_from, const int32_t *rows, size_t n_rows, size_t k, void *to);
    /* y[r][16 * t + lane] for tiles t in [tile_begin, tile_end) and all rows r < n_rows. weights: the whole matrix. y has stride ldy, and whole
     * tiles are written (columns up to the padded row count). */
    void (*matmul)(uint32_t format, const void *weights, size_t tile_begin, size_t tile_end, size_t k,
                   const void *acts, size_t n_rows, float *y, size_t ldy);
    /* Decodes row `row` of a matrix: y[k]. */
    void (*decode_row)(uint32_t format, const void *weights, size_t row, size_t k, float *y);

    /* y = rmsnorm(x) × w, [n]. Returns 0, or 1 if the sum of squares is not finite (y is then zero). x may equal y. */
    int (*rmsnorm)(const float *x, const float *w, size_t n, float eps, float *y);
    /* In place on one head: rotates the first 2 × n_pairs elements, pairs (i, i + n_pairs). */
    void (*rope)(float *x, const float *cosines, const float *sines, size_t n_pairs);
    /* x += y, [n] */
    void (*add)(float *x, const float *y, size_t n);
    /* acc = fma(w, y, acc), [n] */
    void (*add_scaled)(float *acc, float w, const float *y, size_t n);
    /* x clamped to ± limit, [n]; NaN stays */
    void (*clip)(float *x, float limit, size_t n);
    /* h = silu(g) × u, [n]; h may equal g */
    void (*silu_mul)(const float *g, const float *u, size_t n, float *h);
    /* y = exp(x), [n] */
    void (*exp)(const float *x, size_t n, float *y);
    /* max over x[n]; -inf for n = 0; unspecified if a NaN is among them */
    float (*max)(const float *x, size_t n);
    /* Σ exp(x[i] − max) by stripes */
    float (*sum_exp)(const float *x, size_t n, float max);
    /* 1 if every x[n] is finite */
    int (*all_finite)(const float *x, size_t n);

    /* Writes one position into a page: K scattered to lane `lane` of [head_dim][32], V to row `lane` of [32][head_dim], for one head. Returns how many
     * values are not finite as written: too large for f16 (infinity), infinite or NaN before. */
    size_t (*kv_write)(uint32_t kv_format, const float *k, const float *v, size_t head_dim, size_t lane, void *k_page, void *v_page);
    void (*attention)(const struct colibri_attention *a);

    /* 64-bit checksum, docs/format.md. */
    uint64_t (*checksum)(const void *data, size_t n_bytes);
};

/* Names in order of preference, NULL at the end; those that this build has. */
extern const char *const colibri_isa_names[];
/* The table of that name; NULL with a sentence in err if it is unknown here, the CPU lacks it, or its trial against scalar fails (a trial
 * survives an illegal instruction). name NULL: $COLIBRI_ISA, else the best that passes. Not for concurrent first use: call it at open. */
const struct colibri_kernels *colibri_kernels_get(const char *name, char *err, size_t err_bytes);
/* Without asking the CPU or a trial; NULL if not built. For tests. */
const struct colibri_kernels *colibri_kernels_built(const char *name);

/* Compiled once, in double, for all tables: */
/* cosines, sines: [n_pairs] for one position, times factor. */
void colibri_rope_angles(int32_t position, const float *inv_freq, size_t n_pairs, float factor, float *cosines, float *sines);
double colibri_log(double x);
/* Thread's floating-point control word to the state of docs/numerics.md; returns the old one for colibri_fp_restore. */
uint64_t colibri_fp_enter(void);
void colibri_fp_restore(uint64_t state);

#endif
