/*
 * The pool of KV pages: where K and V of a head lie in a page, saving, loading, copying.
 *
 * A page holds, layer by layer, K as [n_kv_heads][head_dim][32] and then V as [n_kv_heads][32][head_dim]. Law of a page: lanes at and behind its
 * fill are zero, so that equal tokens mean equal bytes.
 */
#include <inttypes.h>
#include <string.h>

#include "context.h"

size_t colibri_k_offset(const struct colibri_context *ctx, uint32_t layer, uint32_t kv_head) {
    return (2 * (size_t)layer * ctx->model->header.n_kv_heads + kv_head) * ctx->kv_head_bytes;
}

size_t colibri_v_offset(const struct colibri_context *ctx, uint32_t layer, uint32_t kv_head) {
    return colibri_k_offset(ctx, layer, kv_head) + ctx->model->header.n_kv_heads * ctx->kv_head_bytes;
}

/* Makes lanes [begin, end) of one head's K and V zero. */
static void zero_lanes(const struct colibri_context *ctx, uint8_t *k, uint8_t *v, size_t begin, size_t end) {
    size_t head_dim = ctx->model->header.head_dim, value_bytes = ctx->kv_value_bytes;
    for (size_t d = 0; d < head_dim; d++) memset(k + (d * COLIBRI_PAGE_TOKENS + begin) * value_bytes, 0, (end - begin) * value_bytes);
    memset(v + begin * head_dim * value_bytes, 0, (end - begin) * head_dim * value_bytes);
}

void colibri_cut_page(struct colibri_context *ctx, size_t page, unsigned begin) {
    unsigned end = ctx->page_fill[page];
    if (end <= begin) return;
    uint8_t *base = colibri_page(ctx, page);
    if (begin == 0) {
        memset(base, 0, ctx->page_bytes);
    } else {
        for (uint32_t layer = 0; layer < ctx->model->header.n_layers; layer++)
            for (uint32_t head = 0; head < ctx->model->header.n_kv_heads; head++)
                zero_lanes(ctx, base + colibri_k_offset(ctx, layer, head), base + colibri_v_offset(ctx, layer, head), begin, end);
    }
    ctx->page_fill[page] = (uint8_t)begin;
}

void colibri_open_lanes(struct colibri_context *ctx, const colibri_batch_t *batch) {
    for (size_t row = 0; row < batch->n_rows; row++) {
        int32_t position = batch->positions[row];
        int32_t page = batch->pages[batch->page_starts[batch->sequences[row]] + position / COLIBRI_PAGE_TOKENS];
        unsigned lane = (unsigned)position % COLIBRI_PAGE_TOKENS;
        bool last_in_page = lane == COLIBRI_PAGE_TOKENS - 1 || row + 1 == batch->n_rows || batch->sequences[row + 1] != batch->sequences[row];
        if (!last_in_page) continue; /* lanes before it are about to be written */
        colibri_cut_page(ctx, (size_t)page, lane + 1);
        ctx->page_fill[page] = (uint8_t)(lane + 1);
    }
}

size_t colibri_kv_page_bytes(const colibri_context_t *ctx) { return ctx->page_bytes; }

/* The error text belongs to the thread that owns the context, so a save that fails says no more than its code. */
int colibri_kv_save(colibri_context_t *ctx, uint32_t page, void *COLIBRI_RESTRICT buf, size_t buf_bytes, uint64_t *checksum) {
    if (page >= ctx->n_pages || !buf || !checksum || buf_bytes != ctx->page_bytes) return COLIBRI_E_INVALID;
    memcpy(buf, colibri_page(ctx, page), ctx->page_bytes);
    *checksum = ctx->kernels->checksum(buf, ctx->page_bytes);
    return COLIBRI_OK;
}

static int check_page(struct colibri_context *ctx, const char *name, uint32_t page, uint32_t n_tokens) {
    ctx->error[0] = 0;
    if (page >= ctx->n_pages)
        return colibri_fail(colibri_error_of(ctx), COLIBRI_E_INVALID, "%s: %" PRIu32 " is not in 0..%" PRIu32, name, page, ctx->n_pages - 1);
    if (n_tokens == 0 || n_tokens > COLIBRI_PAGE_TOKENS)
        return colibri_fail(colibri_error_of(ctx), COLIBRI_E_INVALID, "n_tokens: %" PRIu32 " is not in 1..%d", n_tokens, COLIBRI_PAGE_TOKENS);
    return COLIBRI_OK;
}

int colibri_kv_load(colibri_context_t *ctx, uint32_t page, uint32_t n_tokens, const void *COLIBRI_RESTRICT buf, size_t buf_bytes,
                    uint64_t checksum) {
    int code = check_page(ctx, "page", page, n_tokens);
    if (code) return code;
    if (!buf || buf_bytes != ctx->page_bytes)
        return colibri_fail(colibri_error_of(ctx), COLIBRI_E_INVALID, "buf_bytes: a page takes %zu, got %zu", ctx->page_bytes, buf_bytes);
    /* The copy is what is checked, so that nobody can change it in between. */
    memcpy(colibri_page(ctx, page), buf, ctx->page_bytes);
    ctx->page_fill[page] = COLIBRI_PAGE_TOKENS;
    size_t begin = (size_t)page * COLIBRI_PAGE_TOKENS;
    uint64_t actual = ctx->kernels->checksum(colibri_page(ctx, page), ctx->page_bytes);
    if (actual != checksum) {
        colibri_cut_page(ctx, page, 0);
        ctx->own_length = colibri_smaller(ctx->own_length, begin);
        return colibri_fail(colibri_error_of(ctx), COLIBRI_E_CHECKSUM, "page %" PRIu32 ": checksum %016" PRIx64 ", its bytes have %016" PRIx64, page,
                            checksum, actual);
    }
    colibri_cut_page(ctx, page, n_tokens);
    if (begin <= ctx->own_length) ctx->own_length = colibri_smaller(begin + n_tokens, ctx->max_context);
    return COLIBRI_OK;
}

int colibri_kv_copy(colibri_context_t *ctx, uint32_t to_page, uint32_t from_page, uint32_t n_tokens) {
    int code;
    if ((code = check_page(ctx, "to_page", to_page, n_tokens)) || (code = check_page(ctx, "from_page", from_page, n_tokens))) return code;
    if (n_tokens > ctx->page_fill[from_page])
        return colibri_fail(colibri_error_of(ctx), COLIBRI_E_INVALID, "n_tokens: %" PRIu32 ", page %" PRIu32 " holds %d", n_tokens, from_page,
                            ctx->page_fill[from_page]);
    if (to_page != from_page) {
        memcpy(colibri_page(ctx, to_page), colibri_page(ctx, from_page), ctx->page_bytes);
        ctx->page_fill[to_page] = ctx->page_fill[from_page];
    }
    colibri_cut_page(ctx, to_page, n_tokens);
    return COLIBRI_OK;
}
