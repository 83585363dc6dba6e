/*
 * A context: everything a forward pass writes to, laid out once in one anonymous mapping (context.c), and the stages that use it.
 *
 * Shapes below: R = max_rows, S = slots, H = hidden, V = vocabulary, E = n_experts, k = top_k. A row stride that starts with "ld" is
 * the width rounded up to whole tiles of 16, because matmul writes whole tiles.
 */
#ifndef COLIBRI_CONTEXT_H
#define COLIBRI_CONTEXT_H

#include <stdatomic.h>
#include <stdbool.h>

#include "colibri.h"
#include "expert_store.h"
#include "kernels/kernels.h"
#include "model.h"
#include "static_table.h"
#include "threads.h"

/* Rows of one sequence that attend together: a page's worth, so that the blocks they see differ by one at most. */
#define COLIBRI_SPAN_ROWS 32
/* Rows of logits that are computed at once only to be scored. */
#define COLIBRI_SCORE_ROWS COLIBRI_ROW_BLOCK

/* Neighbouring rows of one sequence. */
struct span {
    int32_t first_row, n_rows;
    int32_t sequence;
};

/* One matrix product of a stage: y[n_rows][ldy] = acts × weightsᵀ. */
struct product {
    const void *weights, *acts;
    uint32_t format;
    size_t k, n_tiles, n_rows;
    float *y;
    size_t ldy;
    size_t first_item; /* filled by colibri_multiply */
};

/* The rows of a step that chose one expert: entries [first, first + n_rows) of the step's list. */
struct group {
    size_t block; /* of the expert, in the file */
    size_t first, n_rows;
    size_t first_block; /* row block within the wave where its activations begin */
};

/* What a thread needs for itself. */
struct scratch {
    const uint8_t **pages; /* [pages of the longest sequence] */
    float *attention;
};

/* The step that runs. */
struct step {
    const colibri_batch_t *batch;
    size_t n_rows, n_blocks; /* row blocks */
    size_t n_spans;
    unsigned n_threads;
    size_t moe_layer; /* that runs, among those with experts */
    bool pending; /* y is still to be added to x */
};

struct candidate {
    float logit;
    int32_t id;
};

/* Whether colibri_cancel has something to cancel. */
enum { STATE_IDLE, STATE_RUNNING, STATE_CANCELED };

struct colibri_context {
    const struct colibri_model *model;
    const struct colibri_kernels *kernels;
    uint32_t kv_format, n_pages, max_rows, max_logits, max_context;
    unsigned prefill_threads, decode_threads;
    uint64_t seed;
    struct pool pool;
    struct worker *workers;
    struct scratch *scratch; /* [threads] */
    void *memory;
    size_t memory_bytes;
    atomic_int state;
    _Atomic uint64_t kv_overflows;
    char error[COLIBRI_ERROR_BYTES];

    /* Pages (kv.c). Lanes at and behind a page's fill are zero. */
    uint8_t *pages; /* [n_pages][page_bytes] */
    size_t page_bytes, kv_value_bytes, kv_head_bytes;
    uint8_t *page_fill;   /* [n_pages] lanes that were written, 0..32 */
    int32_t *page_writer; /* [n_pages] sequence of the batch that writes it; −1 between batches */

    /* A step's activations. */
    struct step step;
    size_t ld_hidden, ld_qkv, k_at, v_at, ld_experts, ld_expert, ld_wide, ld_vocabulary;
    float *x;             /* [R][H] the residual stream */
    float *normed;        /* [R][H] */
    float *y;             /* [R][ld_hidden] what a half layer adds to x */
    float *qkv;           /* [R][ld_qkv]: q, from k_at on k, from v_at on v */
    float *attended;      /* [R][n_heads × head_dim] */
    float *cosines, *sines; /* [R][rotary_dim / 2] */
    uint8_t *acts;        /* prepared activations of the matrix at hand */
    uint8_t *bad;         /* [R] 1: not finite */
    struct span *spans;   /* [R] */
    struct product *products; /* [max(2E, 3)] */

    /* Routing and experts (experts.c). */
    uint8_t *router_acts;
    float *router_logits;   /* [R][ld_experts] */
    int32_t *chosen;        /* [R][k] experts, ascending */
    float *weights;         /* [R][k] */
    float *shared_logits;   /* [R][COLIBRI_TILE_ROWS]: a tile, of which the first is that of the shared expert's gate */
    int32_t *entries;       /* [R × k] rows, ordered by expert, then row */
    int32_t *entry_of;      /* [R][k] where (row, j) stands in entries */
    int32_t *counts;        /* [E + 1] */
    struct group *groups;   /* [E] */
    size_t slots;           /* entries in one wave */
    uint8_t *expert_acts, *hidden_acts; /* row blocks of a wave */
    float *gate, *up;       /* [S][ld_expert] or [R][ld_wide] */
    float *down;            /* [S][ld_hidden] */
    uint8_t *slot_bad;      /* [S] */
    uint32_t *block_used;   /* [expert blocks] step in which it was used last, 0: never */
    uint32_t n_steps;

    /* Experts in memory of their own (expert_store.c), and a look at the next layer's router, for up to a row block of rows. */
    struct expert_store store;
    float *early_normed; /* [COLIBRI_ROW_BLOCK][H] */
    uint8_t *early_acts;
    float *early_logits; /* [COLIBRI_ROW_BLOCK][ld_experts] */
    int32_t *early_chosen; /* [k][COLIBRI_ROW_BLOCK] the rows' first choices, then their second ones, … */
    uint8_t *seers;      /* [E] FORESEEN_* */

    struct static_table table;
    uint32_t routing; /* COLIBRI_ROUTING_* */

    /* Head (head.c). */
    float *logits;       /* [max_logits][ld_vocabulary], held */
    float *score_logits; /* [COLIBRI_SCORE_ROWS][ld_vocabulary] */
    uint8_t *held_bad;   /* [max_logits] */
    int32_t *head_rows;  /* [R] rows of the batch that need logits */
    size_t n_held;

    /* Sampling (sample.c). */
    struct candidate *candidates; /* [V] */
    float *probabilities;         /* [V] */
    uint32_t *seen, *generated;   /* [V] counts of the history; zero between calls */

    /* The context's own sequence (infer.c). */
    size_t own_length;
    int32_t *own_pages, *own_positions, *own_sequences, *own_status;
    uint8_t *own_flags;
};

static inline size_t colibri_round_up(size_t n, size_t step) { return (n + step - 1) / step * step; }
static inline size_t colibri_tiles(size_t rows) { return (rows + COLIBRI_TILE_ROWS - 1) / COLIBRI_TILE_ROWS; }
static inline size_t colibri_smaller(size_t a, size_t b) { return a < b ? a : b; }
static inline size_t colibri_larger(size_t a, size_t b) { return a > b ? a : b; }

/* The context's own error buffer. */
static inline struct colibri_error colibri_error_of(struct colibri_context *ctx) {
    return (struct colibri_error){ctx->error, sizeof ctx->error};
}

/* kernels_open.c: the table of that name (NULL: the default), from any thread. */
const struct colibri_kernels *colibri_kernels_open(const char *name, struct colibri_error error);

/* linear.c */

/* Runs the products, which may differ in everything, tile by tile on all threads of the step. */
void colibri_multiply(struct colibri_context *ctx, struct product *products, size_t n_products);
/* A product of all rows of the step: y = acts × matrixᵀ. */
struct product colibri_product(const struct colibri_context *ctx, const struct tensor *matrix, const void *acts, float *y, size_t ldy);
/* Adds what is pending to x, then normed = rmsnorm(x) × norm, prepared for `format` into acts, and into router_acts if that is wanted. */
void colibri_norm_rows(struct colibri_context *ctx, const struct tensor *norm, uint32_t format, bool for_router);
/* Prepares from[n_rows][ld], `k` wide, into acts. */
void colibri_prepare_rows(struct colibri_context *ctx, const float *from, size_t ld, uint32_t format, size_t k);

/* attention.c, experts.c, head.c: the stages. */
void colibri_attention_half(struct colibri_context *ctx, uint32_t layer);
void colibri_ffn_half(struct colibri_context *ctx, uint32_t layer);
/* Asks for what the first layer with experts will need, by what is known of the step's tokens. */
void colibri_foresee_first(struct colibri_context *ctx);
void colibri_head(struct colibri_context *ctx);
/* log-probability of a token under one row of logits, by docs/numerics.md. max and sum: of the row. */
float colibri_logprob(float logit, float max, float sum);

/* batch.c: every demand of colibri.h on a batch. Changes nothing but the error. */
int colibri_check_batch(struct colibri_context *ctx, const colibri_batch_t *batch);

/* kv.c */
static inline uint8_t *colibri_page(const struct colibri_context *ctx, size_t page) { return ctx->pages + page * ctx->page_bytes; }
/* Offsets within a page of one head's K [head_dim][32] and V [32][head_dim]. */
size_t colibri_k_offset(const struct colibri_context *ctx, uint32_t layer, uint32_t kv_head);
size_t colibri_v_offset(const struct colibri_context *ctx, uint32_t layer, uint32_t kv_head);
/* Makes lanes [begin, fill) zero and begin the fill, if it is more. */
void colibri_cut_page(struct colibri_context *ctx, size_t page, unsigned begin);
/* Before a checked batch runs: the lanes behind those it writes are zero. */
void colibri_open_lanes(struct colibri_context *ctx, const colibri_batch_t *batch);

/* forward.c: without the change of state and of the floating-point control word. The batch is checked. */
int colibri_run_step(struct colibri_context *ctx, const colibri_batch_t *batch);
/* Around everything that computes: enter returns what leave restores. */
uint64_t colibri_enter(struct colibri_context *ctx);
void colibri_leave(struct colibri_context *ctx, uint64_t fp_state);
static inline bool colibri_is_canceled(struct colibri_context *ctx) { return atomic_load(&ctx->state) == STATE_CANCELED; }

#endif
