/*
 * colibri_infer and the context's own pages: stopping, going on, saving and loading, capacity, cancel from another thread.
 */
#include <pthread.h>
#include <stdatomic.h>

#include "check.h"
#include "sequences.h"
#include "tiny_model.h"

enum { N_PROMPT = 45, N_OUTPUT = 40 };

static struct tiny_model file;
static colibri_model_t *model;
static int32_t prompt[N_PROMPT];

static colibri_context_t *open_small(uint32_t n_pages) {
    return open_context(model, (colibri_context_options_t){.n_pages = n_pages, .max_rows = 32, .prefill_threads = 2, .decode_threads = 2, .seed = 9});
}

static size_t infer(colibri_context_t *ctx, const int32_t *input, size_t n_input, int32_t *output, size_t max_output, float temperature) {
    size_t n_output = 77;
    int code = colibri_infer(ctx, input, n_input, output, &n_output, max_output, temperature);
    if (code) FAIL("%s", colibri_last_error(ctx));
    return n_output;
}

static void test_saved_reopened_and_loaded_it_goes_on_as_if_nothing_had_happened(void) {
    for (float temperature = 0; temperature < 1; temperature += 0.8f) {
        int32_t whole[N_OUTPUT], first[N_OUTPUT], rest[N_OUTPUT];
        colibri_context_t *ctx = open_small(8);
        CHECK(infer(ctx, prompt, N_PROMPT, whole, N_OUTPUT, temperature) == N_OUTPUT);
        colibri_context_close(ctx);

        ctx = open_small(8);
        size_t half = N_OUTPUT / 2;
        CHECK(infer(ctx, prompt, N_PROMPT, first, half, temperature) == half);
        size_t length = colibri_length(ctx), page_bytes = colibri_kv_page_bytes(ctx), n_pages = (length + 31) / 32;
        CHECK(length == N_PROMPT + half - 1);
        uint8_t *saved = malloc(n_pages * page_bytes);
        uint64_t checksums[8];
        for (size_t page = 0; page < n_pages; page++)
            CHECK_CODE(colibri_kv_save(ctx, (uint32_t)page, saved + page * page_bytes, page_bytes, &checksums[page]), COLIBRI_OK);
        colibri_context_close(ctx);

        ctx = open_small(8);
        for (size_t page = 0; page < n_pages; page++) {
            size_t left = length - page * 32;
            CHECK_CODE(colibri_kv_load(ctx, (uint32_t)page, left < 32 ? (uint32_t)left : 32, saved + page * page_bytes, page_bytes, checksums[page]),
                       COLIBRI_OK);
        }
        CHECK(colibri_length(ctx) == length);
        CHECK(infer(ctx, &first[half - 1], 1, rest, N_OUTPUT - half, temperature) == N_OUTPUT - half);
        CHECK(memcmp(whole, first, half * sizeof *whole) == 0 && memcmp(whole + half, rest, half * sizeof *whole) == 0);
        colibri_context_close(ctx);
        free(saved);
    }
}

static void test_truncated_it_repeats_itself(void) {
    int32_t once[N_OUTPUT], again[N_OUTPUT];
    colibri_context_t *ctx = open_small(8);
    CHECK(infer(ctx, prompt, N_PROMPT, once, N_OUTPUT, 0) == N_OUTPUT);
    CHECK_CODE(colibri_truncate(ctx, N_PROMPT - 5), COLIBRI_OK);
    CHECK(infer(ctx, prompt + N_PROMPT - 5, 5, again, N_OUTPUT, 0) == N_OUTPUT);
    CHECK(memcmp(once, again, sizeof once) == 0);
    CHECK_CODE(colibri_truncate(ctx, 1000), COLIBRI_E_INVALID);
    CHECK_CODE(colibri_truncate(ctx, 0), COLIBRI_OK);
    CHECK(colibri_length(ctx) == 0);
    CHECK(infer(ctx, prompt, N_PROMPT, again, N_OUTPUT, 0) == N_OUTPUT);
    CHECK(memcmp(once, again, sizeof once) == 0);
    colibri_context_close(ctx);
}

static void test_it_stops_at_an_end_token_which_is_written(void) {
    int32_t output[N_OUTPUT];
    colibri_context_t *ctx = open_small(8);
    CHECK(infer(ctx, prompt, N_PROMPT, output, N_OUTPUT, 0) == N_OUTPUT);
    colibri_context_close(ctx);

    struct tiny_model ending = tiny_build(COLIBRI_FMT_F32, 0, 2);
    ending.header->end_tokens[0] = output[3]; /* the same model, but this is its end */
    tiny_seal(&ending);
    tiny_write(&ending, ending.n_bytes);
    colibri_model_t *other;
    CHECK_CODE(colibri_model_open(&other, ending.path, NULL, 0), COLIBRI_OK);
    ctx = open_context(other, (colibri_context_options_t){.n_pages = 8, .seed = 9});
    int32_t shorter[N_OUTPUT];
    size_t n = infer(ctx, prompt, N_PROMPT, shorter, N_OUTPUT, 0), expected = 0;
    while (output[expected++] != output[3]) continue;
    CHECK(n == expected && memcmp(output, shorter, n * sizeof *output) == 0);
    colibri_context_close(ctx);
    colibri_model_close(other);
    tiny_discard(&ending);
}

static void test_what_does_not_fit_is_refused_and_changes_nothing(void) {
    int32_t output[100];
    size_t n = 77;
    colibri_context_t *ctx = open_small(2);
    CHECK_CODE(colibri_infer(ctx, prompt, N_PROMPT, output, &n, 21, 0), COLIBRI_E_CAPACITY); /* 45 + 20 > 64 */
    CHECK(n == 77 && colibri_length(ctx) == 0 && strstr(colibri_last_error(ctx), "64"));
    CHECK_CODE(colibri_infer(ctx, prompt, 0, output, &n, 1, 0), COLIBRI_E_INVALID);
    CHECK_CODE(colibri_infer(ctx, (int32_t[]){TINY_VOCABULARY}, 1, output, &n, 1, 0), COLIBRI_E_INVALID);
    CHECK_CODE(colibri_infer(ctx, prompt, 1, output, &n, 1, -1), COLIBRI_E_INVALID);
    CHECK_CODE(colibri_infer(ctx, prompt, 1, output, &n, SIZE_MAX, 0), COLIBRI_E_CAPACITY);
    CHECK_CODE(colibri_infer(ctx, prompt, N_PROMPT, output, &n, 20, 0), COLIBRI_OK);
    CHECK(n == 20 && colibri_length(ctx) == 64);
    CHECK_CODE(colibri_infer(ctx, prompt, 1, output, &n, 0, 0), COLIBRI_E_CAPACITY);
    colibri_context_close(ctx);
}

static void test_a_context_shorter_than_its_pages_is_kept(void) {
    int32_t output[4];
    size_t n_output;
    colibri_context_t *ctx = open_context(model, (colibri_context_options_t){.n_pages = 8, .max_rows = 32, .max_context = 46});
    CHECK_CODE(colibri_infer(ctx, prompt, N_PROMPT, output, &n_output, 3, 0), COLIBRI_E_CAPACITY); /* the third needs the second's position, 46 */
    CHECK(colibri_length(ctx) == 0);
    CHECK(infer(ctx, prompt, N_PROMPT, output, 2, 0) == 2);
    CHECK(colibri_length(ctx) == 46);
    colibri_context_close(ctx);
}

static void test_a_damaged_page_is_refused_and_left_zero(void) {
    int32_t output[1];
    colibri_context_t *ctx = open_small(4);
    infer(ctx, prompt, N_PROMPT, output, 1, 0);
    size_t page_bytes = colibri_kv_page_bytes(ctx);
    uint8_t *page = malloc(page_bytes), *after = malloc(page_bytes);
    uint64_t checksum, zeros;
    CHECK_CODE(colibri_kv_save(ctx, 0, page, page_bytes, &checksum), COLIBRI_OK);
    CHECK(colibri_checksum(page, page_bytes) == checksum);
    page[page_bytes / 2] ^= 1;
    CHECK_CODE(colibri_kv_load(ctx, 0, 32, page, page_bytes, checksum), COLIBRI_E_CHECKSUM);
    CHECK_CODE(colibri_kv_save(ctx, 0, after, page_bytes, &zeros), COLIBRI_OK);
    for (size_t i = 0; i < page_bytes; i++) CHECK(after[i] == 0);
    CHECK(colibri_length(ctx) == 0);
    CHECK_CODE(colibri_kv_load(ctx, 4, 32, page, page_bytes, checksum), COLIBRI_E_INVALID);
    CHECK_CODE(colibri_kv_load(ctx, 0, 33, page, page_bytes, checksum), COLIBRI_E_INVALID);
    CHECK_CODE(colibri_kv_load(ctx, 0, 0, page, page_bytes, checksum), COLIBRI_E_INVALID);
    CHECK_CODE(colibri_kv_load(ctx, 0, 1, page, page_bytes - 1, checksum), COLIBRI_E_INVALID);
    CHECK_CODE(colibri_kv_save(ctx, 9, page, page_bytes, &checksum), COLIBRI_E_INVALID);
    CHECK_CODE(colibri_kv_copy(ctx, 3, 2, 1), COLIBRI_E_INVALID); /* page 2 is empty */
    free(page);
    free(after);
    colibri_context_close(ctx);
}

/* Bytes of a page depend on its tokens alone, whatever was in it before. */
static void test_lanes_without_a_token_are_zero(void) {
    int32_t output[1];
    colibri_context_t *ctx = open_small(4), *fresh = open_small(4);
    size_t page_bytes = colibri_kv_page_bytes(ctx);
    uint8_t *a = malloc(page_bytes), *b = malloc(page_bytes);
    uint64_t checksum_a, checksum_b;
    infer(ctx, prompt, N_PROMPT, output, 1, 0);
    colibri_truncate(ctx, 3);
    infer(fresh, prompt, 3, output, 1, 0);
    CHECK_CODE(colibri_kv_save(ctx, 0, a, page_bytes, &checksum_a), COLIBRI_OK);
    CHECK_CODE(colibri_kv_save(fresh, 0, b, page_bytes, &checksum_b), COLIBRI_OK);
    CHECK(checksum_a == checksum_b && memcmp(a, b, page_bytes) == 0);
    CHECK_CODE(colibri_kv_copy(fresh, 2, 0, 2), COLIBRI_OK);
    colibri_truncate(ctx, 2);
    CHECK_CODE(colibri_kv_save(ctx, 0, a, page_bytes, &checksum_a), COLIBRI_OK);
    CHECK_CODE(colibri_kv_save(fresh, 2, b, page_bytes, &checksum_b), COLIBRI_OK);
    CHECK(checksum_a == checksum_b && memcmp(a, b, page_bytes) == 0);
    free(a);
    free(b);
    colibri_context_close(ctx);
    colibri_context_close(fresh);
}

struct canceler {
    colibri_context_t *ctx;
    const size_t *n_output;
    atomic_bool stop;
};

/* Cancels once three tokens are out, and again until it is told to stop, since a cancel between steps would be as good. */
static void *cancel_after_three(void *argument) {
    struct canceler *canceler = argument;
    while (__atomic_load_n(canceler->n_output, __ATOMIC_ACQUIRE) < 3) continue;
    while (!atomic_load(&canceler->stop)) colibri_cancel(canceler->ctx);
    return NULL;
}

static void test_cancel_from_another_thread_keeps_what_was_written(void) {
    static int32_t output[900], again[900];
    size_t n = 0;
    colibri_context_t *ctx = open_small(32);
    colibri_cancel(ctx); /* nothing runs: no effect */
    struct canceler canceler = {.ctx = ctx, .n_output = &n};
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, cancel_after_three, &canceler) == 0);
    int code = colibri_infer(ctx, prompt, N_PROMPT, output, &n, 900, 0);
    atomic_store(&canceler.stop, true);
    pthread_join(thread, NULL);
    CHECK_CODE(code, COLIBRI_E_CANCELED);
    CHECK(n >= 3 && n < 900 && colibri_length(ctx) == N_PROMPT + n - 1);
    CHECK(infer(ctx, &output[n - 1], 1, output + n, 5, 0) == 5); /* and goes on */
    colibri_truncate(ctx, 0);
    CHECK(infer(ctx, prompt, N_PROMPT, again, n + 5, 0) == n + 5);
    CHECK(memcmp(output, again, (n + 5) * sizeof *output) == 0);
    colibri_context_close(ctx);
}

int main(void) {
    uint64_t random = 4;
    for (size_t i = 0; i < N_PROMPT; i++) prompt[i] = (int32_t)random_below(&random, TINY_VOCABULARY - 1);
    file = tiny_build(COLIBRI_FMT_F32, 0, 2);
    file.header->n_end_tokens = 0;
    tiny_seal(&file);
    tiny_write(&file, file.n_bytes);
    CHECK_CODE(colibri_model_open(&model, file.path, NULL, 0), COLIBRI_OK);
    test_saved_reopened_and_loaded_it_goes_on_as_if_nothing_had_happened();
    test_truncated_it_repeats_itself();
    test_what_does_not_fit_is_refused_and_changes_nothing();
    test_a_context_shorter_than_its_pages_is_kept();
    test_a_damaged_page_is_refused_and_left_zero();
    test_lanes_without_a_token_are_zero();
    test_cancel_from_another_thread_keeps_what_was_written();
    test_it_stops_at_an_end_token_which_is_written();
    colibri_model_close(model);
    tiny_discard(&file);
    return 0;
}
