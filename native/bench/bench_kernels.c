/*
 * How fast the kernels are on one thread, beside what this core can do: for every instruction set that runs here, or those named.
 *
 *     bench_kernels [ISA...]
 *
 * A multiplication and an addition are two operations. Each figure is the best of several runs; the limits are measured in the same process, and
 * a busy machine moves both.
 */
#define _POSIX_C_SOURCE 200809L

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "colibri.h"
#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define ROUNDS 7

/* CPU time of this thread, so that what else runs on the machine counts as little as possible. */
static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

typedef void work(void *);

static double best_time(work *f, void *arg)
{
    double best = 1e30;
    for (int i = 0; i < ROUNDS; i++) {
        double begin = seconds();
        f(arg);
        double took = seconds() - begin;
        if (took < best) best = took;
    }
    return best;
}

static void *allocate(size_t n)
{
    void *p = aligned_alloc(64, (n + 63) / 64 * 64);
    if (p == NULL) {
        fprintf(stderr, "bench_kernels: no memory for %zu bytes\n", n);
        exit(1);
    }
    return memset(p, 0x3d, n); /* small numbers in every format */
}

/* ---- limits of this core ---- */

#define PEAK_STEPS 200000
#define CHAINS 10 /* independent accumulators: more than latency × ports */
static volatile int sink;

#if defined(__x86_64__)
#define PEAK(name, isa, type, zero, set, multiply, take)                                                    \
    __attribute__((target(isa))) static void name(void *unused)                                             \
    {                                                                                                       \
        (void)unused;                                                                                       \
        type acc[CHAINS], a = set(1), b = set(2), ones = set(3);                                            \
        (void)ones;                                                                                         \
        _Pragma("GCC unroll 10") for (int c = 0; c < CHAINS; c++) acc[c] = zero();                                            \
        for (int i = 0; i < PEAK_STEPS; i++) {                                                              \
            _Pragma("GCC unroll 10") for (int c = 0; c < CHAINS; c++) {                                     \
                acc[c] = multiply(acc[c], a, b);                                                            \
                __asm__ volatile("" : "+v"(a)); /* no two multiplications are the same */                   \
            }                                                                                               \
        }                                                                                                   \
        for (int c = 1; c < CHAINS; c++) acc[0] = multiply(acc[0], acc[c], b);                              \
        sink = take(acc[0]);                                                                                \
    }
#define TAKE_512(x) _mm_cvtsi128_si32(_mm512_castsi512_si128(x))
#define TAKE_256(x) _mm_cvtsi128_si32(_mm256_castsi256_si128(x))
#define WITHOUT_VNNI(acc, a, b) _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), ones))
PEAK(peak_512, "avx512f,avx512vnni", __m512i, _mm512_setzero_si512, _mm512_set1_epi8, _mm512_dpbusd_epi32, TAKE_512)
PEAK(peak_vnni, "avx2,avxvnni", __m256i, _mm256_setzero_si256, _mm256_set1_epi8, _mm256_dpbusd_avx_epi32, TAKE_256)
PEAK(peak_avx2, "avx2", __m256i, _mm256_setzero_si256, _mm256_set1_epi8, WITHOUT_VNNI, TAKE_256)
#endif

/* Operations per second of the int8 multiplication alone, from registers; 0 where there is none to speak of. */
static double int8_peak(const char *isa)
{
#if defined(__x86_64__)
    double per_second = 2.0 * CHAINS * PEAK_STEPS;
    if (strcmp(isa, "avx512vnni") == 0 || strcmp(isa, "amx") == 0) return per_second * 64 / best_time(peak_512, NULL);
    if (strcmp(isa, "avxvnni") == 0) return per_second * 32 / best_time(peak_vnni, NULL);
    if (strcmp(isa, "avx2") == 0) return per_second * 32 / best_time(peak_avx2, NULL);
#endif
    (void)isa;
    return 0;
}

struct memory {
    const uint64_t *words;
    size_t n_bytes;
};

/* Several streams, as the kernels read tiles: more than one keeps enough lines on their way, and an odd distance keeps them in different sets. */
#define STREAMS 4
#define STREAM_WORDS (34816 / 8)
static void read_memory(void *arg)
{
    const struct memory *m = arg;
    uint64_t sums[8] = {0};
    for (size_t begin = 0; begin + STREAMS * STREAM_WORDS <= m->n_bytes / 8; begin += STREAMS * STREAM_WORDS)
        for (size_t i = 0; i < STREAM_WORDS; i += 8)
            for (size_t stream = 0; stream < STREAMS; stream++) {
                const uint64_t *at = m->words + begin + stream * STREAM_WORDS + i;
                __builtin_prefetch((const void *)((uintptr_t)at + 2048));
                for (size_t j = 0; j < 8; j++) sums[j] += at[j];
            }
    for (int j = 0; j < 8; j++) sink = (int)sums[j];
}

/* ---- kernels ---- */

struct product {
    const struct colibri_kernels *f;
    uint32_t format;
    const void *weights;
    size_t n_tiles, k, n_rows;
    void *acts;
    float *y;
};

static void multiply(void *arg)
{
    const struct product *p = arg;
    p->f->matmul(p->format, p->weights, 0, p->n_tiles, p->k, p->acts, p->n_rows, p->y, p->n_tiles * COLIBRI_TILE_ROWS);
}

static const struct {
    uint32_t format;
    const char *name;
} formats[] = {{COLIBRI_FMT_Q8, "q8"}, {COLIBRI_FMT_Q4, "q4"}, {COLIBRI_FMT_BF16, "bf16"}, {COLIBRI_FMT_F16, "f16"}, {COLIBRI_FMT_F32, "f32"}};

/* An expert of 1408 × 2048 (from the caches) by many rows; a head of as many rows as fill the memory by one. */
static void bench_products(const struct colibri_kernels *f, const struct memory *memory, double peak, double bandwidth)
{
    static const size_t rows[] = {1, 2, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 512};
    const size_t k = 2048, n_tiles = 1408 / COLIBRI_TILE_ROWS;
    int scalar = strcmp(f->name, "scalar") == 0;
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
        struct product p = {.f = f, .format = formats[i].format, .weights = memory->words, .k = k, .n_tiles = n_tiles};
        printf("  %-5s GOP/s:", formats[i].name);
        for (size_t r = 0; r < sizeof rows / sizeof *rows && rows[r] <= (scalar ? 4 : 512); r++) {
            p.n_rows = rows[r];
            float *x = allocate(p.n_rows * k * sizeof *x);
            uint8_t bad[512] = {0};
            p.acts = allocate(colibri_acts_bytes(p.format, p.n_rows, k));
            p.y = allocate(p.n_rows * n_tiles * COLIBRI_TILE_ROWS * sizeof *p.y);
            f->prepare(p.format, x, k, p.n_rows, k, p.acts, bad);
            double rate = 2.0 * (double)(p.n_rows * k * n_tiles * COLIBRI_TILE_ROWS) / best_time(multiply, &p);
            printf(" %zu rows %.0f", p.n_rows, rate * 1e-9);
            if (peak > 0 && (p.format == COLIBRI_FMT_Q8 || p.format == COLIBRI_FMT_Q4)) printf(" (%.0f%%)", 100 * rate / peak);
            free(x), free(p.acts), free(p.y);
        }
        size_t tile_bytes = colibri_tile_bytes(p.format, k);
        p.n_tiles = memory->n_bytes / (scalar ? 16 : 1) / tile_bytes, p.n_rows = 1;
        p.acts = allocate(colibri_acts_bytes(p.format, 1, k));
        p.y = allocate(p.n_tiles * COLIBRI_TILE_ROWS * sizeof *p.y);
        double rate = (double)(p.n_tiles * tile_bytes) / best_time(multiply, &p);
        printf("; from memory, 1 row: %.1f GB/s (%.0f%%)\n", rate * 1e-9, 100 * rate / bandwidth);
        free(p.acts), free(p.y);
    }
}

struct attention_work {
    const struct colibri_kernels *f;
    struct colibri_attention a;
};
static void attend(void *arg)
{
    const struct attention_work *w = arg;
    w->f->attention(&w->a);
}

static void bench_attention(const struct colibri_kernels *f)
{
    enum { HEAD_DIM = 128, CONTEXT = 4096, N_PAGES = CONTEXT / COLIBRI_PAGE_TOKENS };
    static const size_t queries[] = {1, 4, 8, 64};
    int scalar = strcmp(f->name, "scalar") == 0;
    for (uint32_t format = COLIBRI_KV_F32; format <= COLIBRI_KV_F16; format++) {
        size_t value_bytes = format == COLIBRI_KV_F16 ? 2 : 4, page_bytes = 2 * value_bytes * HEAD_DIM * COLIBRI_PAGE_TOKENS;
        uint8_t *pages = allocate(page_bytes * N_PAGES);
        const uint8_t *addresses[N_PAGES];
        for (size_t i = 0; i < N_PAGES; i++) addresses[i] = pages + i * page_bytes;
        printf("  attention over %d positions, %s:", CONTEXT, format == COLIBRI_KV_F16 ? "f16" : "f32");
        for (size_t i = 0; i < sizeof queries / sizeof *queries && queries[i] <= (scalar ? 1 : 64); i++) {
            size_t n = queries[i];
            int32_t positions[64];
            for (size_t q = 0; q < n; q++) positions[q] = CONTEXT - 1;
            float *q = allocate(n * HEAD_DIM * sizeof *q), *out = allocate(n * HEAD_DIM * sizeof *out);
            struct attention_work w = {f, {.q = q, .out = out, .q_stride = HEAD_DIM, .out_stride = HEAD_DIM, .n_queries = n, .head_dim = HEAD_DIM,
                                           .positions = positions, .scale = 0.1f, .kv_format = format, .pages = addresses, .k_offset = 0,
                                           .v_offset = page_bytes / 2, .scratch = allocate(4 * colibri_attention_scratch(n, HEAD_DIM))}};
            double took = best_time(attend, &w);
            printf(" %zu queries %.1f GFLOP/s, %.1f GB/s;", n, 4e-9 * (double)(n * HEAD_DIM * CONTEXT) / took,
                   1e-9 * (double)(page_bytes * N_PAGES) / took);
            free(q), free(out), free(w.a.scratch);
        }
        printf("\n");
        free(pages);
    }
}

struct vector_work {
    const struct colibri_kernels *f;
    float *x, *y;
    void *acts;
};
enum { VECTOR = 2048, REPEATS = 200 };
static void norm_rows(void *arg)
{
    const struct vector_work *w = arg;
    for (int i = 0; i < REPEATS; i++) sink = w->f->rmsnorm(w->x, w->x, VECTOR, 1e-6f, w->y);
}
static void silu_rows(void *arg)
{
    const struct vector_work *w = arg;
    for (int i = 0; i < REPEATS; i++) w->f->silu_mul(w->x, w->x, VECTOR, w->y);
}
static void prepare_rows(void *arg)
{
    const struct vector_work *w = arg;
    uint8_t bad = 0;
    for (int i = 0; i < REPEATS; i++) w->f->prepare(COLIBRI_FMT_Q8, w->x, VECTOR, 1, VECTOR, w->acts, &bad);
}
static void sum_checks(void *arg)
{
    const struct vector_work *w = arg;
    for (int i = 0; i < REPEATS; i++) sink = (int)w->f->checksum(w->x, VECTOR * sizeof(float));
}

static void bench_vectors(const struct colibri_kernels *f)
{
    struct vector_work w = {f, allocate(VECTOR * sizeof(float)), allocate(VECTOR * sizeof(float)), allocate(colibri_acts_bytes(COLIBRI_FMT_Q8, 1, VECTOR))};
    double n = (double)VECTOR * REPEATS * 1e-9;
    printf("  rmsnorm %.2f, silu %.2f, prepare q8 %.2f G elements/s; checksum %.1f GB/s\n", n / best_time(norm_rows, &w), n / best_time(silu_rows, &w),
           n / best_time(prepare_rows, &w), 4 * n / best_time(sum_checks, &w));
    free(w.x), free(w.y), free(w.acts);
}

static int wanted(int argc, char **argv, const char *name)
{
    int found = argc == 1;
    for (int i = 1; i < argc; i++) found |= strcmp(argv[i], name) == 0;
    return found;
}

int main(int argc, char **argv)
{
    struct memory memory = {.n_bytes = (size_t)512 << 20}; /* more than most caches */
    memory.words = allocate(memory.n_bytes);
    for (const char *const *name = colibri_isa_names; *name; name++) {
        if (!wanted(argc, argv, *name)) continue;
        char err[200];
        const struct colibri_kernels *f = colibri_kernels_get(*name, err, sizeof err);
        if (f == NULL) {
            printf("%s: skipped, %s\n", *name, err);
            continue;
        }
        double peak = int8_peak(*name), bandwidth = (double)memory.n_bytes / best_time(read_memory, &memory);
        printf("%s: int8 peak %.0f GOP/s, reads %.1f GB/s\n", *name, peak * 1e-9, bandwidth * 1e-9);
        bench_products(f, &memory, peak, bandwidth);
        bench_attention(f);
        bench_vectors(f);
        fflush(stdout);
    }
    free((void *)(uintptr_t)memory.words);
    return 0;
}
