/* What a C test needs: a check that tells where it failed, and random numbers that are the same everywhere. */
#ifndef COLIBRI_TESTS_CHECK_H
#define COLIBRI_TESTS_CHECK_H

#include <inttypes.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SKIPPED 77 /* meson's exit status for a skipped test */

#define FAIL(...)                                                                                                           \
    do {                                                                                                                    \
        fprintf(stderr, "%s:%d: ", __FILE__, __LINE__);                                                                     \
        fprintf(stderr, __VA_ARGS__);                                                                                       \
        fprintf(stderr, "\n");                                                                                              \
        exit(1);                                                                                                            \
    } while (0)

#define CHECK(condition)                                    \
    do {                                                    \
        if (!(condition)) FAIL("%s is false", #condition);  \
    } while (0)

#define CHECK_CODE(expression, expected)                                                                                    \
    do {                                                                                                                    \
        int code_ = (expression), expected_ = (expected);                                                                   \
        if (code_ != expected_) FAIL("%s gave %d, expected %d", #expression, code_, expected_);                             \
    } while (0)

/* xorshift64* (Marsaglia 2003, Vigna 2016) */
static inline uint64_t next_random(uint64_t *state) {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * 0x2545F4914F6CDD1D;
}

static inline uint32_t random_below(uint64_t *state, uint32_t n) { return (uint32_t)(next_random(state) >> 32) % n; }

/* In [−1, 1). */
static inline float random_float(uint64_t *state) { return (float)(int32_t)(next_random(state) >> 32) * 0x1p-31f; }

#endif
