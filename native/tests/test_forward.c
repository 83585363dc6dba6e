/*
 * A batch: what is refused and leaves no trace, rows that are not finite, the floating-point control word, scores.
 */
#include <math.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "check.h"
#include "sequences.h"
#include "tiny_model.h"

enum { V = TINY_VOCABULARY, POISON = 7 };

static struct test_batch batch;
static int32_t tokens[200];

static colibri_model_t *open_sealed(struct tiny_model *file) {
    colibri_model_t *model;
    tiny_seal(file);
    tiny_write(file, file->n_bytes);
    CHECK_CODE(colibri_model_open(&model, file->path, NULL, 0), COLIBRI_OK);
    return model;
}

static colibri_context_t *open_plain(colibri_model_t *model, uint32_t kv_format) {
    return open_context(model, (colibri_context_options_t){.n_pages = 16, .kv_format = kv_format, .max_rows = 100, .max_logits = 4, .max_context = 128,
                                                           .prefill_threads = 2, .decode_threads = 2});
}

/* Two good sequences, the second of 40 rows. */
static void good_batch(void) {
    batch_clear(&batch);
    batch_add(&batch, tokens, 0, 3, 0);
    batch_add(&batch, tokens, 0, 40, 4);
    batch.flags[2] = batch.flags[42] = COLIBRI_ROW_LOGITS;
}

static void test_a_bad_batch_is_refused_by_name_and_changes_nothing(void) {
    struct tiny_model file;
    colibri_model_t *model = tiny_open(&file, COLIBRI_FMT_F32, 0, 1);
    colibri_context_t *ctx = open_plain(model, 0);
    size_t page_bytes = colibri_kv_page_bytes(ctx);
    uint8_t *page = malloc(page_bytes);
    uint64_t empty, after;
    CHECK_CODE(colibri_kv_save(ctx, 0, page, page_bytes, &empty), COLIBRI_OK);
#define REFUSED(change, expected, word)                                                                       \
    do {                                                                                                      \
        good_batch();                                                                                         \
        colibri_batch_t view = batch_view(&batch);                                                            \
        change;                                                                                               \
        CHECK_CODE(colibri_forward(ctx, &view), expected);                                                    \
        if (!strstr(colibri_last_error(ctx), word)) FAIL("\"%s\" does not name %s", colibri_last_error(ctx), word); \
    } while (0)
    REFUSED(view.struct_bytes--, COLIBRI_E_INVALID, "struct_bytes");
    REFUSED(view.n_rows = 0, COLIBRI_E_INVALID, "rows");
    REFUSED(view.n_rows = 101, COLIBRI_E_CAPACITY, "n_rows");
    REFUSED(view.n_sequences = 3, COLIBRI_E_INVALID, "n_sequences");
    REFUSED(view.pages = NULL, COLIBRI_E_INVALID, "NULL");
    REFUSED(batch.tokens[42] = V, COLIBRI_E_INVALID, "token");
    REFUSED(batch.tokens[0] = -1, COLIBRI_E_INVALID, "token");
    REFUSED(batch.positions[1] = 0, COLIBRI_E_INVALID, "position");
    REFUSED(batch.positions[0] = -1, COLIBRI_E_INVALID, "position");
    REFUSED(batch.positions[0] = 128, COLIBRI_E_CAPACITY, "position");
    REFUSED(batch.sequences[0] = 1, COLIBRI_E_INVALID, "sequence");
    REFUSED(batch.flags[0] = 4, COLIBRI_E_INVALID, "flags");
    REFUSED(memset(batch.flags, 1, 5), COLIBRI_E_CAPACITY, "flags");
    REFUSED((batch.flags[0] = COLIBRI_ROW_SCORE, view.targets = NULL), COLIBRI_E_INVALID, "targets");
    REFUSED((batch.flags[0] = COLIBRI_ROW_SCORE, batch.targets[0] = V), COLIBRI_E_INVALID, "target");
    REFUSED(batch.page_starts[1] = -1, COLIBRI_E_INVALID, "page_starts");
    REFUSED(batch.page_starts[2] = 2, COLIBRI_E_INVALID, "needs 2 pages");
    REFUSED(batch.pages[2] = 16, COLIBRI_E_INVALID, "page 16");
    REFUSED(batch.pages[2] = batch.pages[0], COLIBRI_E_INVALID, "already written");
    REFUSED(batch.pages[2] = batch.pages[1], COLIBRI_E_INVALID, "already written");
    REFUSED((batch.positions[0] = 5, batch.positions[1] = 6, batch.positions[2] = 7), COLIBRI_E_INVALID, "holds 0 positions");
#undef REFUSED
    CHECK_CODE(colibri_kv_save(ctx, 0, page, page_bytes, &after), COLIBRI_OK);
    CHECK(empty == after && colibri_logits(ctx, 0) == NULL);
    good_batch();
    CHECK_CODE(batch_run(ctx, &batch), COLIBRI_OK);
    CHECK(colibri_last_error(ctx)[0] == 0 && colibri_logits(ctx, 1) && !colibri_logits(ctx, 2));

    batch_clear(&batch); /* one reads page 4, which the other writes */
    batch_add(&batch, tokens, 32, 33, 4);
    batch_add(&batch, tokens, 3, 4, 4);
    batch.pages[0] = 4, batch.pages[1] = 9;
    CHECK_CODE(batch_run(ctx, &batch), COLIBRI_E_INVALID);
    CHECK(strstr(colibri_last_error(ctx), "reads page 4"));
    free(page);
    colibri_context_close(ctx);
    colibri_model_close(model);
    tiny_discard(&file);
}

/* Logits of the last row of 40 good tokens, while a neighbour holds `neighbour` as its second token. */
static void run_beside(colibri_context_t *ctx, int32_t neighbour, float *out, int expected_status) {
    const int32_t bad[] = {1, neighbour, 2};
    batch_clear(&batch);
    batch_add(&batch, bad, 0, 1, 0);
    batch_add(&batch, tokens, 0, 40, 4);
    batch_add(&batch, bad + 1, 0, 1, 8);
    batch.flags[40] = batch.flags[41] = COLIBRI_ROW_LOGITS;
    CHECK_CODE(batch_run(ctx, &batch), COLIBRI_OK);
    for (size_t row = 0; row < 41; row++) CHECK(batch.status[row] == COLIBRI_OK);
    CHECK_CODE(batch.status[41], expected_status);
    memcpy(out, colibri_logits(ctx, 0), V * sizeof *out);
}

static void test_a_row_that_is_not_finite_is_flagged_and_its_neighbours_keep_their_bits(void) {
    for (int format = COLIBRI_KV_F32; format <= COLIBRI_KV_F16; format++) {
        struct tiny_model file = tiny_build(COLIBRI_FMT_F32, 0, 1);
        *tiny_weight(&file, COLIBRI_T_EMBEDDING, COLIBRI_FILE_NO_LAYER, POISON, 5) = NAN;
        colibri_model_t *model = open_sealed(&file);
        colibri_context_t *ctx = open_plain(model, (uint32_t)format);
        float clean[V], beside[V];
        run_beside(ctx, 3, clean, COLIBRI_OK);
        run_beside(ctx, POISON, beside, COLIBRI_E_NUMERIC);
        CHECK(memcmp(clean, beside, sizeof clean) == 0);
        colibri_sampling_t sampling = {.struct_bytes = sizeof sampling, .top_p = 1, .repetition_penalty = 1};
        colibri_sampled_t sampled;
        CHECK_CODE(colibri_sample(ctx, 0, &sampling, &sampled), COLIBRI_OK);
        CHECK_CODE(colibri_sample(ctx, 1, &sampling, &sampled), COLIBRI_E_NUMERIC);
        int32_t output[4];
        size_t n_output;
        CHECK_CODE(colibri_infer(ctx, (int32_t[]){1, POISON, 2}, 3, output, &n_output, 4, 0), COLIBRI_E_NUMERIC);
        CHECK(colibri_length(ctx) == 0);
        colibri_context_close(ctx);
        colibri_model_close(model);
        tiny_discard(&file);
    }
}

/* Only the head's norm can see what the last layer's experts have done. */
static void test_a_row_that_overflows_in_the_last_layer_is_flagged(void) {
    struct tiny_model file = tiny_build(COLIBRI_FMT_F32, COLIBRI_ARCH_SHARED_EXPERT, 1);
    tiny_scale(&file, COLIBRI_T_SHARED_DOWN, TINY_LAYERS - 1, 1e38f);
    colibri_model_t *model = open_sealed(&file);
    colibri_context_t *ctx = open_plain(model, 0);
    colibri_sampling_t sampling = {.struct_bytes = sizeof sampling, .top_p = 1, .repetition_penalty = 1};
    colibri_sampled_t sampled;
    good_batch();
    CHECK_CODE(batch_run(ctx, &batch), COLIBRI_OK);
    CHECK_CODE(batch.status[2], COLIBRI_E_NUMERIC);
    CHECK_CODE(batch.status[42], COLIBRI_E_NUMERIC);
    CHECK_CODE(colibri_sample(ctx, 0, &sampling, &sampled), COLIBRI_E_NUMERIC);
    colibri_context_close(ctx);
    colibri_model_close(model);
    tiny_discard(&file);
}

static void test_values_too_large_for_the_kv_format_are_counted_and_flag_their_row(void) {
    struct tiny_model file = tiny_build(COLIBRI_FMT_F32, 0, 1);
    tiny_scale(&file, COLIBRI_T_V, 1, 1e6f);
    colibri_model_t *model = open_sealed(&file);
    colibri_context_t *narrow = open_plain(model, COLIBRI_KV_F16), *wide = open_plain(model, COLIBRI_KV_F32);
    good_batch();
    CHECK_CODE(batch_run(narrow, &batch), COLIBRI_OK);
    for (size_t row = 0; row < batch.n_rows; row++) CHECK_CODE(batch.status[row], COLIBRI_E_NUMERIC);
    CHECK(colibri_context_kv_overflows(narrow) >= batch.n_rows);
    CHECK_CODE(batch_run(wide, &batch), COLIBRI_OK);
    for (size_t row = 0; row < batch.n_rows; row++) CHECK_CODE(batch.status[row], COLIBRI_OK);
    CHECK(colibri_context_kv_overflows(wide) == 0);
    colibri_context_close(narrow);
    colibri_context_close(wide);
    colibri_model_close(model);
    tiny_discard(&file);
}

static uint64_t checksum_of_page(colibri_context_t *ctx, uint32_t page, uint8_t *buffer) {
    uint64_t checksum;
    CHECK_CODE(colibri_kv_save(ctx, page, buffer, colibri_kv_page_bytes(ctx), &checksum), COLIBRI_OK);
    return checksum;
}

/* Pages go from sequence to sequence, and a page may be loaded in part: what was there before leaves no trace. */
static void test_a_page_that_is_used_again_has_the_bytes_of_a_fresh_one(void) {
    struct tiny_model file;
    colibri_model_t *model = tiny_open(&file, COLIBRI_FMT_F32, 0, 1);
    colibri_context_t *ctx = open_plain(model, 0), *fresh = open_plain(model, 0);
    size_t page_bytes = colibri_kv_page_bytes(ctx);
    uint8_t *page = malloc(page_bytes);

    batch_clear(&batch);
    batch_add(&batch, tokens + 50, 0, 32, 3);
    batch_add(&batch, tokens, 0, 32, 4);
    CHECK_CODE(batch_run(ctx, &batch), COLIBRI_OK);
    uint64_t whole = checksum_of_page(ctx, 4, page);
    CHECK_CODE(colibri_kv_load(ctx, 5, 6, page, page_bytes, whole), COLIBRI_OK);

    batch_clear(&batch);
    batch_add(&batch, tokens, 0, 6, 3);
    CHECK_CODE(batch_run(ctx, &batch), COLIBRI_OK);
    CHECK_CODE(batch_run(fresh, &batch), COLIBRI_OK);
    uint64_t expected = checksum_of_page(fresh, 3, page);
    CHECK(expected != whole);
    CHECK(checksum_of_page(ctx, 3, page) == expected);
    CHECK(checksum_of_page(ctx, 5, page) == expected);
    free(page);
    colibri_context_close(fresh);
    colibri_context_close(ctx);
    colibri_model_close(model);
    tiny_discard(&file);
}

static void test_equal_router_logits_choose_the_lower_experts(void) {
    struct tiny_model file = tiny_build(COLIBRI_FMT_F32, 0, 1);
    tiny_scale(&file, COLIBRI_T_ROUTER, 0, 0);
    colibri_model_t *model = open_sealed(&file);
    colibri_context_t *ctx = open_plain(model, 0);
    int32_t routing[43 * TINY_LAYERS * TINY_TOP_K];
    good_batch();
    colibri_batch_t view = batch_view(&batch);
    view.routing = routing;
    CHECK_CODE(colibri_forward(ctx, &view), COLIBRI_OK);
    for (size_t row = 0; row < 43; row++) CHECK(routing[row * TINY_LAYERS * TINY_TOP_K] == 0 && routing[row * TINY_LAYERS * TINY_TOP_K + 1] == 1);
    colibri_context_close(ctx);
    colibri_model_close(model);
    tiny_discard(&file);
}

static void test_scores_are_the_log_probabilities_of_the_targets(void) {
    struct tiny_model file;
    colibri_model_t *model = tiny_open(&file, COLIBRI_FMT_F32, 0, 1);
    colibri_context_t *ctx = open_plain(model, 0);
    batch_clear(&batch);
    batch_add(&batch, tokens, 0, 40, 0);
    for (size_t row = 0; row < 40; row++) batch.flags[row] = COLIBRI_ROW_SCORE, batch.targets[row] = tokens[row + 1];
    batch.flags[3] = batch.flags[39] = COLIBRI_ROW_SCORE | COLIBRI_ROW_LOGITS;
    CHECK_CODE(batch_run(ctx, &batch), COLIBRI_OK);
    const size_t held[] = {3, 39};
    for (size_t i = 0; i < 2; i++) {
        const float *logits = colibri_logits(ctx, i);
        double sum = 0;
        for (int id = 0; id < V; id++) sum += exp((double)logits[id]);
        CHECK(fabs((double)batch.logprobs[held[i]] - ((double)logits[tokens[held[i] + 1]] - log(sum))) < 1e-5);
    }
    float scored = batch.logprobs[20];
    for (size_t row = 0; row < 40; row++) batch.flags[row] = row == 20 ? COLIBRI_ROW_SCORE | COLIBRI_ROW_LOGITS : 0;
    CHECK_CODE(batch_run(ctx, &batch), COLIBRI_OK);
    CHECK(memcmp(&scored, &batch.logprobs[20], sizeof scored) == 0); /* held or not, the same bits */
    colibri_context_close(ctx);
    colibri_model_close(model);
    tiny_discard(&file);
}

/* A model whose V is subnormal: with flush-to-zero its attention would vanish. */
static void test_a_caller_s_flush_to_zero_changes_nothing_and_is_restored(void) {
#if defined(__x86_64__)
    struct tiny_model file = tiny_build(COLIBRI_FMT_F32, 0, 1);
    for (uint32_t layer = 0; layer < TINY_LAYERS; layer++) tiny_scale(&file, COLIBRI_T_V, layer, 1e-39f), tiny_scale(&file, COLIBRI_T_O, layer, 1e38f);
    colibri_model_t *model = open_sealed(&file);
    colibri_context_t *ctx = open_plain(model, COLIBRI_KV_F32);
    float expected[V];
    const unsigned flushing = _mm_getcsr() | 0x8040; /* flush-to-zero, denormals-are-zero */
    good_batch();
    CHECK_CODE(batch_run(ctx, &batch), COLIBRI_OK);
    memcpy(expected, colibri_logits(ctx, 1), sizeof expected);
    _mm_setcsr(flushing);
    CHECK_CODE(batch_run(ctx, &batch), COLIBRI_OK);
    unsigned after = _mm_getcsr();
    _mm_setcsr(flushing & ~0x8040u);
    CHECK((after & 0x8040) == 0x8040);
    CHECK(memcmp(expected, colibri_logits(ctx, 1), sizeof expected) == 0);
    colibri_context_close(ctx);

    _mm_setcsr(flushing); /* which the threads of the pool inherit */
    ctx = open_plain(model, COLIBRI_KV_F32);
    _mm_setcsr(flushing & ~0x8040u);
    for (int i = 0; i < 20; i++) { /* some thread takes part in some of them */
        CHECK_CODE(batch_run(ctx, &batch), COLIBRI_OK);
        CHECK(memcmp(expected, colibri_logits(ctx, 1), sizeof expected) == 0);
    }
    colibri_context_close(ctx);
    colibri_model_close(model);
    tiny_discard(&file);
#endif
}

/* The thread sanitizer takes the mapping of a zero page in place of a lost one for a write that races with the reads of other threads. */
#ifdef __SANITIZE_THREAD__
enum { THREADS_THAT_LOSE_PAGES = 1 };
#else
enum { THREADS_THAT_LOSE_PAGES = 2 };
#endif

static void test_a_file_cut_while_it_is_served_is_an_error_and_no_signal(void) {
    struct tiny_model file;
    colibri_model_t *model = tiny_open(&file, COLIBRI_FMT_Q8, 0, 5);
    colibri_context_t *ctx = open_context(model, (colibri_context_options_t){.n_pages = 1, .prefill_threads = THREADS_THAT_LOSE_PAGES});
    batch_clear(&batch);
    batch_add(&batch, tokens, 0, 8, 0);
    CHECK(truncate(file.path, 1) == 0);
    CHECK_CODE(batch_run(ctx, &batch), COLIBRI_E_IO);
    CHECK(strstr(colibri_last_error(ctx), file.path) != NULL);
    colibri_context_close(ctx);
    colibri_model_close(model);
    tiny_discard(&file);
}

int main(void) {
    uint64_t random = 4;
    for (size_t i = 0; i < 200; i++) {
        tokens[i] = (int32_t)random_below(&random, V);
        if (tokens[i] == POISON) tokens[i]++;
    }
    test_a_bad_batch_is_refused_by_name_and_changes_nothing();
    test_a_row_that_is_not_finite_is_flagged_and_its_neighbours_keep_their_bits();
    test_a_row_that_overflows_in_the_last_layer_is_flagged();
    test_values_too_large_for_the_kv_format_are_counted_and_flag_their_row();
    test_a_page_that_is_used_again_has_the_bytes_of_a_fresh_one();
    test_equal_router_logits_choose_the_lower_experts();
    test_scores_are_the_log_probabilities_of_the_targets();
    test_a_caller_s_flush_to_zero_changes_nothing_and_is_restored();
    test_a_file_cut_while_it_is_served_is_an_error_and_no_signal();
    return 0;
}
