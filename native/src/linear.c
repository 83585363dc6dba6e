/*
 * Matrix products, the norms before them and the preparation of activations: what every half layer shares.
 *
 * Rows are prepared in row blocks of 16, which is how kernels.h lays activations out: block b of a matrix begins at b × the bytes of a full block.
 */
#include "context.h"

/* Items a thread takes from one call, on average: enough to even out threads that are interrupted, few enough to be cheap to hand out. */
#define ITEMS_PER_THREAD 8

struct multiply_job {
    struct colibri_context *ctx;
    struct product *products;
    size_t n_products, tiles_per_item;
};

/* The last product that begins at or before the item. */
static const struct product *product_of(const struct multiply_job *job, size_t item) {
    size_t low = 0, high = job->n_products;
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (job->products[middle].first_item <= item) low = middle;
        else high = middle;
    }
    return &job->products[low];
}

static void multiply_item(void *argument, size_t item, unsigned worker) {
    (void)worker;
    const struct multiply_job *job = argument;
    const struct product *p = product_of(job, item);
    size_t begin = (item - p->first_item) * job->tiles_per_item;
    size_t end = colibri_smaller(begin + job->tiles_per_item, p->n_tiles);
    job->ctx->kernels->matmul(p->format, p->weights, begin, end, p->k, p->acts, p->n_rows, p->y, p->ldy);
}

void colibri_multiply(struct colibri_context *ctx, struct product *products, size_t n_products) {
    size_t n_tiles = 0, n_items = 0;
    for (size_t i = 0; i < n_products; i++) n_tiles += products[i].n_tiles;
    size_t tiles_per_item = colibri_larger(n_tiles / (ctx->step.n_threads * ITEMS_PER_THREAD), 1);
    for (size_t i = 0; i < n_products; i++) {
        products[i].first_item = n_items;
        n_items += (products[i].n_tiles + tiles_per_item - 1) / tiles_per_item;
    }
    struct multiply_job job = {ctx, products, n_products, tiles_per_item};
    colibri_pool_run(&ctx->pool, ctx->step.n_threads, n_items, multiply_item, &job);
}

struct product colibri_product(const struct colibri_context *ctx, const struct tensor *matrix, const void *acts, float *y, size_t ldy) {
    return (struct product){.weights = matrix->data,
                            .acts = acts,
                            .format = matrix->format,
                            .k = matrix->cols,
                            .n_tiles = colibri_tiles(matrix->rows),
                            .n_rows = ctx->step.n_rows,
                            .y = y,
                            .ldy = ldy};
}

struct prepare_job {
    struct colibri_context *ctx;
    const float *from;
    size_t ld, k;
    uint32_t format;
    uint8_t *acts;
};

static void prepare_block(void *argument, size_t block, unsigned worker) {
    (void)worker;
    const struct prepare_job *job = argument;
    struct colibri_context *ctx = job->ctx;
    size_t row = block * COLIBRI_ROW_BLOCK, n = colibri_smaller(ctx->step.n_rows - row, COLIBRI_ROW_BLOCK);
    uint8_t *acts = job->acts + block * colibri_acts_bytes(job->format, COLIBRI_ROW_BLOCK, job->k);
    ctx->kernels->prepare(job->format, job->from + row * job->ld, job->ld, n, job->k, acts, ctx->bad + row);
}

void colibri_prepare_rows(struct colibri_context *ctx, const float *from, size_t ld, uint32_t format, size_t k) {
    struct prepare_job job = {ctx, from, ld, k, format, ctx->acts};
    colibri_pool_run(&ctx->pool, ctx->step.n_threads, ctx->step.n_blocks, prepare_block, &job);
}

struct norm_job {
    struct colibri_context *ctx;
    const float *weight;
    uint32_t format;
    bool for_router;
};

static void norm_block(void *argument, size_t block, unsigned worker) {
    const struct norm_job *job = argument;
    struct colibri_context *ctx = job->ctx;
    const struct colibri_file_header *header = &ctx->model->header;
    size_t begin = block * COLIBRI_ROW_BLOCK, end = colibri_smaller(begin + COLIBRI_ROW_BLOCK, ctx->step.n_rows);
    for (size_t row = begin; row < end; row++) {
        float *x = ctx->x + row * header->hidden;
        if (ctx->step.pending) ctx->kernels->add(x, ctx->y + row * ctx->ld_hidden, header->hidden);
        if (ctx->kernels->rmsnorm(x, job->weight, header->hidden, header->rms_eps, ctx->normed + row * header->hidden)) ctx->bad[row] = 1;
    }
    struct prepare_job prepare = {ctx, ctx->normed, header->hidden, header->hidden, job->format, ctx->acts};
    prepare_block(&prepare, block, worker);
    if (!job->for_router) return;
    prepare.format = COLIBRI_FMT_F32;
    prepare.acts = ctx->router_acts;
    prepare_block(&prepare, block, worker);
}

void colibri_norm_rows(struct colibri_context *ctx, const struct tensor *norm, uint32_t format, bool for_router) {
    struct norm_job job = {ctx, norm->data, format, for_router};
    colibri_pool_run(&ctx->pool, ctx->step.n_threads, ctx->step.n_blocks, norm_block, &job);
    ctx->step.pending = false;
}
