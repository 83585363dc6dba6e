/*
 * The kernels of one instruction set, named on the command line.
 *
 * `scalar` is held against references in double precision, written here from docs/numerics.md and docs/format.md; every other instruction set
 * against scalar, bit for bit: random shapes, extreme values, and buffers that end or begin at a page that cannot be touched. Two NaNs count as
 * equal. Without an argument: what does not depend on an instruction set. Exit status 77: this CPU cannot run it.
 */
#define _GNU_SOURCE /* MAP_ANONYMOUS */
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "colibri.h"
#include "kernels.h"
#include "trial.h"

#define PAGE COLIBRI_PAGE_TOKENS
#define TILE COLIBRI_TILE_ROWS
#define GROUP COLIBRI_GROUP

static const struct colibri_kernels *scalar, *tested;

/* ---- failing ---- */

static const char *current_test = "";

__attribute__((format(printf, 1, 2), noreturn)) static void fail(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fprintf(stderr, "%s: ", current_test);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    exit(1);
}
#define CHECK(condition, ...) ((condition) ? (void)0 : fail(__VA_ARGS__))

/* ---- random shapes and values ---- */

static uint64_t random_state;

static uint32_t random_bits(void)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 32);
}
static size_t random_size(size_t from, size_t to) { return from + random_bits() % (to - from + 1); }
static float of_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
static uint32_t to_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

enum values { PLAIN, WIDE, EXTREME, ANY_BITS, N_VALUES };

static float random_float(enum values kind)
{
    static const float extremes[] = {0.0f, -0.0f, 1e-45f, -1e-40f, 1e-38f, -1e-38f, 1e38f, -1e38f, 3.4e38f, 1.17549435e-38f, 1.0f, -1.0f, 65504.0f, 6e-8f};
    float unit = (float)(random_bits() >> 8) / 8388608.0f - 1.0f;
    switch (kind) {
    case PLAIN: return unit;
    case WIDE: return ldexpf(unit, (int)(random_bits() % 24) - 12);
    case EXTREME: return extremes[random_bits() % (sizeof extremes / sizeof *extremes)];
    default: return of_bits(random_bits());
    }
}

/* ---- buffers between guard pages ---- */

struct guarded {
    uint8_t *map, *data;
    size_t map_bytes;
};
#define MOST_BUFFERS 16
static struct guarded buffers[MOST_BUFFERS];
static size_t n_buffers;

/* n bytes of which one end, at random, touches a page that may not be touched; a multiple of `alignment` either way. Freed by release_all. */
static void *guarded(size_t n, size_t alignment)
{
    CHECK(n_buffers < MOST_BUFFERS, "too many buffers in one test");
    size_t page = (size_t)sysconf(_SC_PAGESIZE), inner = (n + page - 1) / page * page + (n == 0) * page;
    uint8_t *map = mmap(NULL, inner + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(map != MAP_FAILED && mprotect(map + page, inner, PROT_READ | PROT_WRITE) == 0, "no memory");
    size_t slack = random_bits() % 2 ? 0 : (inner - n) / alignment * alignment;
    struct guarded g = {map, map + page + slack, inner + 2 * page};
    buffers[n_buffers++] = g;
    return g.data;
}
static float *guarded_floats(size_t n) { return guarded(n * sizeof(float), sizeof(float)); }
static float *random_floats(size_t n, enum values kind)
{
    float *x = guarded_floats(n);
    for (size_t i = 0; i < n; i++) x[i] = random_float(kind);
    return x;
}
static float *copied(const float *x, size_t n)
{
    float *y = guarded_floats(n);
    memcpy(y, x, n * sizeof *x);
    return y;
}
static void release_all(void)
{
    while (n_buffers > 0) {
        struct guarded g = buffers[--n_buffers];
        munmap(g.map, g.map_bytes);
    }
}

static int same_floats(const float *a, const float *b, size_t n)
{
    if (n == 0 || memcmp(a, b, n * sizeof *a) == 0) return 1;
    for (size_t i = 0; i < n; i++)
        if (to_bits(a[i]) != to_bits(b[i]) && !(isnan(a[i]) && isnan(b[i]))) return 0;
    return 1;
}
static int same_float(float a, float b) { return same_floats(&a, &b, 1); }

/* ---- weights ---- */

static const uint32_t formats[] = {COLIBRI_FMT_F32, COLIBRI_FMT_BF16, COLIBRI_FMT_F16, COLIBRI_FMT_Q8, COLIBRI_FMT_Q4};
#define N_FORMATS (sizeof formats / sizeof *formats)
static int is_integer(uint32_t format) { return format == COLIBRI_FMT_Q8 || format == COLIBRI_FMT_Q4; }

static uint16_t random_bf16(enum values kind) { return (uint16_t)(to_bits(random_float(kind)) >> 16); }
static uint16_t random_f16(enum values kind)
{
    if (kind == ANY_BITS) return (uint16_t)random_bits();
    if (kind == EXTREME) return (uint16_t)(random_bits() % 2 ? 0x7bff : 0x0001);
    return (uint16_t)((random_bits() & 0x8000) | (random_bits() % 8 + 10) << 10 | (random_bits() & 0x3ff));
}

/* Where weight i of a lane lies in a q4 tile: the byte, and by how much it is shifted there. */
static size_t q4_byte(size_t i, size_t lane) { return i / GROUP * GROUP * TILE / 2 + i % 16 / 4 * 64 + lane * 4 + i % 4; }
static const int q4_levels[16] = {-127, -95, -74, -58, -44, -32, -21, -10, 0, 11, 22, 34, 47, 62, 79, 101};
static int q4_shift(size_t i) { return i % GROUP < 16 ? 0 : 4; }

static void fill_integer_tile(uint32_t format, uint8_t *tile, size_t k, enum values kind)
{
    size_t groups = (k + GROUP - 1) / GROUP, n_bytes = groups * GROUP * TILE / (format == COLIBRI_FMT_Q4 ? 2 : 1);
    memset(tile, 0, n_bytes);
    for (size_t i = 0; i < groups * GROUP; i++)
        for (size_t lane = 0; lane < TILE; lane++) {
            if (format == COLIBRI_FMT_Q8) tile[i / 4 * 64 + lane * 4 + i % 4] = i < k ? (uint8_t)random_bits() : 128;
            else tile[q4_byte(i, lane)] |= (uint8_t)((i < k ? random_bits() % 16 : 8) << q4_shift(i));
        }
    for (size_t i = 0; i < groups * TILE; i++) {
        uint16_t scale = random_bf16(kind);
        memcpy(tile + n_bytes + 2 * i, &scale, 2);
    }
}

static uint8_t *random_matrix(uint32_t format, size_t n_tiles, size_t k, enum values kind)
{
    size_t tile_bytes = colibri_tile_bytes(format, k);
    uint8_t *w = guarded(n_tiles * tile_bytes, 64);
    for (size_t t = 0; t < n_tiles; t++) {
        uint8_t *tile = w + t * tile_bytes;
        if (is_integer(format)) fill_integer_tile(format, tile, k, kind);
        for (size_t i = 0; i < k * TILE; i++) {
            float x = random_float(kind);
            uint16_t half = format == COLIBRI_FMT_BF16 ? random_bf16(kind) : random_f16(kind);
            if (format == COLIBRI_FMT_F32) memcpy(tile + 4 * i, &x, 4);
            if (format == COLIBRI_FMT_BF16 || format == COLIBRI_FMT_F16) memcpy(tile + 2 * i, &half, 2);
        }
    }
    return w;
}

static double value_of_f16(uint16_t h)
{
    int exponent = h >> 10 & 31, fraction = h & 1023;
    double magnitude = exponent == 31 ? (fraction ? NAN : INFINITY) : exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
    return h & 0x8000 ? -magnitude : magnitude;
}

/* Weight of one output and input, decoded as docs/numerics.md says. */
static double weight_at(uint32_t format, const uint8_t *matrix, size_t row, size_t i, size_t k)
{
    const uint8_t *tile = matrix + row / TILE * colibri_tile_bytes(format, k);
    size_t lane = row % TILE, at = i * TILE + lane;
    uint16_t half;
    float x;
    switch (format) {
    case COLIBRI_FMT_F32: memcpy(&x, tile + 4 * at, 4); return x;
    case COLIBRI_FMT_BF16: memcpy(&half, tile + 2 * at, 2); return of_bits((uint32_t)half << 16);
    case COLIBRI_FMT_F16: memcpy(&half, tile + 2 * at, 2); return value_of_f16(half);
    case COLIBRI_FMT_Q8:
        memcpy(&half, tile + (k + GROUP - 1) / GROUP * GROUP * TILE + 2 * (i / GROUP * TILE + lane), 2);
        return (tile[i / 4 * 64 + lane * 4 + i % 4] - 128) * (double)of_bits((uint32_t)half << 16);
    default:
        memcpy(&half, tile + (k + GROUP - 1) / GROUP * GROUP * TILE / 2 + 2 * (i / GROUP * TILE + lane), 2);
        return q4_levels[tile[q4_byte(i, lane)] >> q4_shift(i) & 15] * (double)of_bits((uint32_t)half << 16);
    }
}

/* ---- every instruction set against scalar ---- */

static void test_matrices_equal_scalar_at_random_shapes(void)
{
    for (int round = 0; round < 300; round++) {
        uint32_t format = formats[round % N_FORMATS];
        enum values kind = round / N_FORMATS % N_VALUES;
        size_t k = round % 7 == 0 ? random_size(300, 700) : random_size(1, 140), n_rows = random_size(1, 70), n_tiles = random_size(1, 19);
        size_t ldx = k + random_size(0, 3), ldy = n_tiles * TILE + random_size(0, 3);
        size_t begin = random_size(0, n_tiles - 1), end = random_size(begin, n_tiles);
        float *x = random_floats((n_rows - 1) * ldx + k, kind);
        const uint8_t *w = random_matrix(format, n_tiles, k, kind);
        size_t acts_bytes = colibri_acts_bytes(format, n_rows, k), y_floats = (n_rows - 1) * ldy + n_tiles * TILE;
        uint8_t *acts[2], *bad[2];
        float *y[2] = {random_floats(y_floats, PLAIN), NULL};
        y[1] = copied(y[0], y_floats);
        const struct colibri_kernels *tables[2] = {scalar, tested};
        for (int i = 0; i < 2; i++) {
            acts[i] = memset(guarded(acts_bytes, 64), 0x55, acts_bytes);
            bad[i] = memset(guarded(n_rows, 1), 0, n_rows);
            tables[i]->prepare(format, x, ldx, n_rows, k, acts[i], bad[i]);
            tables[i]->matmul(format, w, begin, end, k, acts[i], n_rows, y[i], ldy);
        }
        CHECK(memcmp(bad[0], bad[1], n_rows) == 0, "format %u, %zu × %zu: other rows are bad", format, n_rows, k);
        CHECK(memcmp(acts[0], acts[1], acts_bytes) == 0, "format %u, %zu × %zu, values %d: prepared differently", format, n_rows, k, kind);
        CHECK(same_floats(y[0], y[1], y_floats), "format %u, %zu rows × %zu inputs, tiles %zu to %zu of %zu, values %d", format, n_rows, k, begin, end,
              n_tiles, kind);
        release_all();
    }
}

static void test_rows_of_prepared_activations_are_gathered_like_prepared_alone(void)
{
    for (int round = 0; round < 75; round++) {
        uint32_t format = formats[round % N_FORMATS];
        size_t k = random_size(1, 140), n_from = random_size(1, 70), n_rows = random_size(1, 40);
        float *x = random_floats(n_from * k, WIDE), *picked = guarded_floats(n_rows * k);
        int32_t *rows = guarded(n_rows * sizeof *rows, 4);
        for (size_t i = 0; i < n_rows; i++) {
            rows[i] = (int32_t)random_size(0, n_from - 1);
            memcpy(picked + i * k, x + (size_t)rows[i] * k, k * sizeof *x);
        }
        size_t bytes = colibri_acts_bytes(format, n_rows, k);
        uint8_t *from = guarded(colibri_acts_bytes(format, n_from, k), 64), *gathered = guarded(bytes, 64), *direct = guarded(bytes, 64);
        uint8_t *bad = guarded(n_from > n_rows ? n_from : n_rows, 1);
        tested->prepare(format, x, k, n_from, k, from, bad);
        tested->gather(format, from, n_from, rows, n_rows, k, gathered);
        scalar->prepare(format, picked, k, n_rows, k, direct, bad);
        CHECK(memcmp(gathered, direct, bytes) == 0, "format %u, %zu of %zu rows of %zu", format, n_rows, n_from, k);
        release_all();
    }
}

static void test_a_row_is_decoded_as_scalar_decodes_it(void)
{
    for (int round = 0; round < 100; round++) {
        uint32_t format = formats[round % N_FORMATS];
        size_t k = random_size(1, 140), n_tiles = random_size(1, 4), row = random_size(0, n_tiles * TILE - 1);
        const uint8_t *w = random_matrix(format, n_tiles, k, round / N_FORMATS % N_VALUES);
        float *a = guarded_floats(k), *b = guarded_floats(k);
        scalar->decode_row(format, w, row, k, a);
        tested->decode_row(format, w, row, k, b);
        CHECK(same_floats(a, b, k), "format %u, row %zu of %zu inputs", format, row, k);
        release_all();
    }
}

/* All functions of vectors at one length. */
static void compare_vectors(size_t n, enum values kind)
{
    float *x = random_floats(n, kind), *w = random_floats(n, kind), *a = copied(x, n), *b = copied(x, n), factor = random_float(kind);
#define COMPARE(what) CHECK(same_floats(a, b, n), what " of %zu, values %d", n, kind)
    CHECK(scalar->rmsnorm(x, w, n, 1e-6f, a) == tested->rmsnorm(x, w, n, 1e-6f, b), "rmsnorm's status");
    COMPARE("rmsnorm");
    scalar->add(a, w, n), tested->add(b, w, n);
    COMPARE("add");
    memcpy(a, x, n * 4), memcpy(b, x, n * 4);
    scalar->add_scaled(a, factor, w, n), tested->add_scaled(b, factor, w, n);
    COMPARE("add_scaled");
    memcpy(a, x, n * 4), memcpy(b, x, n * 4);
    scalar->clip(a, 0.5f, n), tested->clip(b, 0.5f, n);
    COMPARE("clip");
    scalar->silu_mul(x, w, n, a), tested->silu_mul(x, w, n, b);
    COMPARE("silu_mul");
    scalar->exp(x, n, a), tested->exp(x, n, b);
    COMPARE("exp");
    memcpy(a, x, n * 4), memcpy(b, x, n * 4);
    scalar->rope(a, w, w + n / 2, n / 2), tested->rope(b, w, w + n / 2, n / 2);
    COMPARE("rope");
#undef COMPARE
    CHECK(same_float(scalar->max(x, n), tested->max(x, n)) || kind == ANY_BITS, "max of %zu, values %d", n, kind);
    CHECK(same_float(scalar->sum_exp(x, n, 1.5f), tested->sum_exp(x, n, 1.5f)), "sum_exp of %zu, values %d", n, kind);
    CHECK(scalar->all_finite(x, n) == tested->all_finite(x, n), "all_finite of %zu, values %d", n, kind);
    release_all();
}

static void test_vector_functions_equal_scalar_at_every_length(void)
{
    for (size_t n = 0; n < 100; n++)
        for (int kind = 0; kind < N_VALUES; kind++) compare_vectors(n, kind);
    compare_vectors(4096, WIDE);
}

static void test_exp_equals_scalar_over_all_magnitudes(void)
{
    enum { N = 65536 };
    static float x[N], a[N], b[N];
    for (uint32_t i = 0; i < N; i++) x[i] = of_bits(i * 65537u);
    scalar->exp(x, N, a), tested->exp(x, N, b);
    CHECK(same_floats(a, b, N), "some value differs");
}

static void test_every_half_is_widened_and_rounded_alike(void)
{
    enum { K = 65536 / TILE };
    size_t bytes = colibri_tile_bytes(COLIBRI_FMT_F16, K);
    uint16_t *tile = guarded(bytes, 64);
    float *a = guarded_floats(K), *b = guarded_floats(K);
    for (uint32_t i = 0; i < 65536; i++) tile[i] = (uint16_t)i;
    for (size_t row = 0; row < TILE; row++) {
        scalar->decode_row(COLIBRI_FMT_F16, tile, row, K, a), tested->decode_row(COLIBRI_FMT_F16, tile, row, K, b);
        CHECK(memcmp(a, b, K * sizeof *a) == 0, "halves %zu + 16 i", row);
    }
    release_all();
}

static void test_kv_is_written_as_scalar_writes_it(void)
{
    for (int round = 0; round < 120; round++) {
        uint32_t format = round % 2 ? COLIBRI_KV_F16 : COLIBRI_KV_F32;
        size_t head_dim = random_size(1, 140), lane = random_size(0, PAGE - 1), bytes = head_dim * PAGE * (format == COLIBRI_KV_F16 ? 2 : 4);
        float *k = random_floats(head_dim, round / 2 % N_VALUES), *v = random_floats(head_dim, round / 2 % N_VALUES);
        uint8_t *pages[4];
        for (int i = 0; i < 4; i++) pages[i] = memset(guarded(bytes, 64), 0, bytes);
        size_t expected = scalar->kv_write(format, k, v, head_dim, lane, pages[0], pages[1]);
        CHECK(tested->kv_write(format, k, v, head_dim, lane, pages[2], pages[3]) == expected, "another count of overflows");
        CHECK(memcmp(pages[0], pages[2], bytes) == 0 && memcmp(pages[1], pages[3], bytes) == 0, "format %u, %zu dimensions", format, head_dim);
        release_all();
    }
}

/* A random sequence of pages that hold finite values of the format, NaN in the lanes after the last position, and queries on it. */
struct attention_case {
    struct colibri_attention a;
    int32_t positions[COLIBRI_MAX_QUERIES];
    const uint8_t *pages[6];
    size_t out_floats;
};

static void store_kv(uint8_t *page, uint32_t format, size_t index, float x)
{
    uint16_t half = isnan(x) ? 0x7e00 : (uint16_t)((to_bits(x) >> 16 & 0x8000) | (random_bits() % 12 + 5) << 10 | (random_bits() & 0x3ff));
    if (format == COLIBRI_KV_F16) memcpy(page + 2 * index, &half, 2);
    else memcpy(page + 4 * index, &x, 4);
}

static void make_pages(struct attention_case *c, size_t n_tokens)
{
    size_t head_dim = c->a.head_dim, bytes = head_dim * PAGE * (c->a.kv_format == COLIBRI_KV_F16 ? 2 : 4);
    c->a.k_offset = 64, c->a.v_offset = 64 + bytes;
    c->a.pages = c->pages;
    for (size_t page = 0; page * PAGE < n_tokens; page++) {
        uint8_t *p = guarded(64 + 2 * bytes, 64);
        for (size_t t = 0; t < PAGE; t++)
            for (size_t d = 0; d < head_dim; d++) {
                int seen = page * PAGE + t < n_tokens;
                store_kv(p + c->a.k_offset, c->a.kv_format, d * PAGE + t, seen ? random_float(WIDE) : NAN);
                store_kv(p + c->a.v_offset, c->a.kv_format, t * head_dim + d, seen ? random_float(WIDE) : NAN);
            }
        c->pages[page] = p;
    }
}

static int ascending(const void *a, const void *b)
{
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

static void make_attention(struct attention_case *c, int round)
{
    static const size_t dims[] = {64, 128, 80, 16, 7, 32, 96, 40};
    size_t n = round % 3 ? random_size(1, 12) : random_size(1, COLIBRI_MAX_QUERIES), head_dim = dims[round % 8];
    int32_t longest = (int32_t)random_size(0, 5 * PAGE - 1);
    for (size_t i = 0; i < n; i++) c->positions[i] = round % 5 == 0 ? longest : (int32_t)random_size(0, (size_t)longest);
    if (round % 4 == 1) /* a prefill's consecutive rows */
        for (size_t i = 0; i < n; i++) c->positions[i] = (int32_t)i;
    qsort(c->positions, n, sizeof *c->positions, ascending);
    c->a = (struct colibri_attention){.q_stride = head_dim + random_size(0, 5), .out_stride = head_dim + random_size(0, 5), .n_queries = n,
                                      .head_dim = head_dim, .positions = c->positions, .scale = 0.125f,
                                      .kv_format = round % 2 ? COLIBRI_KV_F16 : COLIBRI_KV_F32};
    c->a.q = random_floats((n - 1) * c->a.q_stride + head_dim, PLAIN);
    c->out_floats = (n - 1) * c->a.out_stride + head_dim;
    make_pages(c, (size_t)c->positions[n - 1] + 1);
    c->a.scratch = guarded((colibri_attention_scratch(n, head_dim) * sizeof(float) + 63) / 64 * 64, 64);
}

static void test_attention_equals_scalar(void)
{
    for (int round = 0; round < 120; round++) {
        struct attention_case c;
        make_attention(&c, round);
        float *a = random_floats(c.out_floats, PLAIN), *b = copied(a, c.out_floats);
        c.a.out = a, scalar->attention(&c.a);
        c.a.out = b, tested->attention(&c.a);
        CHECK(memcmp(a, b, c.out_floats * sizeof *a) == 0, "%zu queries of %zu dimensions, up to position %d, format %u", c.a.n_queries, c.a.head_dim,
              c.positions[c.a.n_queries - 1], c.a.kv_format);
        release_all();
    }
}

static void test_attention_of_a_query_does_not_depend_on_its_company(void)
{
    for (int round = 0; round < 40; round++) {
        struct attention_case c;
        make_attention(&c, round);
        float *together = guarded_floats(c.out_floats), *alone = guarded_floats(c.a.head_dim);
        c.a.out = together, tested->attention(&c.a);
        size_t n = c.a.n_queries;
        const float *q = c.a.q;
        for (size_t i = 0; i < n; i++) {
            c.a.n_queries = 1, c.a.q = q + i * c.a.q_stride, c.a.positions = c.positions + i, c.a.out = alone;
            tested->attention(&c.a);
            CHECK(memcmp(alone, together + i * c.a.out_stride, c.a.head_dim * sizeof(float)) == 0, "query %zu of %zu", i, n);
        }
        release_all();
    }
}

static void test_the_checksum_equals_scalar_at_every_length(void)
{
    for (size_t n = 0; n < 1100; n += n < 600 ? 1 : 37) {
        uint8_t *data = guarded(n, 1);
        for (size_t i = 0; i < n; i++) data[i] = (uint8_t)random_bits();
        CHECK(scalar->checksum(data, n) == tested->checksum(data, n), "%zu bytes", n);
        release_all();
    }
}

/* ---- scalar against double precision ---- */

/* x as docs/numerics.md quantises it for q8 and q4: integer × scale, in double. */
static void quantised(const float *x, size_t k, double *out)
{
    for (size_t begin = 0; begin < k; begin += GROUP) {
        size_t end = begin + GROUP < k ? begin + GROUP : k;
        float amax = 0;
        for (size_t i = begin; i < end; i++) amax = fmaxf(amax, fabsf(x[i]));
        for (size_t i = begin; i < end; i++) {
            float product = amax < 0x1p-100f ? 0 : x[i] * (127 / amax);
            out[i] = amax < 0x1p-100f ? 0 : (double)lrintf(product) * (double)(amax / 127);
        }
    }
}

static void test_matrix_products_match_double_precision(void)
{
    for (int round = 0; round < 40; round++) {
        uint32_t format = formats[round % N_FORMATS];
        size_t k = random_size(1, 400), n_rows = random_size(1, 20), n_tiles = random_size(1, 3), ldy = n_tiles * TILE;
        const float *x = random_floats(n_rows * k, round % (2 * N_FORMATS) < N_FORMATS ? PLAIN : WIDE);
        const uint8_t *w = random_matrix(format, n_tiles, k, PLAIN);
        void *acts = guarded(colibri_acts_bytes(format, n_rows, k), 64);
        uint8_t bad[20] = {0};
        float *y = guarded_floats(n_rows * ldy);
        tested->prepare(format, x, k, n_rows, k, acts, bad);
        tested->matmul(format, w, 0, n_tiles, k, acts, n_rows, y, ldy);
        for (size_t r = 0; r < n_rows; r++) {
            double values[400];
            if (is_integer(format)) quantised(x + r * k, k, values);
            else for (size_t i = 0; i < k; i++) values[i] = x[r * k + i];
            for (size_t row = 0; row < n_tiles * TILE; row++) {
                double sum = 0, magnitude = 0;
                for (size_t i = 0; i < k; i++) {
                    double term = weight_at(format, w, row, i, k) * values[i];
                    sum += term, magnitude += fabs(term);
                }
                double error = fabs(y[r * ldy + row] - sum), bound = ((double)k + 4) * 0x1p-24 * magnitude;
                CHECK(error <= bound, "format %u, %zu inputs: off by %g, bound %g", format, k, error, bound);
            }
        }
        release_all();
    }
}

static void test_activations_that_are_tiny_or_not_finite_are_flagged_or_zero(void)
{
    enum { K = 40, ROWS = 5 };
    float x[ROWS][K] = {{0}};
    x[0][3] = 0x1p-101f, x[1][35] = NAN, x[2][0] = INFINITY, x[3][1] = -3e38f, x[4][7] = 1;
    for (size_t f = 0; f < N_FORMATS; f++) {
        _Alignas(64) uint8_t acts[ROWS * 16 * 64 * 4];
        uint8_t bad[ROWS] = {0, 0, 0, 0, 1}, expected[ROWS] = {0, 1, 1, 0, 1};
        tested->prepare(formats[f], x[0], K, ROWS, K, acts, bad);
        CHECK(memcmp(bad, expected, ROWS) == 0, "format %u", formats[f]);
    }
    _Alignas(64) uint8_t acts[ROWS * 16 * 64 * 4], *w = random_matrix(COLIBRI_FMT_Q8, 1, K, PLAIN);
    uint8_t bad[ROWS] = {0};
    float y[ROWS][TILE];
    tested->prepare(COLIBRI_FMT_Q8, x[0], K, ROWS, K, acts, bad);
    tested->matmul(COLIBRI_FMT_Q8, w, 0, 1, K, acts, ROWS, y[0], TILE);
    for (size_t i = 0; i < TILE; i++) CHECK(y[0][i] == 0 && y[1][i] == 0, "a tiny group and a group with NaN count as zero");
    release_all();
}

static void test_a_decoded_row_is_its_weights(void)
{
    for (size_t f = 0; f < N_FORMATS; f++) {
        size_t k = 77;
        const uint8_t *w = random_matrix(formats[f], 2, k, PLAIN);
        float y[77];
        for (size_t row = 0; row < 2 * TILE; row++) {
            tested->decode_row(formats[f], w, row, k, y);
            for (size_t i = 0; i < k; i++) CHECK(y[i] == (float)weight_at(formats[f], w, row, i, k), "format %u, row %zu", formats[f], row);
        }
        release_all();
    }
}

/* Spacing of floats at x. */
static double ulp(double x) { return ldexp(1, x == 0 || ilogb(x) < -126 ? -149 : ilogb(x) - 23); }

static void test_exp_is_within_one_and_a_half_ulp(void)
{
    double worst = 0;
    enum { N = 4096 };
    static float x[N], y[N];
    for (int block = 0; block < 256; block++) {
        for (int i = 0; i < N; i++) x[i] = (float)(-103.97 + (103.97 + 88.72) * (block * N + i) / (256.0 * N));
        tested->exp(x, N, y);
        for (int i = 0; i < N; i++) {
            double exact = exp((double)x[i]), error = fabs(y[i] - exact) / ulp(exact);
            if (error > worst) worst = error;
        }
    }
    CHECK(worst < 1.5, "%.3f ulp", worst);
    printf("  exp: at most %.3f ulp\n", worst);

    const float edges[] = {-INFINITY, -1e30f, -103.98f, 0.0f, -0.0f, 1e-45f, 88.72f, 100.0f, INFINITY, NAN};
    float out[10];
    tested->exp(edges, 10, out);
    CHECK(out[0] == 0 && out[1] == 0 && out[2] == 0 && out[3] == 1 && out[4] == 1 && out[5] == 1, "low edges");
    CHECK(out[6] > 3.39e38f && isfinite(out[6]) && out[7] == out[6] && out[8] == out[6] && isnan(out[9]), "high edges");
}

static void test_fma_rounds_once(void)
{
    enum { N = 64 };
    for (int round = 0; round < 4000; round++) {
        enum values kind = round % 2 ? ANY_BITS : EXTREME;
        float acc[N], y[N], expected[N], w = random_float(kind);
        for (int i = 0; i < N; i++) {
            acc[i] = random_float(kind), y[i] = random_float(kind);
            if (i % 4 == 0) acc[i] = -(w * y[i]); /* cancels but for the rounding */
            if (i % 4 == 1) acc[i] = ldexpf(w * y[i], 24); /* near half an ulp */
            expected[i] = fmaf(w, y[i], acc[i]);
        }
        tested->add_scaled(acc, w, y, N);
        CHECK(same_floats(acc, expected, N), "round %d", round);
    }
}

static void test_norm_rotation_and_silu_match_double_precision(void)
{
    enum { N = 150 };
    const float *x = random_floats(N, WIDE), *w = random_floats(N, PLAIN);
    float *y = guarded_floats(N);
    double squares = 0;
    for (int i = 0; i < N; i++) squares += (double)x[i] * x[i];
    CHECK(tested->rmsnorm(x, w, N, 1e-5f, y) == 0, "finite");
    for (int i = 0; i < N; i++) {
        double exact = x[i] / sqrt(squares / N + 1e-5f) * w[i];
        CHECK(fabs(y[i] - exact) <= 1e-6 * fabs(exact), "rmsnorm %d", i);
    }
    tested->silu_mul(x, w, N, y);
    for (int i = 0; i < N; i++) {
        double exact = x[i] / (1 + exp(-(double)x[i])) * w[i];
        CHECK(fabs(y[i] - exact) <= 1e-6 * fabs(exact) + 1e-34, "silu %d: %g, not %g", i, y[i], exact);
    }
    float rotated[2 * 40], cosines[40], sines[40];
    for (int i = 0; i < 40; i++) cosines[i] = cosf((float)i), sines[i] = sinf((float)i);
    memcpy(rotated, x, sizeof rotated);
    tested->rope(rotated, cosines, sines, 40);
    for (int i = 0; i < 40; i++) {
        double a = x[i], b = x[i + 40], size = hypot(a, b);
        CHECK(fabs(rotated[i] - (a * cosines[i] - b * sines[i])) <= 2e-7 * size, "rotation %d", i);
        CHECK(fabs(rotated[i + 40] - (b * cosines[i] + a * sines[i])) <= 2e-7 * size, "rotation %d", i + 40);
    }
    release_all();
}

static void test_sums_and_extremes_match_plain_loops(void)
{
    enum { N = 203 };
    float *x = random_floats(N, PLAIN);
    float largest = -INFINITY;
    double sum = 0;
    for (int i = 0; i < N; i++) largest = fmaxf(largest, x[i]), sum += exp((double)x[i] - 0.9f);
    CHECK(tested->max(x, N) == largest && tested->max(x, 0) == -INFINITY, "max");
    CHECK(fabs(tested->sum_exp(x, N, 0.9f) - sum) < 1e-5 * sum, "sum_exp");
    CHECK(tested->all_finite(x, N) == 1 && tested->all_finite(x, 0) == 1, "all finite");
    x[N - 1] = NAN;
    CHECK(tested->all_finite(x, N) == 0 && tested->all_finite(x, N - 1) == 1, "a NaN at the end");
    tested->clip(x, 0.25f, N);
    for (int i = 0; i + 1 < N; i++) CHECK(fabsf(x[i]) <= 0.25f, "clip");
    CHECK(isnan(x[N - 1]), "clip hides no NaN");
    float y[2] = {1e30f, 1};
    CHECK(tested->rmsnorm(y, y, 2, 0, y) == 1 && y[0] == 0 && y[1] == 0, "rmsnorm of a sum beyond float");
    release_all();
}

static void test_every_half_has_its_value_and_nearest_half(void)
{
    for (uint32_t h = 0; h < 65536; h++) {
        uint16_t tile[TILE] = {(uint16_t)h}, k[PAGE], v[PAGE];
        float widened;
        tested->decode_row(COLIBRI_FMT_F16, tile, 0, 1, &widened);
        CHECK(same_float(widened, (float)value_of_f16((uint16_t)h)), "half %04x", h);
        if (isnan(widened)) continue;
        /* Between it and the next larger magnitude, ties go to the even one. */
        double next = (h & 0x7fff) == 0x7bff ? copysign(65536, widened) : value_of_f16((uint16_t)(h + 1)), middle = (widened + next) / 2;
        if ((h & 0x7fff) >= 0x7c00) middle = widened;
        const float from[] = {widened, (float)middle, nextafterf((float)middle, 0), nextafterf((float)middle, widened < 0 || h >> 15 ? -INFINITY : INFINITY)};
        const uint32_t up = h + 1, to[] = {h, h & 1 ? up : h, h, up};
        for (int i = 0; i < 4 && (i == 0 || (h & 0x7fff) < 0x7c00); i++) {
            size_t overflows = tested->kv_write(COLIBRI_KV_F16, &from[i], &from[i], 1, 3, k, v);
            CHECK(k[3] == to[i] && v[3] == to[i], "%a becomes %04x, not %04x", from[i], v[3], to[i]);
            CHECK(overflows == ((to[i] & 0x7fff) == 0x7c00 ? 2 : 0), "%a: %zu overflows", from[i], overflows);
        }
    }
}

static float kv_value(const struct colibri_attention *a, size_t t, size_t offset, size_t index)
{
    const uint8_t *page = a->pages[t / PAGE] + offset;
    uint16_t half;
    float x;
    memcpy(&half, page + 2 * index, 2);
    if (a->kv_format == COLIBRI_KV_F16) return (float)value_of_f16(half);
    memcpy(&x, page + 4 * index, 4);
    return x;
}

static void test_attention_matches_softmax_in_double_precision(void)
{
    for (int round = 0; round < 24; round++) {
        struct attention_case c;
        make_attention(&c, round);
        c.a.out = guarded_floats(c.out_floats);
        tested->attention(&c.a);
        for (size_t i = 0; i < c.a.n_queries; i++) {
            double scores[5 * PAGE], largest = -INFINITY, sum = 0;
            size_t n = (size_t)c.positions[i] + 1;
            for (size_t t = 0; t < n; t++) {
                scores[t] = 0;
                for (size_t d = 0; d < c.a.head_dim; d++)
                    scores[t] += (double)c.a.q[i * c.a.q_stride + d] * c.a.scale * kv_value(&c.a, t, c.a.k_offset, d * PAGE + t % PAGE);
                largest = fmax(largest, scores[t]);
            }
            for (size_t t = 0; t < n; t++) sum += scores[t] = exp(scores[t] - largest);
            for (size_t d = 0; d < c.a.head_dim; d++) {
                double exact = 0, magnitude = 0;
                for (size_t t = 0; t < n; t++) {
                    double term = scores[t] / sum * kv_value(&c.a, t, c.a.v_offset, t % PAGE * c.a.head_dim + d);
                    exact += term, magnitude += fabs(term);
                }
                double error = fabs(c.a.out[i * c.a.out_stride + d] - exact);
                CHECK(error <= 1e-3 * magnitude, "query %zu, dimension %zu: off by %g of %g", i, d, error, magnitude);
            }
        }
        release_all();
    }
}

/* ---- what is compiled once ---- */

static uint64_t literal_checksum(const uint8_t *data, size_t n)
{
    uint32_t h[64];
    for (uint32_t j = 0; j < 64; j++) h[j] = 0x9E3779B1u * (j + 1);
    for (size_t at = 0; at < n; at += 256)
        for (size_t j = 0; j < 64; j++) {
            uint32_t w = 0;
            for (size_t b = 0; b < 4; b++)
                if (at + 4 * j + b < n) w |= (uint32_t)data[at + 4 * j + b] << (8 * b);
            h[j] = (h[j] ^ w) * 0x85EBCA77u;
            h[j] ^= h[j] >> 15;
        }
    uint64_t a = n * 0x9E3779B97F4A7C15u;
    for (int j = 0; j < 64; j++) {
        a = (a ^ h[j]) * 0x9FB21C651E98DF25u;
        a ^= a >> 32;
    }
    return a;
}

static void test_the_checksum_is_the_formula_of_the_format(void)
{
    for (size_t n = 0; n < 800; n++) {
        uint8_t data[800];
        for (size_t i = 0; i < n; i++) data[i] = (uint8_t)random_bits();
        CHECK(tested->checksum(data, n) == literal_checksum(data, n), "%zu bytes", n);
    }
}

static void test_sine_and_cosine_are_rounded_once(void)
{
    float frequencies[64], cosines[64], sines[64];
    for (int i = 0; i < 64; i++) frequencies[i] = (float)pow(10000, -i / 64.0);
    for (int32_t position = 0; position < 1000000; position += position < 1000 ? 1 : 997) {
        colibri_rope_angles(position, frequencies, 64, 1, cosines, sines);
        for (int i = 0; i < 64; i++) {
            double angle = (float)position * frequencies[i], s = sin(angle), c = cos(angle);
            CHECK(fabs(sines[i] - s) <= (0.5 + 1e-6) * ulp(s) && fabs(cosines[i] - c) <= (0.5 + 1e-6) * ulp(c), "position %d, pair %d", position, i);
        }
    }
    colibri_rope_angles(7, frequencies, 1, 1.5f, cosines, sines);
    CHECK(cosines[0] == (float)cos(7) * 1.5f && sines[0] == (float)sin(7) * 1.5f, "the factor multiplies the rounded values");
    const float beyond[] = {INFINITY, NAN, 1e30f};
    colibri_rope_angles(3, beyond, 3, 1, cosines, sines);
    for (int i = 0; i < 3; i++) CHECK(isnan(cosines[i]) && isnan(sines[i]), "an angle without meaning is NaN");
}

static void test_the_logarithm_matches_the_library(void)
{
    for (int i = 0; i < 200000; i++) {
        double x = ldexp(1 + random_bits() * 0x1p-32, i % 2 ? 0 : (int)random_size(0, 2000) - 1000), exact = log(x);
        CHECK(fabs(colibri_log(x) - exact) <= 4e-16 * fabs(exact), "log %a", x);
    }
    CHECK(colibri_log(1) == 0 && colibri_log(0) == -INFINITY && isnan(colibri_log(-1)) && isnan(colibri_log(NAN)) && colibri_log(INFINITY) == INFINITY,
          "special values");
    CHECK(fabs(colibri_log(0x1p-1074) + 744.44007192138126) < 1e-12, "the smallest subnormal");
}

static void test_sizes_are_those_of_the_layout(void)
{
    CHECK(colibri_tile_bytes(COLIBRI_FMT_F32, 33) == 33 * 64 && colibri_tile_bytes(COLIBRI_FMT_F16, 33) == 17 * 64, "wide tiles");
    CHECK(colibri_tile_bytes(COLIBRI_FMT_Q8, 33) == 2 * (512 + 32) && colibri_tile_bytes(COLIBRI_FMT_Q8, 32) == 576, "q8 tiles are padded");
    CHECK(colibri_matrix_bytes(COLIBRI_FMT_BF16, 17, 8) == 2 * 256, "a part of a tile counts whole");
    CHECK(colibri_tile_bytes(COLIBRI_FMT_Q4, 33) == 2 * (256 + 32) && colibri_tile_bytes(COLIBRI_FMT_Q4, 32) == 320, "q4 tiles are half of it");
    CHECK(colibri_tile_bytes(COLIBRI_FMT_Q4 + 1, 32) == 0 && colibri_matrix_bytes(77, 16, 32) == 0, "unknown formats");
    CHECK(colibri_matrix_bytes(COLIBRI_FMT_F32, SIZE_MAX, 64) == 0 && colibri_tile_bytes(COLIBRI_FMT_F32, SIZE_MAX / 2) == 0, "overflow");
    CHECK(colibri_acts_bytes(COLIBRI_FMT_F32, SIZE_MAX, 64) == 0 && colibri_acts_bytes(COLIBRI_FMT_Q8, 1, 33) % 64 == 0, "activations");
}

static void test_the_control_word_is_set_and_restored(void)
{
#if defined(__x86_64__)
    unsigned before = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(before | 0x8040); /* flush to zero, denormals are zero */
    uint64_t state = colibri_fp_enter();
    volatile float smallest = 0x1p-126f, inside = smallest / 2; /* looked at as bits: a comparison of floats follows the control word too */
    colibri_fp_restore(state);
    volatile float after = smallest / 2;
    __builtin_ia32_ldmxcsr(before);
    CHECK(to_bits(inside) == 0x00400000, "a subnormal became %08x inside", to_bits(inside));
    CHECK(to_bits(after) == 0, "a subnormal stayed %08x after", to_bits(after));
#endif
}

static void test_an_instruction_set_is_chosen_by_name(void)
{
    char err[200];
    for (const char *const *name = colibri_isa_names; *name; name++) {
        const struct colibri_kernels *table = colibri_kernels_built(*name), *usable = colibri_kernels_get(*name, err, sizeof err);
        CHECK(table && strcmp(table->name, *name) == 0, "%s is not built", *name);
        CHECK(usable == table || (usable == NULL && strstr(err, *name)), "%s: %s", *name, err);
        setenv("COLIBRI_ISA", *name, 1);
        CHECK(colibri_kernels_get(NULL, err, sizeof err) == usable, "COLIBRI_ISA=%s", *name);
    }
    unsetenv("COLIBRI_ISA");
    CHECK(colibri_kernels_get(NULL, err, sizeof err) != NULL, "one is always there");
    CHECK(colibri_kernels_get("pentium", err, sizeof err) == NULL && strstr(err, "'pentium'") && strstr(err, "scalar"), "unknown: %s", err);
    CHECK(colibri_kernels_built("pentium") == NULL, "not built");
}

/* Is the table that is chosen without a name one that needs none of the hidden feature? `needing`: names of those that do, ended by NULL. */
static void check_choice_without(const char *feature, const char *const *needing)
{
    char err[200];
    colibri_kernels_hide_feature(feature);
    const char *chosen = colibri_kernels_get(NULL, err, sizeof err)->name;
    for (; *needing; needing++) {
        CHECK(strcmp(chosen, *needing) != 0, "%s was chosen without %s", chosen, feature);
        CHECK(colibri_kernels_get(*needing, err, sizeof err) == NULL, "%s was given without %s", *needing, feature);
    }
    CHECK(colibri_kernels_get("scalar", err, sizeof err) == scalar, "scalar needs nothing: %s", err);
    colibri_kernels_hide_feature("");
}

static void test_a_cpu_that_lacks_a_feature_runs_what_does_without(void)
{
    static const char *const all[] = {"amx", "avx512vnni", "avxvnni", "avx2", NULL};
    static const char *const amx_or_512[] = {"amx", "avx512vnni", NULL}, *const vnni[] = {"avxvnni", NULL};
    static const char *const needed_by_all[] = {"FMA", "F16C", "AVX2", "OSXSAVE"};
    for (size_t i = 0; i < sizeof needed_by_all / sizeof *needed_by_all; i++) {
        check_choice_without(needed_by_all[i], all);
        colibri_kernels_hide_feature(needed_by_all[i]);
        CHECK(colibri_kernels_get(NULL, NULL, 0) == scalar, "not scalar without %s", needed_by_all[i]);
        colibri_kernels_hide_feature("");
    }
    check_choice_without("AVX512_VNNI", amx_or_512);
    check_choice_without("AVX512F", amx_or_512);
    check_choice_without("AVX_VNNI", vnni);
}

static uint64_t wrong_checksum(const void *data, size_t n) { return scalar->checksum(data, n) + 1; }
static uint64_t illegal_checksum(const void *data, size_t n)
{
    raise(SIGILL);
    return scalar->checksum(data, n);
}
static void other_handler(int number) { (void)number; }

static void test_a_trial_finds_wrong_bits_and_survives_an_illegal_instruction(void)
{
    CHECK(colibri_kernels_trial(scalar, scalar) == NULL, "scalar equals itself");
    struct colibri_kernels broken = *scalar;
    broken.checksum = wrong_checksum;
    const char *said = colibri_kernels_trial(&broken, scalar);
    CHECK(said && strstr(said, "checksum"), "wrong bits: %s", said ? said : "nothing said");

    signal(SIGILL, other_handler);
    broken.checksum = illegal_checksum;
    for (int i = 0; i < 2; i++) {
        said = colibri_kernels_trial(&broken, scalar);
        CHECK(said && strstr(said, "illegal instruction"), "illegal instruction: %s", said ? said : "nothing said");
    }
    CHECK(signal(SIGILL, SIG_DFL) == other_handler, "the handler from before is there again");
}

/* ---- running ---- */

struct test {
    const char *name;
    void (*run)(void);
};
#define TEST(function) {#function, function}

static const struct test against_scalar[] = {
    TEST(test_matrices_equal_scalar_at_random_shapes),
    TEST(test_rows_of_prepared_activations_are_gathered_like_prepared_alone),
    TEST(test_a_row_is_decoded_as_scalar_decodes_it),
    TEST(test_vector_functions_equal_scalar_at_every_length),
    TEST(test_exp_equals_scalar_over_all_magnitudes),
    TEST(test_every_half_is_widened_and_rounded_alike),
    TEST(test_kv_is_written_as_scalar_writes_it),
    TEST(test_attention_equals_scalar),
    TEST(test_attention_of_a_query_does_not_depend_on_its_company),
    TEST(test_the_checksum_equals_scalar_at_every_length),
    {NULL, NULL},
};
static const struct test against_double[] = {
    TEST(test_matrix_products_match_double_precision),
    TEST(test_activations_that_are_tiny_or_not_finite_are_flagged_or_zero),
    TEST(test_a_decoded_row_is_its_weights),
    TEST(test_exp_is_within_one_and_a_half_ulp),
    TEST(test_fma_rounds_once),
    TEST(test_norm_rotation_and_silu_match_double_precision),
    TEST(test_sums_and_extremes_match_plain_loops),
    TEST(test_every_half_has_its_value_and_nearest_half),
    TEST(test_attention_matches_softmax_in_double_precision),
    TEST(test_the_checksum_is_the_formula_of_the_format),
    TEST(test_rows_of_prepared_activations_are_gathered_like_prepared_alone),
    TEST(test_attention_of_a_query_does_not_depend_on_its_company),
    {NULL, NULL},
};
static const struct test compiled_once[] = {
    TEST(test_sine_and_cosine_are_rounded_once),
    TEST(test_the_logarithm_matches_the_library),
    TEST(test_sizes_are_those_of_the_layout),
    TEST(test_the_control_word_is_set_and_restored),
    TEST(test_an_instruction_set_is_chosen_by_name),
    TEST(test_a_cpu_that_lacks_a_feature_runs_what_does_without),
    TEST(test_a_trial_finds_wrong_bits_and_survives_an_illegal_instruction),
    {NULL, NULL},
};

static void run(const struct test *tests)
{
    for (; tests->name; tests++) {
        current_test = tests->name;
        random_state = 20240229;
        tests->run();
        release_all();
        printf("ok %s\n", tests->name);
        fflush(stdout);
    }
}

int main(int argc, char **argv)
{
    char err[200];
    scalar = colibri_kernels_built("scalar");
    if (argc < 2) {
        run(compiled_once);
        return 0;
    }
    tested = colibri_kernels_get(argv[1], err, sizeof err);
    if (tested == NULL) {
        /* What this CPU cannot run is skipped; what runs and gives other bits is wrong, though a program would do without it. */
        printf("%s\n", err);
        return !colibri_kernels_built(argv[1]) || strstr(err, "differs") ? 1 : 77;
    }
    if (tested == scalar) run(against_double);
    else run(against_scalar);
    return 0;
}
