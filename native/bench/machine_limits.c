/*
 * A probe is a number of equal items that threads take one by one, as the engine's pool hands out its work, and the wall time until all are done.
 * Starting the threads is part of it: tens of microseconds in tens of milliseconds.
 */
#define _POSIX_C_SOURCE 200809L

#include "machine_limits.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define MAX_THREADS 1024

typedef void item_fn(const uint8_t *data);

struct probe {
    item_fn *run;
    const uint8_t *data; /* item i gets data + i × item_bytes */
    size_t item_bytes, n_items;
    atomic_size_t next;
};

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void *take_items(void *argument) {
    struct probe *probe = argument;
    for (size_t i; (i = atomic_fetch_add(&probe->next, 1)) < probe->n_items;) probe->run(probe->data + i * probe->item_bytes);
    return NULL;
}

/* Items per second; 0 if the threads could not be started. */
static double items_per_second(struct probe *probe, unsigned n_threads) {
    pthread_t threads[MAX_THREADS];
    if (n_threads == 0 || n_threads > MAX_THREADS) return 0;
    double begin = now_s();
    unsigned n_started = 1; /* the caller */
    while (n_started < n_threads && pthread_create(&threads[n_started], NULL, take_items, probe) == 0) n_started++;
    take_items(probe);
    for (unsigned i = 1; i < n_started; i++) pthread_join(threads[i], NULL);
    return n_started == n_threads ? (double)probe->n_items / (now_s() - begin) : 0;
}

/* ---- multiplications from registers ---- */

#define CHAINS 12      /* independent accumulators: more than latency × ports, and with two operands fewer than 16 registers */
#define STEPS 50000    /* of all chains in one item: a tenth of a millisecond and more */
#define ITEMS 100      /* for each thread */

#if defined(__x86_64__)
/* No two multiplications may be the same to the compiler, and all results must look used. */
#define MULTIPLY(name, isa, type, zero, one, multiply, n_chains)               \
    __attribute__((target(isa))) static void name(const uint8_t *unused) {     \
        (void)unused;                                                          \
        type acc[n_chains], a = one, b = one;                                  \
        for (int c = 0; c < n_chains; c++) acc[c] = zero;                      \
        for (int i = 0; i < STEPS; i++) {                                      \
            _Pragma("GCC unroll 12") for (int c = 0; c < n_chains; c++) {      \
                acc[c] = multiply;                                             \
                __asm__ volatile("" : "+v"(a));                                \
            }                                                                  \
        }                                                                      \
        _Pragma("GCC unroll 12") for (int c = 0; c < n_chains; c++) __asm__ volatile("" : : "v"(acc[c])); \
    }
MULTIPLY(int8_512, "avx512f,avx512vnni", __m512i, _mm512_setzero_si512(), _mm512_set1_epi8(1), _mm512_dpbusd_epi32(acc[c], a, b), CHAINS)
MULTIPLY(int8_vnni, "avx2,avxvnni", __m256i, _mm256_setzero_si256(), _mm256_set1_epi8(1), _mm256_dpbusd_avx_epi32(acc[c], a, b), CHAINS)
MULTIPLY(int8_avx2, "avx2", __m256i, _mm256_setzero_si256(), _mm256_set1_epi8(1),
         _mm256_add_epi32(acc[c], _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), b)), CHAINS)
MULTIPLY(f32_512, "avx512f", __m512, _mm512_setzero_ps(), _mm512_set1_ps(1), _mm512_fmadd_ps(a, b, acc[c]), CHAINS)
MULTIPLY(f32_256, "avx2,fma", __m256, _mm256_setzero_ps(), _mm256_set1_ps(1), _mm256_fmadd_ps(a, b, acc[c]), CHAINS)
#endif

struct unit {
    const char *isa;
    item_fn *int8, *f32;
    unsigned int8_lanes, f32_lanes; /* products in one instruction */
};

static const struct unit units[] = {
#if defined(__x86_64__)
    {"amx", int8_512, f32_512, 64, 16}, /* whose tiles do more, but scale and add on the same port as these */
    {"avx512vnni", int8_512, f32_512, 64, 16},
    {"avxvnni", int8_vnni, f32_256, 32, 8},
    {"avx2", int8_avx2, f32_256, 32, 8},
#endif
    {NULL, NULL, NULL, 0, 0},
};

static const struct unit *find_unit(const char *isa) {
    const struct unit *unit = units;
    while (unit->isa != NULL && strcmp(unit->isa, isa) != 0) unit++;
    return unit->isa == NULL ? NULL : unit;
}

static double operations_per_second(item_fn *run, unsigned lanes, unsigned n_threads) {
    struct probe probe = {.run = run, .n_items = (size_t)ITEMS * n_threads};
    return items_per_second(&probe, n_threads) * 2.0 * lanes * CHAINS * STEPS;
}

double colibri_limit_int8(const char *isa, unsigned n_threads) {
    const struct unit *unit = find_unit(isa);
    return unit == NULL ? 0 : operations_per_second(unit->int8, unit->int8_lanes, n_threads);
}

double colibri_limit_f32(const char *isa, unsigned n_threads) {
    const struct unit *unit = find_unit(isa);
    return unit == NULL ? 0 : operations_per_second(unit->f32, unit->f32_lanes, n_threads);
}

/* ---- reads ---- */

/* Several streams in an item, as the kernels read tiles, with lines asked for ahead, keep the most lines on their way. */
#define READ_ITEM ((size_t)1 << 20)
#define STREAMS 8
#define STREAM_BYTES (READ_ITEM / STREAMS)
#define LINE 64
#define AHEAD 1024 /* bytes; 512 to 4096 are about as good */

/* Two lines of each stream at a time, added up in as many registers as they take. */
#define READ(name, attribute, type)                                                                    \
    attribute static void name(const uint8_t *data) {                                                  \
        enum { WORDS = 2 * LINE / sizeof(type) };                                                      \
        type sums[WORDS] = {0};                                                                        \
        for (size_t i = 0; i < STREAM_BYTES; i += 2 * LINE)                                            \
            for (size_t stream = 0; stream < STREAMS; stream++) {                                      \
                const uint8_t *at = data + stream * STREAM_BYTES + i;                                  \
                __builtin_prefetch((const void *)((uintptr_t)at + AHEAD), 0, 2);                       \
                __builtin_prefetch((const void *)((uintptr_t)at + AHEAD + LINE), 0, 2);                \
                _Pragma("GCC unroll 16") for (int j = 0; j < WORDS; j++) {                             \
                    type word;                                                                         \
                    memcpy(&word, at + (size_t)j * sizeof word, sizeof word);                          \
                    sums[j] += word;                                                                   \
                }                                                                                      \
            }                                                                                          \
        __asm__ volatile("" : : "r"(sums) : "memory");                                                 \
    }

typedef uint64_t words_512 __attribute__((vector_size(64)));
typedef uint64_t words_256 __attribute__((vector_size(32)));
READ(read_words, , uint64_t)
#if defined(__x86_64__)
READ(read_512, __attribute__((target("avx512f"))), words_512)
READ(read_256, __attribute__((target("avx2"))), words_256)
#endif

static item_fn *widest_read(void) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) return read_512;
    if (__builtin_cpu_supports("avx2")) return read_256;
#endif
    return read_words;
}

double colibri_limit_read(const void *data, size_t n_bytes, unsigned n_threads) {
    struct probe probe = {.run = widest_read(), .data = data, .item_bytes = READ_ITEM, .n_items = n_bytes / READ_ITEM};
    return items_per_second(&probe, n_threads) * (double)READ_ITEM;
}
