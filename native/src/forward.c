/*
 * One step: embedding, the layers in order, the head. Between layers it looks whether somebody called colibri_cancel().
 */
#include <string.h>

#include "context.h"

uint64_t colibri_enter(struct colibri_context *ctx) {
    ctx->error[0] = 0;
    atomic_store(&ctx->state, STATE_RUNNING);
    return colibri_fp_enter();
}

void colibri_leave(struct colibri_context *ctx, uint64_t fp_state) {
    colibri_fp_restore(fp_state);
    atomic_store(&ctx->state, STATE_IDLE);
}

void colibri_cancel(colibri_context_t *ctx) {
    int running = STATE_RUNNING;
    atomic_compare_exchange_strong(&ctx->state, &running, STATE_CANCELED);
}

/* Cuts the sequences' rows into spans; tells whether a sequence has more than one row. */
static bool cut_spans(struct colibri_context *ctx, const colibri_batch_t *batch) {
    size_t n = 0;
    bool prefill = false;
    for (size_t row = 0; row < batch->n_rows; row++) {
        struct span *last = n ? &ctx->spans[n - 1] : NULL;
        bool same = last && last->sequence == batch->sequences[row];
        prefill |= same;
        if (same && last->n_rows < COLIBRI_SPAN_ROWS) last->n_rows++;
        else ctx->spans[n++] = (struct span){(int32_t)row, 1, batch->sequences[row]};
    }
    ctx->step.n_spans = n;
    return prefill;
}

static void begin_step(struct colibri_context *ctx, const colibri_batch_t *batch) {
    ctx->step = (struct step){
        .batch = batch,
        .n_rows = batch->n_rows,
        .n_blocks = (batch->n_rows + COLIBRI_ROW_BLOCK - 1) / COLIBRI_ROW_BLOCK,
    };
    ctx->step.n_threads = cut_spans(ctx, batch) ? ctx->prefill_threads : ctx->decode_threads;
    ctx->n_held = 0;
    if (++ctx->n_steps == 0) ctx->n_steps = 1; /* 0 means never */
    memset(ctx->bad, 0, batch->n_rows);
    colibri_open_lanes(ctx, batch);
}

static void embed_row(void *argument, size_t row, unsigned worker) {
    (void)worker;
    struct colibri_context *ctx = argument;
    const struct colibri_file_header *header = &ctx->model->header;
    const struct tensor *embedding = &ctx->model->trunk.embedding;
    const colibri_batch_t *batch = ctx->step.batch;
    size_t n_pairs = header->rotary_dim / 2;
    ctx->kernels->decode_row(embedding->format, embedding->data, (size_t)batch->tokens[row], header->hidden, ctx->x + row * header->hidden);
    colibri_rope_angles(batch->positions[row], ctx->model->trunk.inv_freq.data, n_pairs, header->rope_attention_factor,
                        ctx->cosines + row * n_pairs, ctx->sines + row * n_pairs);
}

int colibri_run_step(struct colibri_context *ctx, const colibri_batch_t *batch) {
    int code = colibri_check_pages(ctx->model, colibri_error_of(ctx));
    if (code) return code;
    begin_step(ctx, batch);
    colibri_foresee_first(ctx);
    bool cold = ctx->n_steps == 1; /* the trunk is used in every step, so it is asked for once, a layer ahead */
    if (cold) colibri_ask_for_trunk(ctx->model, 0);
    colibri_pool_run(&ctx->pool, ctx->step.n_threads, batch->n_rows, embed_row, ctx);
    for (uint32_t layer = 0; layer < ctx->model->header.n_layers; layer++) {
        if (cold) colibri_ask_for_trunk(ctx->model, layer + 1);
        if (colibri_is_canceled(ctx)) return colibri_fail(colibri_error_of(ctx), COLIBRI_E_CANCELED, "canceled before layer %u", layer);
        colibri_attention_half(ctx, layer);
        colibri_ffn_half(ctx, layer);
    }
    colibri_head(ctx);
    for (size_t row = 0; row < batch->n_rows; row++) batch->row_status[row] = ctx->bad[row] ? COLIBRI_E_NUMERIC : COLIBRI_OK;
    return colibri_check_pages(ctx->model, colibri_error_of(ctx)); /* or what was computed is not the model's */
}

int colibri_forward(colibri_context_t *ctx, const colibri_batch_t *batch) {
    uint64_t fp_state = colibri_enter(ctx);
    int code = colibri_check_batch(ctx, batch);
    if (!code) code = colibri_run_step(ctx, batch);
    colibri_leave(ctx, fp_state);
    return code;
}
