/* The sizes that callers allocate and check files by. A size that does not fit size_t is 0, like one of an unknown format. */
#include "layout.h"

#include "colibri.h"

/* More inputs than this would overflow the products below; no model comes near. */
#define MAX_K ((size_t)1 << (sizeof(size_t) * 8 - 12))

static size_t times(size_t a, size_t b) { return b != 0 && a > SIZE_MAX / b ? 0 : a * b; }

size_t colibri_tile_bytes(uint32_t format, size_t k)
{
    if (k > MAX_K) return 0;
    switch (format) {
    case COLIBRI_FMT_F32: return k * COLIBRI_TILE_ROWS * sizeof(float);
    case COLIBRI_FMT_BF16:
    case COLIBRI_FMT_F16: return round_up(k * COLIBRI_TILE_ROWS * sizeof(uint16_t), 64);
    case COLIBRI_FMT_Q8:
    case COLIBRI_FMT_Q4: return round_up(n_groups(k) * (group_bytes(format) + SCALES_BYTES), 64);
    default: return 0;
    }
}

size_t colibri_matrix_bytes(uint32_t format, size_t rows, size_t k)
{
    size_t n_tiles = rows / COLIBRI_TILE_ROWS + (rows % COLIBRI_TILE_ROWS != 0);
    return times(n_tiles, colibri_tile_bytes(format, k));
}

size_t colibri_acts_bytes(uint32_t format, size_t n_rows, size_t k)
{
    if (k > MAX_K || n_rows > SIZE_MAX - COLIBRI_ROW_BLOCK || colibri_tile_bytes(format, k) == 0) return 0;
    return round_up(times(round_up(n_rows, COLIBRI_ROW_BLOCK), acts_row_bytes(format, k)), 64);
}

size_t colibri_attention_scratch(size_t n_queries, size_t head_dim)
{
    size_t width = round_up(head_dim, 16);
    size_t queries = n_queries * head_dim;
    size_t statistics = 5 * (round_up(n_queries, 16) + 16);
    size_t scores = n_queries * COLIBRI_PAGE_TOKENS;
    size_t sums = n_queries * width;
    size_t widened_k_and_v = (head_dim + width) * COLIBRI_PAGE_TOKENS;
    return queries + statistics + scores + sums + widened_k_and_v;
}
