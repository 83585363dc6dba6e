/* Runs sequences through colibri_forward: a batch that is put together piece by piece. */
#ifndef COLIBRI_TESTS_SEQUENCES_H
#define COLIBRI_TESTS_SEQUENCES_H

#include "check.h"
#include "colibri.h"

enum { BATCH_ROWS = 1024, BATCH_SEQUENCES = 64, BATCH_PAGES = 2048 };

struct test_batch {
    int32_t tokens[BATCH_ROWS], positions[BATCH_ROWS], sequences[BATCH_ROWS], targets[BATCH_ROWS], status[BATCH_ROWS];
    uint8_t flags[BATCH_ROWS];
    float logprobs[BATCH_ROWS];
    int32_t page_starts[BATCH_SEQUENCES + 1], pages[BATCH_PAGES];
    size_t n_rows, n_sequences;
};

static inline void batch_clear(struct test_batch *batch) { memset(batch, 0, sizeof *batch); }

/* Adds positions [begin, end) of a sequence whose tokens and pages stand at `tokens` and first_page, first_page + 1, … */
static inline void batch_add(struct test_batch *batch, const int32_t *tokens, size_t begin, size_t end, int32_t first_page) {
    size_t sequence = batch->n_sequences++;
    int32_t *at = &batch->page_starts[sequence + 1];
    *at = batch->page_starts[sequence];
    for (size_t page = 0; page * COLIBRI_PAGE_TOKENS < end; page++) batch->pages[(*at)++] = first_page + (int32_t)page;
    for (size_t position = begin; position < end; position++) {
        size_t row = batch->n_rows++;
        batch->tokens[row] = tokens[position];
        batch->positions[row] = (int32_t)position;
        batch->sequences[row] = (int32_t)sequence;
    }
}

static inline colibri_batch_t batch_view(struct test_batch *batch) {
    return (colibri_batch_t){
        .struct_bytes = sizeof(colibri_batch_t),
        .n_rows = batch->n_rows,
        .n_sequences = batch->n_sequences,
        .tokens = batch->tokens,
        .positions = batch->positions,
        .sequences = batch->sequences,
        .flags = batch->flags,
        .targets = batch->targets,
        .page_starts = batch->page_starts,
        .pages = batch->pages,
        .row_status = batch->status,
        .logprobs = batch->logprobs,
    };
}

static inline int batch_run(colibri_context_t *ctx, struct test_batch *batch) {
    colibri_batch_t view = batch_view(batch);
    return colibri_forward(ctx, &view);
}

static inline colibri_context_t *open_context(colibri_model_t *model, colibri_context_options_t options) {
    colibri_context_t *ctx = NULL;
    char error[512] = "";
    options.struct_bytes = sizeof options;
    int code = colibri_context_open(&ctx, model, &options, error, sizeof error);
    if (code != COLIBRI_OK) FAIL("%s", error);
    return ctx;
}

#endif
