/*
 * From the residual stream to logits, for the rows that want them: held for sampling, or only to score a target.
 *
 * Rows that are held come first and go straight to the held logits; rows that are only scored pass through a small buffer, a row block at
 * a time, so that scoring a long text takes no memory for it.
 */
#include <math.h>
#include <string.h>

#include "context.h"

float colibri_logprob(float logit, float max, float sum) { return (float)((double)logit - ((double)max + colibri_log((double)sum))); }

/* Rows of the batch with (mask == wanted) in their flags, behind the n already listed. */
static size_t list_rows(struct colibri_context *ctx, uint8_t mask, uint8_t wanted, size_t n) {
    for (size_t row = 0; row < ctx->step.n_rows; row++)
        if ((ctx->step.batch->flags[row] & mask) == wanted) ctx->head_rows[n++] = (int32_t)row;
    return n;
}

/* A pass through the head: rows [n_rows] of the batch, logits to y. */
struct head_pass {
    struct colibri_context *ctx;
    const int32_t *rows;
    size_t n_rows;
    float *y;
};

static void norm_row(void *argument, size_t i, unsigned worker) {
    (void)worker;
    const struct head_pass *pass = argument;
    struct colibri_context *ctx = pass->ctx;
    const struct colibri_file_header *header = &ctx->model->header;
    size_t row = (size_t)pass->rows[i];
    float *x = ctx->x + row * header->hidden;
    if (ctx->step.pending) ctx->kernels->add(x, ctx->y + row * ctx->ld_hidden, header->hidden);
    if (ctx->kernels->rmsnorm(x, ctx->model->trunk.final_norm.data, header->hidden, header->rms_eps, ctx->normed + i * header->hidden))
        ctx->bad[row] = 1;
}

static void prepare_head_block(void *argument, size_t block, unsigned worker) {
    (void)worker;
    const struct head_pass *pass = argument;
    struct colibri_context *ctx = pass->ctx;
    const struct tensor *head = &ctx->model->trunk.head;
    size_t begin = block * COLIBRI_ROW_BLOCK, n = colibri_smaller(pass->n_rows - begin, COLIBRI_ROW_BLOCK);
    uint8_t bad[COLIBRI_ROW_BLOCK] = {0};
    ctx->kernels->prepare(head->format, ctx->normed + begin * head->cols, head->cols, n, head->cols,
                          ctx->acts + block * colibri_acts_bytes(head->format, COLIBRI_ROW_BLOCK, head->cols), bad);
    for (size_t i = 0; i < n; i++)
        if (bad[i]) ctx->bad[pass->rows[begin + i]] = 1;
}

static void finish_row(void *argument, size_t i, unsigned worker) {
    (void)worker;
    const struct head_pass *pass = argument;
    struct colibri_context *ctx = pass->ctx;
    const colibri_batch_t *batch = ctx->step.batch;
    size_t vocabulary = ctx->model->header.vocabulary, row = (size_t)pass->rows[i];
    const float *logits = pass->y + i * ctx->ld_vocabulary;
    if (!ctx->kernels->all_finite(logits, vocabulary)) ctx->bad[row] = 1;
    if (!(batch->flags[row] & COLIBRI_ROW_SCORE)) return;
    if (ctx->bad[row]) {
        batch->logprobs[row] = NAN;
        return;
    }
    float max = ctx->kernels->max(logits, vocabulary);
    batch->logprobs[row] = colibri_logprob(logits[batch->targets[row]], max, ctx->kernels->sum_exp(logits, vocabulary, max));
}

static void run_pass(struct head_pass *pass) {
    struct colibri_context *ctx = pass->ctx;
    unsigned n_threads = ctx->step.n_threads;
    if (pass->n_rows == 0) return;
    colibri_pool_run(&ctx->pool, n_threads, pass->n_rows, norm_row, pass);
    colibri_pool_run(&ctx->pool, n_threads, (pass->n_rows + COLIBRI_ROW_BLOCK - 1) / COLIBRI_ROW_BLOCK, prepare_head_block, pass);
    struct product product = colibri_product(ctx, &ctx->model->trunk.head, ctx->acts, pass->y, ctx->ld_vocabulary);
    product.n_rows = pass->n_rows;
    colibri_multiply(ctx, &product, 1);
    colibri_pool_run(&ctx->pool, n_threads, pass->n_rows, finish_row, pass);
}

void colibri_head(struct colibri_context *ctx) {
    size_t n_held = list_rows(ctx, COLIBRI_ROW_LOGITS, COLIBRI_ROW_LOGITS, 0);
    size_t n_rows = list_rows(ctx, COLIBRI_ROW_LOGITS | COLIBRI_ROW_SCORE, COLIBRI_ROW_SCORE, n_held);
    struct head_pass pass = {ctx, ctx->head_rows, n_held, ctx->logits};
    run_pass(&pass);
    for (size_t i = 0; i < n_held; i++) ctx->held_bad[i] = ctx->bad[ctx->head_rows[i]];
    for (size_t done = n_held; done < n_rows; done += COLIBRI_SCORE_ROWS) {
        pass = (struct head_pass){ctx, ctx->head_rows + done, colibri_smaller(n_rows - done, COLIBRI_SCORE_ROWS), ctx->score_logits};
        run_pass(&pass);
    }
    ctx->n_held = n_held;
}

const float *colibri_logits(const colibri_context_t *ctx, size_t i) {
    return i < ctx->n_held ? ctx->logits + i * ctx->ld_vocabulary : NULL;
}
