/*
 * A trial of one table against another: every function once, at a shape that has whole and partial vectors. An illegal instruction (under an
 * emulator, or where the CPU claims too much) fails the trial, not the process.
 */
#define _POSIX_C_SOURCE 200809L /* sigaction, sigsetjmp */

#include "trial.h"

#include <setjmp.h>
#include <signal.h>
#include <string.h>

#include "colibri.h"

enum {
    K = 70,       /* inputs: two groups and a part */
    ROWS = 19,    /* a row block and a part */
    TILES = 2,
    HEAD_DIM = 24,
    QUERIES = 9,
    POSITION = 44, /* in the second page */
};

static struct problem {
    float x[ROWS][K], y[ROWS][K];
    _Alignas(64) uint8_t weights[TILES * COLIBRI_TILE_ROWS * 96 * sizeof(float)];
    _Alignas(64) uint8_t page[2][2 * HEAD_DIM * COLIBRI_PAGE_TOKENS * sizeof(float)];
} problem;

/* What a table made of it, one function at a time; zero before. */
static struct outcome {
    _Alignas(64) uint8_t acts[2 * COLIBRI_ROW_BLOCK * 96 * sizeof(float)];
    _Alignas(64) uint8_t gathered[2 * COLIBRI_ROW_BLOCK * 96 * sizeof(float)];
    float out[ROWS][TILES * COLIBRI_TILE_ROWS + K];
    uint64_t number;
} outcomes[2];

/* Numbers of both signs and several magnitudes, from a linear congruence. */
static float next(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    int magnitude = (int)(*state >> 28) - 8;
    float x = (float)(*state >> 4 & 0xffff) / 65536.0f - 0.5f;
    return magnitude < 0 ? x / (float)(1 << -magnitude) : x * (float)(1 << magnitude);
}

static void make_problem(void)
{
    uint32_t state = 1;
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < K; i++) problem.x[r][i] = next(&state), problem.y[r][i] = next(&state);
    for (size_t i = 0; i < sizeof problem.weights; i++) /* every second byte is small: any format reads ordinary numbers */
        problem.weights[i] = (uint8_t)(i & 1 ? 0x38 + (state = state * 1664525u + 1) % 16 / 4 : i * 37);
    for (int page = 0; page < 2; page++)
        for (size_t i = 0; i < sizeof problem.page[0]; i++) problem.page[page][i] = problem.weights[i + 64 * (size_t)page];
}

typedef void function_under_trial(const struct colibri_kernels *f, struct outcome *o);

static void multiply(const struct colibri_kernels *f, uint32_t format, struct outcome *o)
{
    static const int32_t rows[] = {18, 0, 7};
    uint8_t bad[ROWS] = {0};
    f->prepare(format, problem.x[0], K, ROWS, K, o->acts, bad);
    f->matmul(format, problem.weights, 0, TILES, K, o->acts, ROWS, o->out[0], sizeof o->out[0] / sizeof(float));
    f->gather(format, o->acts, ROWS, rows, 3, K, o->gathered);
    f->matmul(format, problem.weights, 1, TILES, K, o->gathered, 3, o->out[0], sizeof o->out[0] / sizeof(float));
    f->decode_row(format, problem.weights, 17, K, o->out[4]);
}
static void try_f32(const struct colibri_kernels *f, struct outcome *o) { multiply(f, COLIBRI_FMT_F32, o); }
static void try_bf16(const struct colibri_kernels *f, struct outcome *o) { multiply(f, COLIBRI_FMT_BF16, o); }
static void try_f16(const struct colibri_kernels *f, struct outcome *o) { multiply(f, COLIBRI_FMT_F16, o); }
static void try_q8(const struct colibri_kernels *f, struct outcome *o) { multiply(f, COLIBRI_FMT_Q8, o); }
static void try_q4(const struct colibri_kernels *f, struct outcome *o) { multiply(f, COLIBRI_FMT_Q4, o); }

static void try_rmsnorm(const struct colibri_kernels *f, struct outcome *o) { o->number = (uint64_t)f->rmsnorm(problem.x[0], problem.y[0], K, 1e-6f, o->out[0]); }
static void try_rope(const struct colibri_kernels *f, struct outcome *o)
{
    memcpy(o->out[0], problem.x[0], sizeof problem.x[0]);
    f->rope(o->out[0], problem.y[0], problem.y[1], 20);
}
static void try_elementwise(const struct colibri_kernels *f, struct outcome *o)
{
    for (int r = 0; r < 3; r++) memcpy(o->out[r], problem.x[r], sizeof problem.x[r]);
    f->add(o->out[0], problem.y[0], K);
    f->add_scaled(o->out[1], 0.7f, problem.y[1], K);
    f->clip(o->out[2], 0.25f, K);
    f->silu_mul(problem.x[3], problem.y[3], K, o->out[3]);
    f->exp(problem.x[4], K, o->out[4]);
}
static void try_sums(const struct colibri_kernels *f, struct outcome *o)
{
    o->out[0][0] = f->max(problem.x[0], K);
    o->out[0][1] = f->sum_exp(problem.x[0], K, o->out[0][0]);
    o->number = (uint64_t)f->all_finite(problem.x[0], K);
}
static void try_kv_write(const struct colibri_kernels *f, struct outcome *o)
{
    o->number = f->kv_write(COLIBRI_KV_F16, problem.x[0], problem.y[0], HEAD_DIM, 5, o->acts, o->gathered);
    o->number += f->kv_write(COLIBRI_KV_F32, problem.x[1], problem.y[1], HEAD_DIM, 6, o->acts, o->gathered);
}
static void attend(const struct colibri_kernels *f, uint32_t kv_format, struct outcome *o)
{
    static float scratch[4096];
    static int32_t positions[QUERIES];
    const uint8_t *pages[] = {problem.page[0], problem.page[1]};
    for (int i = 0; i < QUERIES; i++) positions[i] = i == 0 ? 20 : POSITION + (i > 6);
    struct colibri_attention a = {.q = problem.x[0], .out = o->out[0], .q_stride = K, .out_stride = sizeof o->out[0] / sizeof(float),
                                  .n_queries = QUERIES, .head_dim = HEAD_DIM, .positions = positions, .scale = 0.2f, .kv_format = kv_format,
                                  .pages = pages, .k_offset = 0, .v_offset = sizeof problem.page[0] / 2, .scratch = scratch};
    f->attention(&a);
}
static void try_attention_f32(const struct colibri_kernels *f, struct outcome *o) { attend(f, COLIBRI_KV_F32, o); }
static void try_attention_f16(const struct colibri_kernels *f, struct outcome *o) { attend(f, COLIBRI_KV_F16, o); }
static void try_checksum(const struct colibri_kernels *f, struct outcome *o) { o->number = f->checksum(problem.weights, 777); }

static const char *compare(const struct colibri_kernels *table, const struct colibri_kernels *reference)
{
    static const struct {
        function_under_trial *run;
        const char *differs;
    } trials[] = {
        {try_f32, "differs from scalar in f32 matrices"},
        {try_bf16, "differs from scalar in bf16 matrices"},
        {try_f16, "differs from scalar in f16 matrices"},
        {try_q8, "differs from scalar in q8 matrices"},
        {try_q4, "differs from scalar in q4 matrices"},
        {try_rmsnorm, "differs from scalar in the norm"},
        {try_rope, "differs from scalar in the rotary embedding"},
        {try_elementwise, "differs from scalar in element-wise functions"},
        {try_sums, "differs from scalar in sums"},
        {try_kv_write, "differs from scalar in writing KV"},
        {try_attention_f32, "differs from scalar in attention over f32"},
        {try_attention_f16, "differs from scalar in attention over f16"},
        {try_checksum, "differs from scalar in the checksum"},
    };
    make_problem();
    for (size_t i = 0; i < sizeof trials / sizeof trials[0]; i++) {
        memset(outcomes, 0, sizeof outcomes);
        trials[i].run(table, &outcomes[0]);
        trials[i].run(reference, &outcomes[1]);
        if (memcmp(&outcomes[0], &outcomes[1], sizeof outcomes[0]) != 0) return trials[i].differs;
    }
    return NULL;
}

#ifndef _WIN32

/* The handler is the process's, the fault this thread's: on any other thread it gives the fault to whoever had the signal before. */
static _Thread_local volatile sig_atomic_t on_trial;
static _Thread_local sigjmp_buf out_of_trial;
static struct sigaction before_trial;

static void on_illegal_instruction(int number)
{
    if (on_trial) siglongjmp(out_of_trial, 1);
    sigaction(number, &before_trial, NULL); /* the instruction runs again, under it */
}

const char *colibri_kernels_trial(const struct colibri_kernels *table, const struct colibri_kernels *reference)
{
    struct sigaction action = {.sa_handler = on_illegal_instruction};
    sigemptyset(&action.sa_mask);
    if (sigaction(SIGILL, &action, &before_trial) != 0) return "cannot be tried: SIGILL cannot be caught";
    const char *volatile failed = "meets an illegal instruction on this CPU";
    if (sigsetjmp(out_of_trial, 1) == 0) {
        on_trial = 1;
        failed = compare(table, reference);
    }
    on_trial = 0;
    sigaction(SIGILL, &before_trial, NULL);
    return failed;
}

#else

const char *colibri_kernels_trial(const struct colibri_kernels *table, const struct colibri_kernels *reference) { return compare(table, reference); }

#endif
