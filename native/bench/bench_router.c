/*
 * How long one router decision takes on one thread, and one look-up in a static table.
 *
 *     bench_router [ISA]                  the instruction set that the engine takes, unless told otherwise
 *
 *   best        logits → the best experts alone
 *   decision    logits → experts and weights: checked for being finite, the best of them, softmax
 *   gate        the product of a hidden state with the router's matrix, with the decision: `warm`, one matrix again and again, or `cold`, so many
 *               matrices (layers) that no cache holds a tenth of them
 *
 * Logits are random and of many rows, so that no branch is learned. Every figure is the median of batches; a batch is long enough that reading the
 * clock does not count.
 *
 *   look-up     of random tokens in all layers, one after the other as a step does it → the list of the token's experts. Single ones are timed by
 *               the time stamp counter, with fences so that nothing overlaps, and the median of as many empty timings is taken off: p50 and p99 of
 *               all, and p50 of those in the first layer, of which nothing is in a cache. And in batches, where the processor may begin the
 *               next before this one is there: ns each. Without such a counter, batches alone.
 */
#define _GNU_SOURCE /* MAP_ANONYMOUS */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "colibri.h"
#include "kernels.h"
#include "router.h"
#include "static_table.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define HAVE_COUNTER 1
#else
#define HAVE_COUNTER 0
#endif

enum { ROUNDS = 31, N_ROWS = 2048, MOST_EXPERTS = 128, N_LOOK_UPS = 200000 };
#define COLD_BYTES ((size_t)512 << 20)

static volatile int64_t sink;

static double now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e9 * (double)t.tv_sec + (double)t.tv_nsec;
}

static uint64_t random_bits(void) /* xorshift64 (Marsaglia 2003) */
{
    static uint64_t state = 88172645463325252u;
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
}

static float random_float(void) { return (float)(int32_t)random_bits() / 2147483648.f; }

/* Small pages, as a file's are. */
static void *allocate(size_t n_bytes)
{
    void *memory = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        fprintf(stderr, "bench_router: no memory for %zu bytes\n", n_bytes);
        exit(1);
    }
    return memory;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double part_of(double *values, size_t n, double share) /* sorts */
{
    qsort(values, n, sizeof *values, ascending);
    return values[(size_t)(share * (double)(n - 1))];
}

/* ---- decisions ---- */

struct decisions {
    struct router router;
    size_t hidden, n_gates;
    float *logits;  /* [N_ROWS][n_experts] */
    uint8_t *gates; /* [n_gates] matrices */
    void *acts;
};

static void run_best(const struct decisions *d, size_t row)
{
    int32_t best[COLIBRI_MAX_TOP_K];
    colibri_best_experts(&d->router, d->logits + row * d->router.n_experts, best);
    sink += best[0];
}

static void decide(const struct decisions *d, const float *logits)
{
    int32_t chosen[COLIBRI_MAX_TOP_K];
    float weights[COLIBRI_MAX_TOP_K];
    if (!d->router.kernels->all_finite(logits, d->router.n_experts)) exit(1);
    colibri_route(&d->router, logits, NULL, chosen, weights);
    sink += chosen[0] + (weights[0] > 0);
}

static void run_decision(const struct decisions *d, size_t row) { decide(d, d->logits + row * d->router.n_experts); }

static void run_gate(const struct decisions *d, size_t row, size_t n_gates)
{
    _Alignas(64) float logits[MOST_EXPERTS + COLIBRI_TILE_ROWS];
    size_t n_tiles = (d->router.n_experts + COLIBRI_TILE_ROWS - 1) / COLIBRI_TILE_ROWS;
    const uint8_t *gate = d->gates + row % n_gates * colibri_matrix_bytes(COLIBRI_FMT_F32, d->router.n_experts, d->hidden);
    d->router.kernels->matmul(COLIBRI_FMT_F32, gate, 0, n_tiles, d->hidden, d->acts, 1, logits, n_tiles * COLIBRI_TILE_ROWS);
    decide(d, logits);
}

static void run_warm(const struct decisions *d, size_t row) { run_gate(d, row, 1); }
static void run_cold(const struct decisions *d, size_t row) { run_gate(d, row, d->n_gates); }

static void measure(const char *what, const struct decisions *d, void (*run)(const struct decisions *, size_t))
{
    double took[ROUNDS];
    for (int i = 0; i < ROUNDS; i++) {
        double begin = now_ns();
        for (size_t row = 0; row < N_ROWS; row++) run(d, row);
        took[i] = (now_ns() - begin) / N_ROWS;
    }
    printf("  %s %.0f", what, part_of(took, ROUNDS, .5));
    fflush(stdout);
}

static void bench_decisions(const struct colibri_kernels *kernels, size_t n_experts, size_t top_k, size_t hidden, bool among_chosen)
{
    struct decisions d = {.router = {kernels, n_experts, top_k, among_chosen}, .hidden = hidden};
    size_t logits_bytes = N_ROWS * n_experts * sizeof *d.logits, gate_bytes = colibri_matrix_bytes(COLIBRI_FMT_F32, n_experts, hidden);
    size_t acts_bytes = colibri_acts_bytes(COLIBRI_FMT_F32, 1, hidden);
    float *x = allocate(hidden * sizeof *x);
    uint8_t bad = 0;
    d.n_gates = COLD_BYTES / gate_bytes;
    d.logits = allocate(logits_bytes);
    d.gates = allocate(COLD_BYTES);
    d.acts = allocate(acts_bytes);
    for (size_t i = 0; i < N_ROWS * n_experts; i++) d.logits[i] = 4 * random_float();
    for (size_t i = 0; i < COLD_BYTES / sizeof(float); i++) ((float *)(void *)d.gates)[i] = random_float();
    for (size_t i = 0; i < hidden; i++) x[i] = random_float();
    kernels->prepare(COLIBRI_FMT_F32, x, hidden, 1, hidden, d.acts, &bad);
    printf("%3zu experts, %zu of them, hidden %zu, weights among %s, ns:", n_experts, top_k, hidden, among_chosen ? "the chosen" : "all");
    measure("best", &d, run_best);
    measure("decision", &d, run_decision);
    measure("gate warm", &d, run_warm);
    measure("gate cold", &d, run_cold);
    printf("\n");
    munmap(x, hidden * sizeof *x);
    munmap(d.logits, logits_bytes);
    munmap(d.gates, COLD_BYTES);
    munmap(d.acts, acts_bytes);
}

/* ---- look-ups ---- */

#if HAVE_COUNTER
static uint64_t counter(void)
{
    _mm_lfence();
    uint64_t ticks = __rdtsc();
    _mm_lfence();
    return ticks;
}

static double ns_per_tick(void)
{
    double begin = now_ns();
    uint64_t ticks = counter();
    while (now_ns() - begin < 5e7) {}
    return (now_ns() - begin) / (double)(counter() - ticks);
}
#endif

struct look_ups {
    struct static_table table;
    uint32_t *layers, *tokens; /* [N_LOOK_UPS] */
};

static void look_up(const struct look_ups *l, size_t i)
{
    int32_t experts[COLIBRI_MAX_TOP_K];
    colibri_list_bits(colibri_look_up(&l->table, l->layers[i], l->tokens[i]), l->table.n_words, experts);
    sink += experts[0];
}

static void time_singly(const struct look_ups *l)
{
#if HAVE_COUNTER
    double *took = allocate(N_LOOK_UPS * sizeof *took), tick = ns_per_tick(), empty;
    for (size_t i = 0; i < N_LOOK_UPS; i++) {
        uint64_t begin = counter();
        took[i] = (double)(counter() - begin);
    }
    empty = part_of(took, N_LOOK_UPS, .5);
    for (size_t i = 0; i < N_LOOK_UPS; i++) {
        uint64_t begin = counter();
        look_up(l, i);
        took[i] = ((double)(counter() - begin) - empty) * tick;
    }
    size_t n_layers = l->table.header->n_layers, n_first = 0;
    double *first = allocate(N_LOOK_UPS * sizeof *first), p50;
    for (size_t i = 0; i < N_LOOK_UPS; i += n_layers) first[n_first++] = took[i];
    p50 = part_of(took, N_LOOK_UPS, .5);
    printf("  single p50 %.0f, p99 %.0f, first layer p50 %.0f (a tick is %.2f, an empty timing %.0f)", p50, part_of(took, N_LOOK_UPS, .99),
           part_of(first, n_first, .5), tick, empty * tick);
    munmap(first, N_LOOK_UPS * sizeof *first);
    munmap(took, N_LOOK_UPS * sizeof *took);
#else
    (void)l;
#endif
}

static void time_in_batches(const struct look_ups *l)
{
    enum { BATCH = 1000, N_BATCHES = N_LOOK_UPS / BATCH };
    double took[N_BATCHES];
    for (size_t b = 0; b < N_BATCHES; b++) {
        double begin = now_ns();
        for (size_t i = b * BATCH; i < (b + 1) * BATCH; i++) look_up(l, i);
        took[b] = (now_ns() - begin) / BATCH;
    }
    printf("  in batches %.1f\n", part_of(took, N_BATCHES, .5));
}

static void bench_look_ups(uint32_t n_layers, uint32_t n_experts, uint32_t top_k, uint32_t vocabulary)
{
    struct table_header header = {.n_layers = n_layers, .n_experts = n_experts, .top_k = top_k, .vocabulary = vocabulary};
    size_t n_words = (n_experts + 63) / 64, n_entries = (size_t)n_layers * vocabulary, n_bytes = n_entries * n_words * sizeof(uint64_t);
    uint64_t *chosen = allocate(n_bytes);
    struct look_ups l = {.table = {.header = &header, .chosen = chosen, .n_words = n_words}};
    l.layers = allocate(N_LOOK_UPS * sizeof *l.layers);
    l.tokens = allocate(N_LOOK_UPS * sizeof *l.tokens);
    for (size_t i = 0; i < n_entries; i++)
        for (uint32_t n = 0; n < top_k;) {
            uint64_t expert = random_bits() % n_experts, *word = &chosen[i * n_words + expert / 64], bit = (uint64_t)1 << expert % 64;
            n += !(*word & bit);
            *word |= bit;
        }
    for (size_t i = 0; i < N_LOOK_UPS; i++) {
        l.layers[i] = (uint32_t)(i % n_layers);
        l.tokens[i] = l.layers[i] ? l.tokens[i - 1] : (uint32_t)(random_bits() % vocabulary);
    }
    printf("look-up in %u layers, %u experts, %u of them, %u tokens (%.1f MB), ns:", n_layers, n_experts, top_k, vocabulary, 1e-6 * (double)n_bytes);
    time_singly(&l);
    time_in_batches(&l);
    munmap(chosen, n_bytes);
    munmap(l.layers, N_LOOK_UPS * sizeof *l.layers);
    munmap(l.tokens, N_LOOK_UPS * sizeof *l.tokens);
}

int main(int argc, char **argv)
{
    char err[200];
    const struct colibri_kernels *kernels = colibri_kernels_get(argc > 1 ? argv[1] : NULL, err, sizeof err);
    if (kernels == NULL) {
        fprintf(stderr, "bench_router: %s\n", err);
        return 1;
    }
    printf("%s, one thread\n", kernels->name);
    bench_decisions(kernels, 8, 2, 4096, true);   /* as Mixtral 8x7B */
    bench_decisions(kernels, 64, 8, 2048, false); /* OLMoE */
    bench_decisions(kernels, 128, 8, 2048, true); /* Qwen3-30B-A3B */
    bench_look_ups(32, 8, 2, 32000);
    bench_look_ups(16, 64, 8, 50304);
    bench_look_ups(48, 128, 8, 151936);
    return 0;
}
