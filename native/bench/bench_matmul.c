/*
 * The matrix products of q8 and q4 as shares of what the machine can do: the limits are measured right before and right after each run, all is
 * repeated in turns, and what is printed is the median with the quartiles.
 *
 *     bench_matmul [THREADS [ISA]]        all processors, and the instruction set that the engine takes, unless told otherwise
 *
 * The weights are experts of 1408 × 2048, of which there are so many that no cache holds a tenth of them. Threads take a few tiles at a time, as
 * they do in the engine.
 *
 *   cold        every expert once, one after the other: a prefill whose experts have few rows each
 *   warm        one expert again and again, which a cache holds
 *   matvec      one row by all experts, over the bandwidth of reading the same bytes
 *   together    how many times as fast 16 rows at once are as one by one: as sequences do that are decoded apart (cold), or without reading (warm)
 */
#define _GNU_SOURCE /* MAP_ANONYMOUS, madvise */

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "colibri.h"
#include "kernels.h"
#include "machine_limits.h"

enum { ROUNDS = 9, K = 2048, TILES = 1408 / COLIBRI_TILE_ROWS, WIDTH = TILES * COLIBRI_TILE_ROWS, MOST_ROWS = 256, MOST_THREADS = 256 };
enum { ITEM_TILES = 11 }; /* an eighth of an expert */
#define MEMORY ((size_t)1 << 30)
#define HUGE_PAGE ((size_t)2 << 20)

static const struct colibri_kernels *kernels;
static unsigned n_threads;
static uint8_t *memory; /* weights: any bytes will do */
static void *acts[MOST_ROWS + 1];
static float *y;

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- work that threads share ---- */

struct job {
    uint32_t format;
    size_t n_experts, n_rows, repeats; /* each expert is done `repeats` times before the next, or (`again`) all are before they are again */
    int again;
    atomic_size_t next;
};

static void *take_items(void *argument)
{
    struct job *job = argument;
    const size_t tile_bytes = colibri_tile_bytes(job->format, K), per_expert = TILES / ITEM_TILES;
    const size_t n_items = job->n_experts * per_expert * job->repeats;
    for (size_t i; (i = atomic_fetch_add(&job->next, 1)) < n_items;) {
        size_t expert = job->again ? i / per_expert % job->n_experts : i / per_expert / job->repeats, part = i % per_expert;
        kernels->matmul(job->format, memory + expert * TILES * tile_bytes, part * ITEM_TILES, (part + 1) * ITEM_TILES, K, acts[job->n_rows],
                        job->n_rows, y, WIDTH);
    }
    return NULL;
}

static double seconds(uint32_t format, size_t n_experts, size_t n_rows, size_t repeats, int again)
{
    struct job job = {.format = format, .n_experts = n_experts, .n_rows = n_rows, .repeats = repeats, .again = again};
    pthread_t threads[MOST_THREADS];
    double begin = now_s();
    for (unsigned i = 1; i < n_threads; i++)
        if (pthread_create(&threads[i], NULL, take_items, &job) != 0) exit(1);
    take_items(&job);
    for (unsigned i = 1; i < n_threads; i++) pthread_join(threads[i], NULL);
    return now_s() - begin;
}

/* ---- figures ---- */

struct figures {
    double values[ROUNDS];
};

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, z = *(const double *)b;
    return (x > z) - (x < z);
}

static void print(const char *what, struct figures *f)
{
    qsort(f->values, ROUNDS, sizeof *f->values, ascending);
    printf(" %s %.3f (%.2f-%.2f)", what, f->values[ROUNDS / 2], f->values[ROUNDS / 4], f->values[ROUNDS - 1 - ROUNDS / 4]);
}

static size_t n_experts_of(uint32_t format) { return MEMORY / (TILES * colibri_tile_bytes(format, K)); }

static void bench_rows(uint32_t format, size_t n_rows)
{
    struct figures cold, warm;
    double rate = 0;
    /* As long as a probe, or a few tens of milliseconds. */
    size_t n_experts = n_experts_of(format) / (n_rows > 16 ? n_rows / 16 : 1), repeats = 1 + 1024 / n_rows;
    for (int i = 0; i < ROUNDS; i++) {
        double before = colibri_limit_int8(kernels->name, n_threads), took = seconds(format, n_experts, n_rows, 1, 0);
        double between = colibri_limit_int8(kernels->name, n_threads), took_warm = seconds(format, 1, n_rows, repeats, 0);
        double after = colibri_limit_int8(kernels->name, n_threads), operations = 2.0 * WIDTH * K * (double)n_rows;
        cold.values[i] = operations * (double)n_experts / took / ((before + between) / 2);
        warm.values[i] = operations * (double)repeats / took_warm / ((between + after) / 2);
        rate = operations * (double)n_experts / took;
    }
    printf("    %3zu rows:", n_rows);
    print("cold", &cold), print(", warm", &warm);
    printf("  (%.0f GOP/s)\n", rate * 1e-9);
    fflush(stdout);
}

static void bench_matvec(uint32_t format)
{
    struct figures share;
    double rate = 0;
    size_t n_experts = n_experts_of(format), n_bytes = n_experts * TILES * colibri_tile_bytes(format, K);
    for (int i = 0; i < ROUNDS; i++) {
        double before = colibri_limit_read(memory, n_bytes, n_threads), took = seconds(format, n_experts, 1, 1, 0);
        double after = colibri_limit_read(memory, n_bytes, n_threads);
        rate = (double)n_bytes / took;
        share.values[i] = rate / ((before + after) / 2);
    }
    print("   matvec, of read bandwidth", &share);
    printf("  (%.1f GB/s)\n", rate * 1e-9);
    fflush(stdout);
}

static void bench_together(uint32_t format)
{
    struct figures cold, warm;
    size_t n_experts = n_experts_of(format) / 8;
    for (int i = 0; i < ROUNDS; i++) {
        cold.values[i] = seconds(format, n_experts, 1, 16, 1) / seconds(format, n_experts, 16, 1, 0);
        warm.values[i] = seconds(format, 1, 1, 16 * 16, 0) / seconds(format, 1, 16, 16, 0);
    }
    print("   16 rows together over one by one: cold", &cold), print(", warm", &warm);
    printf("\n");
    fflush(stdout);
}

static void prepare_all(void)
{
    float *x = calloc((size_t)MOST_ROWS * K, sizeof *x);
    uint8_t bad[MOST_ROWS] = {0};
    if (x == NULL) exit(1);
    for (size_t i = 0; i < (size_t)MOST_ROWS * K; i++) x[i] = (float)(i * 2654435761u % 1000) - 500;
    for (size_t n = 1; n <= MOST_ROWS; n++) {
        acts[n] = aligned_alloc(64, colibri_acts_bytes(COLIBRI_FMT_Q8, n, K));
        if (acts[n] == NULL) exit(1);
        kernels->prepare(COLIBRI_FMT_Q8, x, K, n, K, acts[n], bad); /* q4 has the same */
    }
    free(x);
}

/* In huge pages or not, whatever the machine would do of itself. */
static void ask_for_pages(int huge)
{
#if defined(MADV_HUGEPAGE)
    if (memory != NULL) munmap(memory, MEMORY);
    memory = mmap(NULL, MEMORY + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) exit(1);
    uint8_t *aligned = (uint8_t *)(((uintptr_t)memory + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
    if (aligned > memory) munmap(memory, (size_t)(aligned - memory));
    memory = aligned;
    madvise(memory, MEMORY, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#else
    if (memory == NULL) memory = aligned_alloc(64, MEMORY);
    (void)huge;
#endif
    for (size_t i = 0; i < MEMORY; i++) memory[i] = (uint8_t)(0x38 + i % 5); /* ordinary numbers in any format */
}

int main(int argc, char **argv)
{
    static const size_t rows[] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256};
    static const struct {
        uint32_t format;
        const char *name;
    } formats[] = {{COLIBRI_FMT_Q8, "q8"}, {COLIBRI_FMT_Q4, "q4"}};
    char err[200];
    kernels = colibri_kernels_get(argc > 2 ? argv[2] : NULL, err, sizeof err);
    n_threads = argc > 1 ? (unsigned)atoi(argv[1]) : (unsigned)sysconf(_SC_NPROCESSORS_ONLN);
    if (kernels == NULL || n_threads == 0 || n_threads > MOST_THREADS) {
        fprintf(stderr, "bench_matmul: %s\n", kernels ? "1 to 256 threads" : err);
        return 1;
    }
    y = aligned_alloc(64, (size_t)MOST_ROWS * WIDTH * sizeof *y);
    if (y == NULL) return 1;
    prepare_all();
    for (int huge = 0; huge < 2; huge++) {
        ask_for_pages(huge);
        printf("%s, %u threads, %s pages: int8 %.0f GOP/s, reads %.1f GB/s; median (quartiles) of %d\n", kernels->name, n_threads,
               huge ? "huge" : "small", colibri_limit_int8(kernels->name, n_threads) * 1e-9, colibri_limit_read(memory, MEMORY, n_threads) * 1e-9, ROUNDS);
        for (size_t f = 0; f < sizeof formats / sizeof *formats; f++) {
            printf("  %s\n", formats[f].name);
            bench_matvec(formats[f].format);
            bench_together(formats[f].format);
            for (size_t r = 0; r < sizeof rows / sizeof *rows; r++) bench_rows(formats[f].format, rows[r]);
        }
    }
    return 0;
}
