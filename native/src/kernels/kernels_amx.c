/*
 * q8 and q4 matrices by AMX: a tile instruction forms the exact integer sums of 16 rows × 16 outputs over one group of 32 inputs, and the vector unit
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
/* A chunk of weights and a row block's activations over it share a first-level cache with whoever runs on the core's other thread. A single
 * block reuses nothing: shorter chunks then let memory and arithmetic overlap. */
#define CHUNK_GROUPS 16
#define CHUNK_GROUPS_OF_ONE_BLOCK 8
/* Activations that stay in a second-level cache while all weights pass by. */
#define ACTS_CACHE_BYTES ((size_t)1 << 20)

/* The operand of ldtilecfg. The processor renames tile registers, so that one of each kind does. */
struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
/* Numbers of registers; for a whole block of rows and for a part of one. Not an enum: gcc 12 pastes them into the assembler's text. */
#define WEIGHTS 0
#define WHOLE_ACTS 1
#define WHOLE_SUMS 2
#define PART_ACTS 3
#define PART_SUMS 4

static void configure(size_t n_part)
{
    const struct tile_config config = {
        .palette = 1,
        .row_bytes = {[WEIGHTS] = 64, [WHOLE_ACTS] = COLIBRI_GROUP, [WHOLE_SUMS] = 64, [PART_ACTS] = COLIBRI_GROUP, [PART_SUMS] = 64},
        .rows = {[WEIGHTS] = COLIBRI_GROUP / 4, [WHOLE_ACTS] = BLOCK, [WHOLE_SUMS] = BLOCK, [PART_ACTS] = (uint8_t)n_part, [PART_SUMS] = (uint8_t)n_part},
    };
    _tile_loadconfig(&config);
}

/* Some groups of one tile of weights, ready. */
struct chunk {
    _Alignas(64) int8_t q[CHUNK_GROUPS][Q8_GROUP_BYTES];
    _Alignas(64) float scales[CHUNK_GROUPS][COLIBRI_TILE_ROWS];
    size_t n_groups, group_bytes; /* in the file */
    const uint8_t *after; /* in the file: what comes next */
};

INLINE void load_chunk(uint32_t format, const uint8_t *q, const uint8_t *scales, size_t n, struct chunk *to)
{
    const __m512i sign = _mm512_set1_epi8((char)0x80);
    for (size_t g = 0; g < n; g++) {
        const weight_group group = group_load(q + g * group_bytes(format), format == COLIBRI_FMT_Q4);
        _Pragma("GCC unroll 8") for (int j = 0; j < 8; j++) _mm512_store_si512(to->q[g] + 64 * j, _mm512_xor_si512(group.quads[j], sign));
        vf_store(to->scales[g], vf_load_bf16(scales + g * SCALES_BYTES));
    }
    to->n_groups = n;
    to->group_bytes = group_bytes(format);
    to->after = q + n * to->group_bytes;
}

/* The integer sums of a group for all rows of the block. */
#define SUM_GROUP(acts_tile, sums_tile, acts, weights, sums)   \
    do {                                                       \
        _tile_loadd(acts_tile, acts, COLIBRI_GROUP);           \
        _tile_loadd(WEIGHTS, weights, 64);                     \
        _tile_zero(sums_tile);                                 \
        _tile_dpbssd(sums_tile, acts_tile, WEIGHTS);           \
        _tile_stored(sums_tile, sums, 64);                     \
    } while (0)

/* n (constant) rows. */
INLINE void sum_group(const uint8_t *acts, const int8_t *weights, int n, int32_t (*sums)[COLIBRI_TILE_ROWS])
{
    if (n == BLOCK) SUM_GROUP(WHOLE_ACTS, WHOLE_SUMS, acts, weights, sums);
    else SUM_GROUP(PART_ACTS, PART_SUMS, acts, weights, sums);
}

INLINE void add_group(int32_t (*sums)[COLIBRI_TILE_ROWS], const float *w_scales, const uint8_t *acts, int n, vf *acc)
{
    const vf w_scale = vf_load(w_scales);
    _Pragma("GCC unroll 16") for (int r = 0; r < n; r++) {
        float scale;
        memcpy(&scale, acts + n * COLIBRI_GROUP + 4 * r, 4);
        acc[r] = vf_fma(vf_of_int(vi_load(sums[r])), vf_mul(w_scale, vf_set1(scale)), acc[r]);
    }
}

INLINE void prefetch_behind(const struct chunk *chunk, size_t g)
{
    for (size_t i = 0; i < chunk->group_bytes; i += 64)
        __builtin_prefetch((const void *)((uintptr_t)chunk->after + g * chunk->group_bytes + i), 0, 2);
}

/* One block of n (constant) rows by a chunk, into y; `first`: y holds nothing yet. The next group's sums are under way while a group is added. */
INLINE void add_chunk(const struct chunk *chunk, const uint8_t *acts, int n, bool first, bool prefetch, float *y, size_t ldy)
{
    const size_t acts_bytes = (size_t)n * INTEGER_ACTS_BYTES;
    _Alignas(64) int32_t sums[2][BLOCK][COLIBRI_TILE_ROWS];
    vf acc[BLOCK];
    _Pragma("GCC unroll 16") for (int r = 0; r < n; r++) acc[r] = first ? vf_set1(0) : vf_load(y + (size_t)r * ldy);
    sum_group(acts, chunk->q[0], n, sums[0]);
    for (size_t g = 0; g < chunk->n_groups; g++, acts += acts_bytes) {
        if (g + 1 < chunk->n_groups) sum_group(acts + acts_bytes, chunk->q[g + 1], n, sums[(g + 1) % 2]);
        if (prefetch) prefetch_behind(chunk, g);
        add_group(sums[g % 2], chunk->scales[g], acts, n, acc);
    }
    _Pragma("GCC unroll 16") for (int r = 0; r < n; r++) vf_store(y + (size_t)r * ldy, acc[r]);
}

static void add_part(const struct chunk *chunk, const uint8_t *acts, size_t n, bool first, float *y, size_t ldy)
{
    switch (n) {
#define ROWS(n) case n: add_chunk(chunk, acts, n, first, false, y, ldy); break
        ROWS(1); ROWS(2); ROWS(3); ROWS(4); ROWS(5); ROWS(6); ROWS(7); ROWS(8);
        ROWS(9); ROWS(10); ROWS(11); ROWS(12); ROWS(13); ROWS(14); ROWS(15);
#undef ROWS
    }
}

/* Rows, at least one block of them, by one tile. */
static void multiply_tile(uint32_t format, const uint8_t *weights, size_t k, const uint8_t *acts, size_t n_rows, float *y, size_t ldy)
{
    const size_t groups = n_groups(k), n_whole = n_rows / BLOCK, n_part = n_rows % BLOCK;
    const uint8_t *scales = weights + groups * group_bytes(format), *part = acts + n_whole * BLOCK * groups * INTEGER_ACTS_BYTES;
    const size_t step = n_rows == BLOCK ? CHUNK_GROUPS_OF_ONE_BLOCK : CHUNK_GROUPS;
    struct chunk chunk;
    for (size_t g = 0; g < groups; g += step) {
        const uint8_t *q = weights + g * group_bytes(format), *q_scales = scales + g * SCALES_BYTES;
        const size_t n = smaller(groups - g, step);
        if (format == COLIBRI_FMT_Q4) load_chunk(COLIBRI_FMT_Q4, q, q_scales, n, &chunk);
        else load_chunk(COLIBRI_FMT_Q8, q, q_scales, n, &chunk);
        for (size_t block = 0; block < n_whole; block++)
            add_chunk(&chunk, acts + (block * groups + g) * BLOCK * INTEGER_ACTS_BYTES, BLOCK, g == 0, block == 0, y + block * BLOCK * ldy, ldy);
        add_part(&chunk, part + g * n_part * INTEGER_ACTS_BYTES, n_part, g == 0, y + n_whole * BLOCK * ldy, ldy);
    }
}

void colibri_matmul_amx(uint32_t format, const void *weights, size_t tile_begin, size_t tile_end, size_t k, const void *acts, size_t n_rows, float *y,
                        size_t ldy)
{
    if (!is_integer(format) || n_rows < BLOCK) {
        colibri_kernels_avx512vnni.matmul(format, weights, tile_begin, tile_end, k, acts, n_rows, y, ldy);
        return;
    }
    const size_t row_bytes = acts_row_bytes(format, k), tile_bytes = colibri_tile_bytes(format, k);
    const size_t fitting = ACTS_CACHE_BYTES / (BLOCK * row_bytes + 1), set = BLOCK * (fitting ? fitting : 1);
    configure(n_rows % BLOCK ? n_rows % BLOCK : BLOCK);
    for (size_t row = 0, n; row < n_rows; row += n) {
        n = n_rows - row < 2 * set ? n_rows - row : set; /* a part does not go alone */
        for (size_t tile = tile_begin; tile < tile_end; tile++)
            multiply_tile(format, (const uint8_t *)weights + tile * tile_bytes, k, (const uint8_t *)acts + row * row_bytes, n,
                          y + row * ldy + tile * COLIBRI_TILE_ROWS, ldy);
    }
    _tile_release();
}
