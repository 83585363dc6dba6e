/*
 * colibri_infer: one sequence in the context's own pages 0, 1, 2, …, for programs that need no more than that.
 */
#include <inttypes.h>

#include "context.h"

static size_t capacity(const struct colibri_context *ctx) {
    return colibri_smaller((size_t)ctx->n_pages * COLIBRI_PAGE_TOKENS, ctx->max_context);
}

static int check_infer(struct colibri_context *ctx, const int32_t *input_ids, size_t n_input_ids, const int32_t *output_ids,
                       const size_t *n_output_ids, size_t max_output_len, float temperature) {
    struct colibri_error error = colibri_error_of(ctx);
    uint32_t vocabulary = ctx->model->header.vocabulary;
    if (!input_ids || n_input_ids == 0) return colibri_fail(error, COLIBRI_E_INVALID, "input_ids: empty");
    if (!n_output_ids || (max_output_len && !output_ids)) return colibri_fail(error, COLIBRI_E_INVALID, "output_ids, n_output_ids: NULL");
    if (!(temperature >= 0 && temperature <= 3.4e38f)) return colibri_fail(error, COLIBRI_E_INVALID, "temperature: %g", (double)temperature);
    for (size_t i = 0; i < n_input_ids; i++)
        if (input_ids[i] < 0 || (uint32_t)input_ids[i] >= vocabulary)
            return colibri_fail(error, COLIBRI_E_INVALID, "input_ids: %" PRId32 " at %zu is not in a vocabulary of %" PRIu32, input_ids[i], i, vocabulary);
    /* The last output token is not put into the pages. */
    size_t room = capacity(ctx) - ctx->own_length, n_later = max_output_len ? max_output_len - 1 : 0;
    if (n_input_ids > room || n_later > room - n_input_ids)
        return colibri_fail(error, COLIBRI_E_CAPACITY, "%zu input and %zu output tokens behind %zu, the context holds %zu", n_input_ids, max_output_len,
                            ctx->own_length, capacity(ctx));
    return COLIBRI_OK;
}

/* Runs n ≤ max_rows tokens behind the own sequence; logits of the last are held. */
static int extend(struct colibri_context *ctx, const int32_t *tokens, size_t n) {
    for (size_t i = 0; i < n; i++) {
        ctx->own_positions[i] = (int32_t)(ctx->own_length + i);
        ctx->own_sequences[i] = 0;
        ctx->own_flags[i] = i + 1 == n ? COLIBRI_ROW_LOGITS : COLIBRI_ROW_NONE;
    }
    int32_t page_starts[2] = {0, (int32_t)ctx->n_pages};
    colibri_batch_t batch = {
        .struct_bytes = sizeof batch,
        .n_rows = n,
        .n_sequences = 1,
        .tokens = tokens,
        .positions = ctx->own_positions,
        .sequences = ctx->own_sequences,
        .flags = ctx->own_flags,
        .page_starts = page_starts,
        .pages = ctx->own_pages,
        .row_status = ctx->own_status,
    };
    int code;
    if ((code = colibri_check_batch(ctx, &batch)) || (code = colibri_run_step(ctx, &batch))) return code;
    for (size_t i = 0; i < n; i++)
        if (ctx->own_status[i])
            return colibri_fail(colibri_error_of(ctx), ctx->own_status[i], "position %" PRId32 ": not finite", ctx->own_positions[i]);
    ctx->own_length += n;
    return COLIBRI_OK;
}

static int prefill(struct colibri_context *ctx, const int32_t *tokens, size_t n) {
    for (size_t done = 0; done < n;) {
        size_t chunk = colibri_smaller(n - done, ctx->max_rows);
        int code = extend(ctx, tokens + done, chunk);
        if (code) return code;
        done += chunk;
    }
    return COLIBRI_OK;
}

static bool is_end_token(const struct colibri_context *ctx, int32_t token) {
    const struct colibri_file_header *header = &ctx->model->header;
    for (uint32_t i = 0; i < header->n_end_tokens; i++)
        if (header->end_tokens[i] == token) return true;
    return false;
}

static int next_token(struct colibri_context *ctx, float temperature, int32_t *token) {
    colibri_sampling_t sampling = {.struct_bytes = sizeof sampling,
                                   .temperature = temperature,
                                   .top_p = 1,
                                   .repetition_penalty = 1,
                                   .seed = ctx->seed,
                                   .position = ctx->own_length};
    colibri_sampled_t sampled;
    int code = colibri_sample(ctx, 0, &sampling, &sampled);
    *token = sampled.token;
    return code;
}

static int generate(struct colibri_context *ctx, int32_t *output_ids, size_t *n_output_ids, size_t max_output_len, float temperature) {
    for (size_t n = 0; n < max_output_len; n++) {
        int code = n ? extend(ctx, &output_ids[n - 1], 1) : COLIBRI_OK;
        if (code || (code = next_token(ctx, temperature, &output_ids[n]))) return code;
        /* Another thread may be reading along; C17 has no atomic store to a plain size_t. */
        __atomic_store_n(n_output_ids, n + 1, __ATOMIC_RELEASE);
        if (is_end_token(ctx, output_ids[n])) break;
    }
    return COLIBRI_OK;
}

int colibri_infer(colibri_context_t *ctx, const int32_t *input_ids, size_t n_input_ids, int32_t *output_ids, size_t *n_output_ids,
                  size_t max_output_len, float temperature) {
    uint64_t fp_state = colibri_enter(ctx);
    int code = check_infer(ctx, input_ids, n_input_ids, output_ids, n_output_ids, max_output_len, temperature);
    if (!code) {
        __atomic_store_n(n_output_ids, 0, __ATOMIC_RELEASE);
        code = prefill(ctx, input_ids, n_input_ids);
        if (!code) code = generate(ctx, output_ids, n_output_ids, max_output_len, temperature);
    }
    colibri_leave(ctx, fp_state);
    return code;
}

size_t colibri_length(const colibri_context_t *ctx) { return ctx->own_length; }

int colibri_truncate(colibri_context_t *ctx, size_t n_tokens) {
    ctx->error[0] = 0;
    if (n_tokens > ctx->own_length)
        return colibri_fail(colibri_error_of(ctx), COLIBRI_E_INVALID, "n_tokens: %zu, the sequence has %zu", n_tokens, ctx->own_length);
    for (size_t page = n_tokens / COLIBRI_PAGE_TOKENS; page * COLIBRI_PAGE_TOKENS < ctx->own_length; page++) {
        size_t begin = page * COLIBRI_PAGE_TOKENS;
        colibri_cut_page(ctx, page, n_tokens > begin ? (unsigned)(n_tokens - begin) : 0);
    }
    ctx->own_length = n_tokens;
    return COLIBRI_OK;
}
