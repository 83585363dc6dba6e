/*
 * What a batch must fulfil, checked in full before a step changes anything.
 *
 * Pages carry their fill, so the check also holds the page table to account: a row may only attend to positions that were written, and no
 * page that one sequence writes may be in the hands of another.
 */
#include <inttypes.h>

#include "context.h"

static int invalid(struct colibri_context *ctx, size_t row, const char *what, int64_t value, int64_t limit) {
    return colibri_fail(colibri_error_of(ctx), COLIBRI_E_INVALID, "row %zu: %s %" PRId64 " is not in 0..%" PRId64, row, what, value, limit);
}

static int check_counts(struct colibri_context *ctx, const colibri_batch_t *batch) {
    struct colibri_error error = colibri_error_of(ctx);
    if (!batch || batch->struct_bytes != sizeof *batch)
        return colibri_fail(error, COLIBRI_E_INVALID, "batch: struct_bytes must be %zu", sizeof *batch);
    if (batch->n_rows == 0 || batch->n_sequences == 0 || batch->n_sequences > batch->n_rows)
        return colibri_fail(error, COLIBRI_E_INVALID, "batch: %zu rows in %zu sequences", batch->n_rows, batch->n_sequences);
    if (batch->n_rows > ctx->max_rows)
        return colibri_fail(error, COLIBRI_E_CAPACITY, "n_rows: %zu, the context was opened for %" PRIu32, batch->n_rows, ctx->max_rows);
    if (!batch->tokens || !batch->positions || !batch->sequences || !batch->flags || !batch->page_starts || !batch->pages || !batch->row_status)
        return colibri_fail(error, COLIBRI_E_INVALID, "batch: an array that must be there is NULL");
    return COLIBRI_OK;
}

static int check_row(struct colibri_context *ctx, const colibri_batch_t *batch, size_t row) {
    int32_t vocabulary = (int32_t)ctx->model->header.vocabulary, token = batch->tokens[row], position = batch->positions[row];
    if (token < 0 || token >= vocabulary) return invalid(ctx, row, "token", token, vocabulary - 1);
    if (position < 0) return invalid(ctx, row, "position", position, (int64_t)ctx->max_context - 1);
    if ((uint32_t)position >= ctx->max_context)
        return colibri_fail(colibri_error_of(ctx), COLIBRI_E_CAPACITY, "row %zu: position %" PRId32 ", the context was opened for %" PRIu32, row,
                            position, ctx->max_context);
    if (batch->flags[row] & ~(COLIBRI_ROW_LOGITS | COLIBRI_ROW_SCORE)) return invalid(ctx, row, "flags", batch->flags[row], 3);
    if (!(batch->flags[row] & COLIBRI_ROW_SCORE)) return COLIBRI_OK;
    if (!batch->targets || !batch->logprobs)
        return colibri_fail(colibri_error_of(ctx), COLIBRI_E_INVALID, "row %zu: scored, but targets or logprobs is NULL", row);
    if (batch->targets[row] < 0 || batch->targets[row] >= vocabulary) return invalid(ctx, row, "target", batch->targets[row], vocabulary - 1);
    return COLIBRI_OK;
}

/* Rows of a sequence together, at consecutive positions, sequences from 0 on without a gap. */
static int check_order(struct colibri_context *ctx, const colibri_batch_t *batch, size_t row) {
    int32_t before = row ? batch->sequences[row - 1] : -1, sequence = batch->sequences[row];
    if (sequence != before && sequence != before + 1)
        return colibri_fail(colibri_error_of(ctx), COLIBRI_E_INVALID, "row %zu: sequence %" PRId32 " after %" PRId32, row, sequence, before);
    if (sequence == before && batch->positions[row] != batch->positions[row - 1] + 1)
        return colibri_fail(colibri_error_of(ctx), COLIBRI_E_INVALID, "row %zu: position %" PRId32 " after %" PRId32 " of the same sequence", row,
                            batch->positions[row], batch->positions[row - 1]);
    if (row + 1 == batch->n_rows && (size_t)sequence + 1 != batch->n_sequences)
        return colibri_fail(colibri_error_of(ctx), COLIBRI_E_INVALID, "n_sequences: %zu, the rows have %" PRId32, batch->n_sequences, sequence + 1);
    return COLIBRI_OK;
}

static int check_rows(struct colibri_context *ctx, const colibri_batch_t *batch) {
    size_t n_held = 0;
    for (size_t row = 0; row < batch->n_rows; row++) {
        int code;
        if ((code = check_row(ctx, batch, row)) || (code = check_order(ctx, batch, row))) return code;
        n_held += (batch->flags[row] & COLIBRI_ROW_LOGITS) != 0;
    }
    if (n_held > ctx->max_logits)
        return colibri_fail(colibri_error_of(ctx), COLIBRI_E_CAPACITY, "flags: %zu rows want logits, the context was opened for %" PRIu32, n_held,
                            ctx->max_logits);
    return COLIBRI_OK;
}

/* The rows [first, end) of one sequence, and its pages. */
struct piece {
    int32_t sequence;
    size_t first, end;
    const int32_t *pages;
    size_t n_pages;
};

static struct piece next_piece(const colibri_batch_t *batch, size_t first) {
    int32_t sequence = batch->sequences[first];
    size_t end = first;
    while (end < batch->n_rows && batch->sequences[end] == sequence) end++;
    int32_t begin = batch->page_starts[sequence];
    return (struct piece){sequence, first, end, batch->pages + begin, (size_t)(batch->page_starts[sequence + 1] - begin)};
}

static int check_page_starts(struct colibri_context *ctx, const colibri_batch_t *batch) {
    for (size_t i = 0; i <= batch->n_sequences; i++)
        if (batch->page_starts[i] < (i ? batch->page_starts[i - 1] : 0))
            return colibri_fail(colibri_error_of(ctx), COLIBRI_E_INVALID, "page_starts: %" PRId32 " at %zu goes back", batch->page_starts[i], i);
    return COLIBRI_OK;
}

/* Pages that exist, and hold every position before the first row. */
static int check_pages(struct colibri_context *ctx, const colibri_batch_t *batch, const struct piece *piece) {
    struct colibri_error error = colibri_error_of(ctx);
    int32_t first = batch->positions[piece->first], last = batch->positions[piece->end - 1];
    size_t needed = (size_t)last / COLIBRI_PAGE_TOKENS + 1;
    if (piece->n_pages < needed)
        return colibri_fail(error, COLIBRI_E_INVALID, "sequence %" PRId32 ": position %" PRId32 " needs %zu pages, got %zu", piece->sequence, last,
                            needed, piece->n_pages);
    for (size_t i = 0; i < needed; i++) {
        int32_t page = piece->pages[i];
        if (page < 0 || (uint32_t)page >= ctx->n_pages)
            return colibri_fail(error, COLIBRI_E_INVALID, "sequence %" PRId32 ": page %" PRId32 " is not in 0..%" PRIu32, piece->sequence, page,
                                ctx->n_pages - 1);
        size_t begin = i * COLIBRI_PAGE_TOKENS;
        size_t held = (size_t)first > begin ? colibri_smaller((size_t)first - begin, COLIBRI_PAGE_TOKENS) : 0;
        if (ctx->page_fill[page] < held)
            return colibri_fail(error, COLIBRI_E_INVALID, "sequence %" PRId32 ": page %" PRId32 " holds %d positions, %zu come before the batch",
                                piece->sequence, page, ctx->page_fill[page], held);
    }
    return COLIBRI_OK;
}

/* Claims the pages that the piece writes; −1 becomes its number. */
static int claim_pages(struct colibri_context *ctx, const colibri_batch_t *batch, const struct piece *piece) {
    size_t from = (size_t)batch->positions[piece->first] / COLIBRI_PAGE_TOKENS, to = (size_t)batch->positions[piece->end - 1] / COLIBRI_PAGE_TOKENS;
    for (size_t i = from; i <= to; i++) {
        int32_t *writer = &ctx->page_writer[piece->pages[i]];
        if (*writer >= 0)
            return colibri_fail(colibri_error_of(ctx), COLIBRI_E_INVALID, "sequence %" PRId32 ": page %" PRId32 " is already written by sequence %" PRId32,
                                piece->sequence, piece->pages[i], *writer);
        *writer = piece->sequence;
    }
    return COLIBRI_OK;
}

/* No page that the piece only reads is written by anyone. */
static int check_readers(struct colibri_context *ctx, const colibri_batch_t *batch, const struct piece *piece) {
    size_t from = (size_t)batch->positions[piece->first] / COLIBRI_PAGE_TOKENS;
    for (size_t i = 0; i < from; i++)
        if (ctx->page_writer[piece->pages[i]] >= 0)
            return colibri_fail(colibri_error_of(ctx), COLIBRI_E_INVALID, "sequence %" PRId32 ": reads page %" PRId32 ", which sequence %" PRId32 " writes",
                                piece->sequence, piece->pages[i], ctx->page_writer[piece->pages[i]]);
    return COLIBRI_OK;
}

static int check_ownership(struct colibri_context *ctx, const colibri_batch_t *batch) {
    int code = COLIBRI_OK;
    for (size_t row = 0; row < batch->n_rows && !code;) {
        struct piece piece = next_piece(batch, row);
        code = claim_pages(ctx, batch, &piece);
        row = piece.end;
    }
    for (size_t row = 0; row < batch->n_rows && !code;) {
        struct piece piece = next_piece(batch, row);
        code = check_readers(ctx, batch, &piece);
        row = piece.end;
    }
    for (size_t row = 0; row < batch->n_rows; row++) {
        int32_t page = batch->pages[batch->page_starts[batch->sequences[row]] + batch->positions[row] / COLIBRI_PAGE_TOKENS];
        ctx->page_writer[page] = -1;
    }
    return code;
}

int colibri_check_batch(struct colibri_context *ctx, const colibri_batch_t *batch) {
    int code;
    if ((code = check_counts(ctx, batch)) || (code = check_rows(ctx, batch)) || (code = check_page_starts(ctx, batch))) return code;
    for (size_t row = 0; row < batch->n_rows;) {
        struct piece piece = next_piece(batch, row);
        if ((code = check_pages(ctx, batch, &piece))) return code;
        row = piece.end;
    }
    return check_ownership(ctx, batch);
}
