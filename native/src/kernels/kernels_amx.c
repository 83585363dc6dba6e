/*
 * q8 matrices by AMX: a tile instruction forms the exact integer sums of 16 rows × 16 outputs over one group of 32 inputs, and the vector unit
 * scales and adds them as everywhere (docs/numerics.md). Whatever is not a whole block of rows, and every other format, goes to AVX-512, and
 * so does the rest of the table.
 *
 * The instruction multiplies signed bytes, so a chunk of weights is made signed once, in the nearest cache, and serves all row blocks. The
 * scaling bounds the speed: tile and vector instructions share a port.
 */
#include <stdbool.h>

#include "lanes_avx512.h"

#include "layout.h"
#include "matmul_amx.h"

extern const struct colibri_kernels colibri_kernels_avx512vnni;

#define INLINE KERNELS_INLINE
#define BLOCK COLIBRI_ROW_BLOCK
/* A chunk of weights and a row block's activations over it take a third of a first-level cache each. */
#define CHUNK_GROUPS 32
/* Activations that stay in a second-level cache while all weights pass by. */
#define ACTS_CACHE_BYTES ((size_t)1 << 20)

/* The operand of ldtilecfg. Tiles 0, 1: sums; 2, 3: activations; 4, 5: weights. Two of each: one is filled while the other is read. */
struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
static const struct tile_config config = {
    .palette = 1,
    .row_bytes = {64, 64, COLIBRI_GROUP, COLIBRI_GROUP, 64, 64},
    .rows = {BLOCK, BLOCK, BLOCK, BLOCK, COLIBRI_GROUP / 4, COLIBRI_GROUP / 4},
};

/* Some groups of one tile of weights, ready. */
struct chunk {
    _Alignas(64) int8_t q[CHUNK_GROUPS][Q8_GROUP_BYTES];
    _Alignas(64) float scales[CHUNK_GROUPS][COLIBRI_TILE_ROWS];
    size_t n_groups;
    const uint8_t *after; /* in the file: what comes next */
};

static void load_chunk(const uint8_t *q, const uint8_t *scales, size_t n, struct chunk *to)
{
    const __m512i sign = _mm512_set1_epi8((char)0x80);
    for (size_t g = 0; g < n; g++) {
        _Pragma("GCC unroll 8") for (int i = 0; i < Q8_GROUP_BYTES; i += 64)
            _mm512_store_si512(to->q[g] + i, _mm512_xor_si512(_mm512_loadu_si512(q + g * Q8_GROUP_BYTES + i), sign));
        vf_store(to->scales[g], vf_load_bf16(scales + g * Q8_SCALES_BYTES));
    }
    to->n_groups = n;
    to->after = q + n * Q8_GROUP_BYTES;
}

/* The integer sums of a group for all rows of the block. Numbers of registers are literals: gcc 12 pastes them into the assembler's text. */
#define SUM_GROUP(sum, x, w, acts, weights, sums) \
    do {                                          \
        _tile_loadd(x, acts, COLIBRI_GROUP);      \
        _tile_loadd(w, weights, 64);              \
        _tile_zero(sum);                          \
        _tile_dpbssd(sum, x, w);                  \
        _tile_stored(sum, sums, 64);              \
    } while (0)

INLINE void add_group(int32_t (*sums)[COLIBRI_TILE_ROWS], const float *w_scales, const uint8_t *acts, vf *acc)
{
    const vf w_scale = vf_load(w_scales);
    _Pragma("GCC unroll 16") for (int r = 0; r < BLOCK; r++) {
        float scale;
        memcpy(&scale, acts + BLOCK * COLIBRI_GROUP + 4 * r, 4);
        acc[r] = vf_fma(vf_of_int(vi_load(sums[r])), vf_mul(w_scale, vf_set1(scale)), acc[r]);
    }
}

INLINE void prefetch_behind(const struct chunk *chunk, size_t g)
{
    _Pragma("GCC unroll 16") for (size_t i = 0; i < 2 * Q8_GROUP_BYTES; i += 64)
        __builtin_prefetch((const void *)((uintptr_t)chunk->after + g * Q8_GROUP_BYTES + i), 0, 2);
}

/* y[16][16] += one row block × a chunk; `first`: y holds nothing yet. The next group's sums are under way while a group is added. */
INLINE void add_chunk(const struct chunk *chunk, const uint8_t *acts, bool first, bool prefetch, float *y, size_t ldy)
{
    enum { ACTS_BYTES = BLOCK * Q8_ACTS_BYTES };
    _Alignas(64) int32_t sums[2][BLOCK][COLIBRI_TILE_ROWS];
    vf acc[BLOCK];
    _Pragma("GCC unroll 16") for (int r = 0; r < BLOCK; r++) acc[r] = first ? vf_set1(0) : vf_load(y + (size_t)r * ldy);
    SUM_GROUP(0, 2, 4, acts, chunk->q[0], sums[0]);
    for (size_t g = 0; g < chunk->n_groups; g += 2, acts += 2 * ACTS_BYTES) {
        const bool odd = g + 1 == chunk->n_groups, last = g + 2 >= chunk->n_groups;
        if (!odd) SUM_GROUP(1, 3, 5, acts + ACTS_BYTES, chunk->q[g + 1], sums[1]);
        if (prefetch) prefetch_behind(chunk, g);
        add_group(sums[0], chunk->scales[g], acts, acc);
        if (odd) break;
        if (!last) SUM_GROUP(0, 2, 4, acts + 2 * ACTS_BYTES, chunk->q[g + 2], sums[0]);
        add_group(sums[1], chunk->scales[g + 1], acts + ACTS_BYTES, acc);
    }
    _Pragma("GCC unroll 16") for (int r = 0; r < BLOCK; r++) vf_store(y + (size_t)r * ldy, acc[r]);
}

/* Whole row blocks by one tile. */
static void multiply_tile(const uint8_t *weights, size_t k, const uint8_t *acts, size_t n_blocks, float *y, size_t ldy)
{
    const size_t groups = n_groups(k), block_bytes = BLOCK * groups * Q8_ACTS_BYTES;
    const uint8_t *scales = weights + groups * Q8_GROUP_BYTES;
    struct chunk chunk;
    for (size_t g = 0; g < groups; g += CHUNK_GROUPS) {
        load_chunk(weights + g * Q8_GROUP_BYTES, scales + g * Q8_SCALES_BYTES, smaller(groups - g, CHUNK_GROUPS), &chunk);
        for (size_t block = 0; block < n_blocks; block++)
            add_chunk(&chunk, acts + block * block_bytes + g * BLOCK * Q8_ACTS_BYTES, g == 0, block == 0, y + block * BLOCK * ldy, ldy);
    }
}

void colibri_matmul_amx(uint32_t format, const void *weights, size_t tile_begin, size_t tile_end, size_t k, const void *acts, size_t n_rows, float *y,
                        size_t ldy)
{
    const size_t row_bytes = acts_row_bytes(format, k), tile_bytes = colibri_tile_bytes(format, k);
    const size_t n_whole = format == COLIBRI_FMT_Q8 ? n_rows / BLOCK : 0, rest = n_rows - n_whole * BLOCK;
    const size_t fitting = ACTS_CACHE_BYTES / (BLOCK * row_bytes + 1), set = fitting ? fitting : 1;
    const uint8_t *rest_acts = (const uint8_t *)acts + n_whole * BLOCK * row_bytes;
    if (n_whole) _tile_loadconfig(&config);
    for (size_t block = 0; block < n_whole; block += set)
        for (size_t tile = tile_begin; tile < tile_end; tile++)
            multiply_tile((const uint8_t *)weights + tile * tile_bytes, k, (const uint8_t *)acts + block * BLOCK * row_bytes,
                          smaller(set, n_whole - block), y + block * BLOCK * ldy + tile * COLIBRI_TILE_ROWS, ldy);
    if (n_whole) _tile_release();
    if (rest) colibri_kernels_avx512vnni.matmul(format, weights, tile_begin, tile_end, k, rest_acts, rest, y + n_whole * BLOCK * ldy, ldy);
}
