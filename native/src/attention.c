/*
 * The first half of a layer: norm, q, k and v, their norms and rotation, K and V into the pages, attention over the pages, output projection.
 *
 * Attention is split by sequence, by spans of its rows and by KV head, never along the KV. A row that is alone in its span (decoding) gives the kernel
 * all query heads of the KV head at once; otherwise one head of all rows goes at a time: either way queries lie at one stride.
 */
#include <string.h>

#include "context.h"

static float *head_at(float *rows, size_t ld, size_t row, size_t head, size_t head_dim) { return rows + row * ld + head * head_dim; }

/* ---- q, k, v of one row: bias, norm, clip, rotation ---- */

struct layer_job {
    struct colibri_context *ctx;
    const struct layer *layer;
    uint32_t number;
};

static int norm_heads(const struct colibri_context *ctx, const struct tensor *norm, float *heads, size_t n_heads) {
    const struct colibri_file_header *header = &ctx->model->header;
    if (!norm->data) return 0;
    if (header->arch_flags & COLIBRI_ARCH_QK_NORM_WHOLE)
        return ctx->kernels->rmsnorm(heads, norm->data, n_heads * header->head_dim, header->rms_eps, heads);
    int bad = 0;
    for (size_t head = 0; head < n_heads; head++) {
        float *x = heads + head * header->head_dim;
        bad |= ctx->kernels->rmsnorm(x, norm->data, header->head_dim, header->rms_eps, x);
    }
    return bad;
}

static void rotate_heads(const struct colibri_context *ctx, float *heads, size_t n_heads, size_t row) {
    const struct colibri_file_header *header = &ctx->model->header;
    size_t n_pairs = header->rotary_dim / 2;
    for (size_t head = 0; head < n_heads; head++)
        ctx->kernels->rope(heads + head * header->head_dim, ctx->cosines + row * n_pairs, ctx->sines + row * n_pairs, n_pairs);
}

static void add_bias(const struct colibri_context *ctx, const struct tensor *bias, float *x, size_t n) {
    if (bias->data) ctx->kernels->add(x, bias->data, n);
}

/* After the norm, as in OLMoE. */
static void clip(const struct colibri_context *ctx, float *x, size_t n) {
    if (ctx->model->header.arch_flags & COLIBRI_ARCH_QKV_CLIP) ctx->kernels->clip(x, ctx->model->header.qkv_clip, n);
}

static void write_kv(struct colibri_context *ctx, uint32_t layer, size_t row, const float *k, const float *v) {
    const struct colibri_file_header *header = &ctx->model->header;
    const colibri_batch_t *batch = ctx->step.batch;
    size_t position = (size_t)batch->positions[row], n_overflows = 0;
    int32_t page = batch->pages[(size_t)batch->page_starts[batch->sequences[row]] + position / COLIBRI_PAGE_TOKENS];
    uint8_t *base = colibri_page(ctx, (size_t)page);
    for (uint32_t head = 0; head < header->n_kv_heads; head++)
        n_overflows += ctx->kernels->kv_write(ctx->kv_format, k + head * header->head_dim, v + head * header->head_dim, header->head_dim,
                                              position % COLIBRI_PAGE_TOKENS, base + colibri_k_offset(ctx, layer, head),
                                              base + colibri_v_offset(ctx, layer, head));
    if (n_overflows == 0) return;
    atomic_fetch_add(&ctx->kv_overflows, n_overflows);
    ctx->bad[row] = 1;
}

static void finish_qkv_row(void *argument, size_t row, unsigned worker) {
    (void)worker;
    const struct layer_job *job = argument;
    struct colibri_context *ctx = job->ctx;
    const struct colibri_file_header *header = &ctx->model->header;
    float *q = ctx->qkv + row * ctx->ld_qkv, *k = q + ctx->k_at, *v = q + ctx->v_at;
    size_t q_width = (size_t)header->n_heads * header->head_dim, kv_width = (size_t)header->n_kv_heads * header->head_dim;
    add_bias(ctx, &job->layer->qkv_bias, q, q_width + 2 * kv_width);
    add_bias(ctx, &job->layer->q_bias, q, q_width);
    add_bias(ctx, &job->layer->k_bias, k, kv_width);
    add_bias(ctx, &job->layer->v_bias, v, kv_width);
    if (norm_heads(ctx, &job->layer->q_norm, q, header->n_heads) | norm_heads(ctx, &job->layer->k_norm, k, header->n_kv_heads)) ctx->bad[row] = 1;
    clip(ctx, q, q_width);
    clip(ctx, k, kv_width);
    clip(ctx, v, kv_width);
    rotate_heads(ctx, q, header->n_heads, row);
    rotate_heads(ctx, k, header->n_kv_heads, row);
    write_kv(ctx, job->number, row, k, v);
}

/* ---- attention ---- */

/* Addresses of the pages that a span sees. */
static void find_pages(const struct colibri_context *ctx, const struct span *span, const uint8_t **pages) {
    const colibri_batch_t *batch = ctx->step.batch;
    const int32_t *numbers = batch->pages + batch->page_starts[span->sequence];
    size_t n = (size_t)batch->positions[span->first_row + span->n_rows - 1] / COLIBRI_PAGE_TOKENS + 1;
    for (size_t i = 0; i < n; i++) pages[i] = colibri_page(ctx, (size_t)numbers[i]);
}

static void attend_one_row(struct colibri_context *ctx, struct colibri_attention *a, size_t row, size_t first_head, size_t n_heads) {
    const struct colibri_file_header *header = &ctx->model->header;
    int32_t positions[COLIBRI_MAX_QUERIES];
    for (size_t i = 0; i < n_heads; i++) positions[i] = ctx->step.batch->positions[row];
    a->q = head_at(ctx->qkv, ctx->ld_qkv, row, first_head, header->head_dim);
    a->out = head_at(ctx->attended, (size_t)header->n_heads * header->head_dim, row, first_head, header->head_dim);
    a->q_stride = a->out_stride = header->head_dim;
    a->n_queries = n_heads;
    a->positions = positions;
    ctx->kernels->attention(a);
}

static void attend_rows(struct colibri_context *ctx, struct colibri_attention *a, const struct span *span, size_t head) {
    const struct colibri_file_header *header = &ctx->model->header;
    size_t row = (size_t)span->first_row;
    a->q_stride = ctx->ld_qkv;
    a->out_stride = (size_t)header->n_heads * header->head_dim;
    a->q = head_at(ctx->qkv, a->q_stride, row, head, header->head_dim);
    a->out = head_at(ctx->attended, a->out_stride, row, head, header->head_dim);
    a->n_queries = (size_t)span->n_rows;
    a->positions = ctx->step.batch->positions + row;
    ctx->kernels->attention(a);
}

/* One span under one KV head. */
static void attend_item(void *argument, size_t item, unsigned worker) {
    const struct layer_job *job = argument;
    struct colibri_context *ctx = job->ctx;
    const struct colibri_file_header *header = &ctx->model->header;
    const struct span *span = &ctx->spans[item / header->n_kv_heads];
    uint32_t kv_head = (uint32_t)(item % header->n_kv_heads);
    size_t n_heads = header->n_heads / header->n_kv_heads;
    struct scratch *scratch = &ctx->scratch[worker];
    find_pages(ctx, span, scratch->pages);
    struct colibri_attention a = {
        .head_dim = header->head_dim,
        .scale = header->attention_scale,
        .kv_format = ctx->kv_format,
        .pages = scratch->pages,
        .k_offset = colibri_k_offset(ctx, job->number, kv_head),
        .v_offset = colibri_v_offset(ctx, job->number, kv_head),
        .scratch = scratch->attention,
    };
    if (span->n_rows == 1) attend_one_row(ctx, &a, (size_t)span->first_row, kv_head * n_heads, n_heads);
    else
        for (size_t head = 0; head < n_heads; head++) attend_rows(ctx, &a, span, kv_head * n_heads + head);
}

static void add_output_bias(void *argument, size_t row, unsigned worker) {
    (void)worker;
    const struct layer_job *job = argument;
    struct colibri_context *ctx = job->ctx;
    ctx->kernels->add(ctx->y + row * ctx->ld_hidden, job->layer->o_bias.data, ctx->model->header.hidden);
}

/* q, k and v of all rows, from one matrix or from three. */
static void project(struct colibri_context *ctx, const struct layer *layer) {
    bool fused = layer->qkv.data;
    struct product products[3];
    colibri_norm_rows(ctx, &layer->attn_norm, fused ? layer->qkv.format : layer->q.format, false);
    products[0] = colibri_product(ctx, fused ? &layer->qkv : &layer->q, ctx->acts, ctx->qkv, ctx->ld_qkv);
    if (!fused) {
        products[1] = colibri_product(ctx, &layer->k, ctx->acts, ctx->qkv + ctx->k_at, ctx->ld_qkv);
        products[2] = colibri_product(ctx, &layer->v, ctx->acts, ctx->qkv + ctx->v_at, ctx->ld_qkv);
    }
    colibri_multiply(ctx, products, fused ? 1 : 3);
}

void colibri_attention_half(struct colibri_context *ctx, uint32_t number) {
    const struct colibri_file_header *header = &ctx->model->header;
    const struct layer *layer = &ctx->model->layers[number];
    struct layer_job job = {ctx, layer, number};
    unsigned n_threads = ctx->step.n_threads;

    project(ctx, layer);
    colibri_pool_run(&ctx->pool, n_threads, ctx->step.n_rows, finish_qkv_row, &job);
    colibri_pool_run(&ctx->pool, n_threads, ctx->step.n_spans * header->n_kv_heads, attend_item, &job);

    size_t q_width = (size_t)header->n_heads * header->head_dim;
    colibri_prepare_rows(ctx, ctx->attended, q_width, layer->o.format, q_width);
    struct product output = colibri_product(ctx, &layer->o, ctx->acts, ctx->y, ctx->ld_hidden);
    colibri_multiply(ctx, &output, 1);
    if (layer->o_bias.data) colibri_pool_run(&ctx->pool, n_threads, ctx->step.n_rows, add_output_bias, &job);
    ctx->step.pending = true;
}
